"""The report says what the tables hold, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fake_cells
import pytest

from pipeline import cells, report, tables
from pipeline.study import Params
from specdec.errors import InputError
from specdec.theory import expected_tokens_per_round

FOLDER = Path("plots/fake")
BENCHMARK = cells.hf_benchmark("fake", "small_int8", 4)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["report.py"])
    return fake_cells.write(tmp_path)


def text() -> str:
    tables.main()
    return report.report("fake", FOLDER)


def section(whole: str, heading: str) -> str:
    return whole.split(f" {heading}\n")[1].split("\n#")[0]


def table(markdown: str) -> list[dict[str, str]]:
    """The rows of the first table of a text, by heading."""
    block = markdown[markdown.index("|") :].split("\n\n")[0]
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in block.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def verdict_of(pair: str, whole: str) -> str:
    (line,) = [line for line in report.readme_part(whole).splitlines() if line.startswith(f"- `{pair}`")]
    return line


def test_only_the_report_is_written_and_only_tables_are_read(study: Params) -> None:
    tables.main()
    shutil.rmtree("metrics")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    report.main()
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {FOLDER / "report.md"}
    assert before.items() <= after.items()
    report.main()
    assert (FOLDER / "report.md").read_bytes() == after[FOLDER / "report.md"]


def test_the_readme_part_holds_the_real_results_and_not_the_toy(study: Params) -> None:
    part = report.readme_part(text())
    assert [row["Draft (params)"] for row in table(part)] == ["int8 (135M)", "bf16 (135M)", "lookup"]
    assert "toy" not in part
    with pytest.raises(InputError, match="dvc repro report"):
        report.readme_part("no markers")


def test_a_row_holds_the_cells_numbers(study: Params) -> None:
    fake_cells.edit(BENCHMARK, hf_tokens_per_second=None, speedup=1.234, speedup_lo=1.1, speedup_hi=1.3)
    row = table(text())[0]
    record = cells.read_json(BENCHMARK)
    assert row["α"] == f"{record['alpha']:.3f}"
    assert row["acceptance rate"] == f"{record['draft_acceptance_rate']:.3f}"
    assert row["τ"] == f"{record['mean_acceptance_length']:.2f}"
    assert row["speed-up"] == "1.23 [1.10, 1.30]"
    assert row["HF generate tok/s"] == "–"


def test_the_header_names_machine_versions_and_amount_but_no_date(study: Params) -> None:
    first = text().split("table:begin -->\n\n")[1].splitlines()[0]
    for part in (
        "Imaginary CPU 9000",
        "2 threads",
        "torch 2.13.0",
        "float32",
        "12 prompts × 32 tokens",
        "Greedy decoding",
    ):
        assert part in first


def test_rows_that_differ_show_all_values_in_the_header(study: Params) -> None:
    fake_cells.edit(BENCHMARK, dtype="bfloat16", temperature=0.7, top_p=0.9)
    assert "bfloat16 / float32" in text()
    assert "Sampling at T = 0.7, top_p = 0.9 / Greedy decoding" in text()


def test_the_header_names_a_device_that_its_type_does_not(study: Params) -> None:
    assert "device cpu, float32" in text()
    for pair in study.study.pairs:
        fake_cells.edit(cells.hf_benchmark("fake", pair, 4), device="cuda", device_name="NVIDIA H200")
    assert "device cuda (NVIDIA H200), float32" in text()
    fake_cells.edit(BENCHMARK, device_name=None)
    assert "device cuda / cuda (NVIDIA H200), float32" in text()


NOISE = {"noise_floor": 1.0, "noise_floor_lo": 0.98, "noise_floor_hi": 1.01}


@pytest.mark.parametrize(
    ("value", "low", "high", "conclusion"),
    [
        (1.3, 1.2, 1.4, "1.30 [1.20, 1.40] times the speed of X: faster"),
        (0.7, 0.6, 0.8, "0.70 [0.60, 0.80] times the speed of X: slower"),
        (1.1, 0.9, 1.3, "1.10 [0.90, 1.30] times the speed of X: not distinguishable from 1"),
        (0.9, 0.8, 1.0, "0.90 [0.80, 1.00] times the speed of X: not distinguishable from 1"),
        (1.3, None, None, "1.30 [–] times the speed of X: too few prompts for an interval"),
        (None, None, None, "not compared with X"),
    ],
)
def test_words_follow_the_interval(value: float | None, low: float | None, high: float | None, conclusion: str) -> None:
    row = {"speedup": value, "speedup_lo": low, "speedup_hi": high}
    assert report.comparison(row | NOISE, "speedup", "X") == conclusion


@pytest.mark.parametrize(
    ("speedup", "noise", "conclusion"),
    [
        ((1.06, 1.03, 1.09), (1.0, 0.95, 1.01), "faster"),
        ((1.04, 1.03, 1.09), (1.0, 0.95, 1.01), "within the noise of this run"),
        ((0.96, 0.94, 0.98), (1.0, 0.99, 1.05), "within the noise of this run"),
        ((0.94, 0.92, 0.98), (1.0, 0.99, 1.05), "slower"),
        ((1.02, 0.99, 1.05), (1.0, 0.9, 1.1), "not distinguishable from 1"),
        ((1.06, 1.03, 1.09), (0.95, None, None), "faster"),
        ((1.04, 1.03, 1.09), (0.95, None, None), "within the noise of this run"),
        ((1.2, 1.1, 1.3), (None, None, None), "the noise of this run is unknown"),
        ((1.2, None, None), (None, None, None), "too few prompts for an interval"),
    ],
)
def test_faster_and_slower_are_said_only_beyond_the_noise(
    speedup: tuple[float | None, ...], noise: tuple[float | None, ...], conclusion: str
) -> None:
    values = dict(zip(("speedup", "speedup_lo", "speedup_hi"), speedup, strict=True))
    row = values | dict(zip(("noise_floor", "noise_floor_lo", "noise_floor_hi"), noise, strict=True))
    assert report.comparison(row, "speedup", "X").endswith(f"X: {conclusion}")


def test_the_verdict_follows_the_cells_own_noise(study: Params) -> None:
    ends = {"": 1.1, "_lo": 1.05, "_hi": 1.15}
    values = {f"{key}{end}": value for key in ("speedup", "speedup_over_fastest") for end, value in ends.items()}
    fake_cells.edit(BENCHMARK, **values, noise_floor_lo=0.8)
    line = verdict_of("small_int8", text())
    assert "within the noise of this run" in line and "faster" not in line.replace("fastest", "")
    fake_cells.edit(BENCHMARK, noise_floor_lo=0.98)
    assert "the fastest baseline: faster" in verdict_of("small_int8", text())


@pytest.mark.parametrize(("runs", "words"), [(1, "1 timed run gave"), (3, "3 timed runs gave")])
def test_runs_that_did_not_repeat_are_told(study: Params, runs: int, words: str) -> None:
    assert "repeatable" not in text()
    fake_cells.edit(BENCHMARK, unrepeatable_runs=runs)
    whole = text()
    assert f"Not repeatable: {words} other tokens" in verdict_of("small_int8", whole)
    assert "repeatable" not in verdict_of("small_bf16", whole)


def test_a_fastest_baseline_that_is_our_own_is_compared_once(study: Params) -> None:
    same = {f"speedup_over_fastest{end}": cells.read_json(BENCHMARK)[f"speedup{end}"] for end in ("", "_lo", "_hi")}
    fake_cells.edit(BENCHMARK, **same, fastest_baseline="own plain decoding")
    lines = report.readme_part(text()).splitlines()
    (line,) = [line for line in lines if line.startswith("- `small_int8`")]
    assert line.count("times the speed of") == 1 and "own plain decoding, the fastest baseline" in line


def test_identity_is_claimed_only_where_the_cell_claims_it(study: Params) -> None:
    for path in [cells.hf_benchmark("fake", pair, 4) for pair in study.study.pairs] + [cells.toy_benchmark()]:
        fake_cells.edit(path, identical="not checked")
    whole = text()
    assert "identical" not in whole and "lossless" not in whole.lower()
    fake_cells.edit(BENCHMARK, identical="identical but for 3 ties")
    assert [row["greedy output against plain"] for row in table(text())] == [
        "identical but for 3 ties",
        "not checked",
        "not checked",
    ]


def test_without_intervals_there_are_dashes(study: Params) -> None:
    for path in Path("metrics").rglob("*.json"):
        fake_cells.without_intervals(path)
    whole = text()
    assert all(row["speed-up"].endswith("[–]") for row in table(whole))
    assert "nan" not in whole and "None" not in whole
    assert "too few prompts" in whole


def test_undefined_values_are_dashes(study: Params) -> None:
    unknown = (
        "alpha",
        "draft_acceptance_rate",
        "peak_memory_bytes",
        "speedup",
        "speedup_over_fastest",
        "overhead_factor",
    )
    for pair in study.study.pairs:
        fake_cells.edit(cells.hf_benchmark("fake", pair, 4), **dict.fromkeys(unknown), identical=None, cpu=None)
    fake_cells.edit(cells.sweep_k("fake", "small_lookup", 1), alpha=None, iid_acceptance_length=None)
    whole = text()
    assert "nan" not in whole and "None" not in whole and "<NA>" not in whole
    assert "CPU –" in whole
    assert table(whole)[0]["α"] == "–"


def test_the_factors_printed_explain_the_speedup_printed(study: Params) -> None:
    for row in table(section(text(), "Why not more")):
        product = float(row["ideal"]) * float(row["i.i.d."]) * float(row["verification"]) * float(row["overhead"])
        assert product == pytest.approx(float(row["measured"]), rel=0.01)


def test_the_noise_floor_is_printed(study: Params) -> None:
    rows = table(section(text(), "Baselines and noise"))
    assert [row["noise"] for row in rows] == ["1.004 [0.994, 1.014]"] * 3


def test_how_often_hugging_face_gave_the_same_text_is_printed(study: Params) -> None:
    rows = table(section(text(), "Baselines and noise"))
    assert [row["HF output equal"] for row in rows] == ["11 of 12", "–", "11 of 12"]


def test_toy_findings_are_computed(study: Params) -> None:
    heading = "What the toy sweep shows beside the original's findings"
    rows = {row["quantity"]: row for row in table(section(text(), heading))}
    alpha, tau = cells.read_json(cells.toy_k(1))["alpha"], cells.read_json(cells.toy_k(8))["mean_acceptance_length"]
    gap = expected_tokens_per_round(alpha, 8) - tau
    assert next(iter(rows)).startswith("τ against the mean over rounds of (1 − α^(k_r+1)) / (1 − α), α of k = 1")
    here = [row["here"] for row in rows.values()]
    assert here[0] == f"at most {gap:.2f} token apart, at k = 8, where τ lies below"
    conditional = cells.read_json(cells.toy_k(8))["conditional_acceptance_per_position"]
    assert here[2] == f"{min(conditional):.3f} to {max(conditional):.3f}"
    assert here[3].startswith("0.33 at T = 0.2; acceptance rate ")
    assert here[4:] == ["0.960, limit 0.970", "0.980, limit 1"]
    assert "0.35" in rows[next(iter(rows))]["original"]


def test_toy_findings_follow_the_cells(study: Params) -> None:
    fake_cells.edit(cells.toy_k(8), mean_acceptance_length=20.0)
    fake_cells.edit(cells.toy_temperature(2.0), alpha_overlap=0.01)
    whole = text()
    assert "where τ lies above" in whole and "0.01 at T = 2;" in whole


def test_without_k_1_the_geometric_form_is_left_out(study: Params, tmp_path: Path) -> None:
    fake_cells.write(tmp_path, fake_cells.PARAMS.replace("k: [1, 2, 3, 4, 5, 6, 7, 8]", "k: [2, 4]"))
    assert "– (toy.k has no 1)" in text()


def test_sweeps_list_every_declared_cell(study: Params) -> None:
    whole = text()
    by_k = table(section(whole, "Acceptance against k"))
    assert [(row["pair"], int(row["k"])) for row in by_k] == [(p, k) for p in study.study.pairs for k in study.study.k]
    by_temperature = table(section(whole, "Toy pair against temperature"))
    assert [float(row["T"]) for row in by_temperature] == study.toy.temperature


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        (774_030_080, "m (774M)"),
        (1_711_376_384, "m (1.71B)"),
        (41_088, "m (41.1k)"),
        (12, "m (12)"),
        (None, "m"),
        (0, "m"),
    ],
)
def test_sizes_are_short(parameters: Any, shown: str) -> None:
    assert report.model("m", parameters) == shown


def test_a_bar_in_a_text_does_not_break_its_table(study: Params) -> None:
    fake_cells.edit(BENCHMARK, identical="a|b")
    assert r"a\|b" in text()


def test_a_missing_table_is_named(study: Params) -> None:
    with pytest.raises(InputError, match=r"^plots/fake/hf_benchmark\.csv cannot be read"):
        report.main()
