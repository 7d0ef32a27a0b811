"""The report says what the tables hold, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fake_cells
import pytest
from report_text import section, table

from pipeline import captions, cells, report, tables, wording
from pipeline.study import Params
from specdec.errors import InputError
from specdec.theory import expected_tokens_per_round

FOLDER = Path("plots/fake")
BENCHMARK = cells.hf_benchmark("fake", "small_int8", 4)
COMPARED = "Kernels, k and baselines in one run"
COSTS = "What a pass over several tokens costs"
STOPPING, IDENTITY = "Stopping the draft early", "Greedy identity in other number formats"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["report.py"])
    return fake_cells.write(tmp_path)


def text() -> str:
    tables.main()
    return report.report("fake", FOLDER)


def verdict_of(pair: str, whole: str) -> str:
    (line,) = [line for line in report.readme_part(whole).splitlines() if line.startswith(f"- `{pair}`,")]
    return line


def test_only_the_report_is_written_and_only_tables_and_figures_are_read(study: Params) -> None:
    tables.main()
    for name in captions.FIGURES:
        cells.write_text(FOLDER / f"{name}.svg", "<svg></svg>")
    shutil.rmtree("metrics")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    report.main()
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {FOLDER / "report.md", FOLDER / "report.html"}
    assert before.items() <= after.items()
    report.main()
    assert all(path.read_bytes() == after[path] for path in (FOLDER / "report.md", FOLDER / "report.html"))


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
    first = next(line for line in text().splitlines() if line.startswith("CPU "))
    for part in (
        "Imaginary CPU 9000",
        "2 threads",
        "torch 2.13.0",
        "float32",
        "12 prompts × 32 tokens",
        "Greedy decoding",
    ):
        assert part in first


def test_one_thread_is_one_thread(study: Params) -> None:
    fake_cells.edit(cells.toy_benchmark(), threads=1)
    whole = text()
    assert "1 thread, device" in section(whole, "Toy pair") and "2 threads, device" in report.readme_part(whole)
    fake_cells.edit(BENCHMARK, threads=1)
    assert "1 / 2 threads, device" in report.readme_part(text())


def test_the_header_names_block_verification(study: Params) -> None:
    assert "block verification" not in report.readme_part(text())
    for pair in study.study.pairs:
        fake_cells.edit(cells.hf_benchmark("fake", pair, 4), verifier="block")
    assert "Greedy decoding, block verification, 12 prompts" in text()
    fake_cells.edit(BENCHMARK, temperature=0.7)
    assert "Sampling at T = 0.7, block verification / Greedy decoding, block verification, 12" in text()


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
    assert wording.comparison(row | NOISE, "speedup", "X") == conclusion


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
    assert wording.comparison(row, "speedup", "X").endswith(f"X: {conclusion}")


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
    (line,) = [line for line in lines if line.startswith("- `small_int8`,")]
    assert line.count("times the speed of") == 1 and "own plain decoding, the fastest baseline" in line


def test_a10_identity_is_claimed_only_where_the_cell_claims_it(study: Params) -> None:
    timed = [cells.hf_benchmark("fake", pair, 4) for pair in study.study.pairs]
    timed += [cells.quantized_benchmark("fake", "small_int8", variant) for variant in study.study.kernel_variants]
    for path in [*timed, cells.toy_benchmark()]:
        fake_cells.edit(path, identical="not checked", identical_prompts=None)
    for path in (cells.comparison("fake", pair) for pair in study.study.comparisons):
        contestants = [
            c | {"identical": "not checked", "identical_prompts": None} for c in cells.read_json(path)["contestants"]
        ]
        fake_cells.edit(path, contestants=contestants)
    whole = text()
    of_timed_cells = whole.replace(section(whole, IDENTITY), "")
    assert "identical" not in of_timed_cells
    assert "lossless" not in whole.replace("Is it lossless here?** Not checked: no timed", "").lower()
    assert "In float32, 0 of 3 timed cells compare the two" in section(whole, IDENTITY)
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


def test_the_header_names_the_kernels(study: Params) -> None:
    assert "float32, default kernels; torch" in report.readme_part(text())
    fake_cells.edit(BENCHMARK, kernels="packed")
    assert "float32, packed / default kernels; torch" in report.readme_part(text())


def test_what_a_pass_costs_is_told_by_kernels(study: Params) -> None:
    told = section(text(), COSTS)
    rows = table(told)
    assert len(rows) == (3 + 2) * 3 * 2
    assert [tuple(rows[4].values())[:4]] == [("small_int8", "target small", "packed", "64")]
    one = 1000 * (0.03 + 64e-6)
    roof = 1000 * fake_cells.WEIGHT_BYTES / 20e9
    assert rows[4]["T(1), ms"] == f"{one:.1f} [{0.98 * one:.1f}, {1.02 * one:.1f}]"
    assert [rows[4][f"T({n}) / T(1)"] for n in (2, 5, 9, 16)] == ["1.10", "1.40", "1.80", "2.50"]
    assert rows[4]["T(1) / roof"] == f"{one / roof:.2f}"
    assert "Memory bandwidth 20.0 GB/s, arithmetic 100.0 GFLOP/s in float32." in told
    c = fake_cells.C["small_int8"]
    assert (
        f"- `small_int8`, behind 64 tokens: the target's T(1) is least with packed kernels, {50.064 / one:.2f} times as fast as "
        f"default; c = T_draft(1) / T_target(1) is {c:.3f} with default, {c:.3f} with joined, {c:.3f} with packed.\n"
    ) in told
    (lookup,) = [line for line in told.splitlines() if line.startswith("- `small_lookup`")]
    assert lookup.endswith("times as fast as default.")


def test_a_comparison_tells_who_was_faster_than_whom(study: Params) -> None:
    path = cells.comparison("fake", "small_int8")
    fake_cells.edit(path, refusals=[{"kernels": "compiled", "reason": "for a reason"}])
    told = section(text(), COMPARED)
    rows = table(told)
    assert "default / joined / packed / compiled kernels; torch" in told
    assert [row["decoding"] for row in rows][:2] == ["speculative, packed, k = 4", "speculative, packed, k = auto"]
    speeds = [float(row["tok/s"]) for row in rows if row["pair"] == "small_int8"]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 11
    assert (
        rows[0]["over same kernels"] == "1.50 [1.45, 1.55]" and rows[0]["measured / predicted"] == "0.95 [0.93, 0.97]"
    )
    plain = next(row for row in rows if row["decoding"] == "plain, packed")
    assert (plain["over HF"], plain["over fastest"], plain["τ"]) == ("1.67 [1.62, 1.72]", "–", "–")
    (line,) = [line for line in told.splitlines() if line.startswith("- `small_int8`")]
    for sentence in (
        "fastest with a draft: speculative, packed, k = 4, 45.0 tokens/s, greedy output identical; fastest without one: plain, ",
        "1.50 [1.45, 1.55] times the speed of the fastest decoding without a draft: faster; 2.50 [2.45, 2.55] times the speed ",
        "k = auto has 0.99 [0.97, 1.01] times the speed of the best fixed k here, 4: not distinguishable from 1.",
        "compiled not run: for a reason.",
    ):
        assert sentence in line
    assert "k = auto" not in told.splitlines()[-1], "nobody compared it for small_lookup"


def test_a_comparison_without_the_draft_of_hugging_face_or_intervals_says_so(study: Params) -> None:
    for pair in study.study.comparisons:
        path = cells.comparison("fake", pair)
        known = [c for c in cells.read_json(path)["contestants"] if c["method"] != "hf_assisted"]
        without = [
            {key: None if key.endswith(("_lo", "_hi")) or "assisted" in key else value for key, value in c.items()}
            for c in known
        ]
        fake_cells.edit(path, contestants=without, auto_over_best_fixed_k_lo=None, auto_over_best_fixed_k_hi=None)
    told = section(text(), COMPARED)
    assert "not compared with HF with the draft" in told and "nan" not in told
    assert "1.50 [–] times the speed of plain, packed: too few prompts for an interval" in told


def test_kernels_that_were_not_run_are_named(study: Params) -> None:
    path = cells.cost_curve("fake", "small_int8")
    record = cells.read_json(path)
    unknown: dict[str, Any] = dict.fromkeys(("seconds", "seconds_lo", "seconds_hi"), [None] * 16)
    curves = [
        c | (unknown | {"refusal": "for a reason"} if c["kernels"] != "default" else {}) for c in record["curves"]
    ]
    fake_cells.edit(path, curves=curves, bytes_per_second=None, operations_per_second=30e9)
    told = section(text(), COSTS)
    assert [row["T(1), ms"] for row in table(told)[2:6]] == ["– [–]"] * 4 and "nan" not in told
    assert "least with default kernels; c = T_draft(1) / T_target(1) is 0.450 with default." in told
    for role in ("target", "draft"):
        for kernels in ("joined", "packed"):
            assert f"- `small_int8`, {role}, {kernels} not run: for a reason." in told
    assert "arithmetic 30.0 to 100.0 GFLOP/s" in told


def test_both_verifiers_stand_side_by_side(study: Params) -> None:
    rows = table(section(text(), "Block verification"))
    assert [(row["pair"], float(row["T"])) for row in rows] == [
        (pair, t) for pair in study.study.pairs for t in study.study.temperature
    ]
    token = cells.read_json(cells.sweep_temperature("fake", "small_int8", 1.5))
    block = cells.read_json(cells.sweep_block("fake", "small_int8", 1.5))
    row = rows[2]
    assert row["τ, token run"] == f"{token['mean_acceptance_length']:.2f}"
    assert row["τ, block run"] == f"{block['mean_acceptance_length']:.2f}" != row["τ, token run"]
    for verifier in ("token", "block"):
        expected = token[f"expected_emitted_{verifier}"] / token["rounds"]
        assert row[f"expected / round, {verifier}"] == f"{expected:.3f}"
    gain = [f"{token[f'block_gain{end}']:.3f}" for end in ("", "_lo", "_hi")]
    assert row["gain by block verification"] == "{} [{}, {}]".format(*gain)
    ratio = float(row["expected / round, block"]) / float(row["expected / round, token"])
    assert ratio == pytest.approx(float(gain[0]), abs=1e-3)
    assert {row["τ, block run"] for row in rows if row["pair"] != "small_int8"} == {"–"}


def test_a_run_stands_under_the_rule_that_it_used(study: Params) -> None:
    """With decoding.verifier: block, nobody decoded by tokens."""
    fake_cells.edit(cells.sweep_temperature("fake", "small_lookup", 1.0), verifier="block")
    row = table(section(text(), "Block verification"))[7]
    assert row["τ, token run"] == "–" and row["τ, block run"] != "–"


def test_the_gains_told_are_those_of_the_table(study: Params) -> None:
    def of(pair: str, t: float, heading: str = "Block verification", **values: float | None) -> str:
        fake_cells.edit(cells.sweep_temperature("fake", pair, t), **values)
        return section(text(), heading)

    most = cells.read_json(cells.sweep_temperature("fake", "small_bf16", 1.5))
    told = section(text(), "Block verification")
    assert f"Largest gain: {most['block_gain']:.3f} [" in told
    assert "] at T = 1.5, `small_bf16`; smallest: 1.000 [1.000, 1.000] at T = 0.3, `small_lookup`." in told
    assert "The interval lies above 1 in 6 of 9 rows." in told
    assert "`small_lookup` has 1.000 at every T." in told
    rounding: dict[str, float | None] = {"block_gain_lo": 1.0000000000000002, "block_gain_hi": 1.0000000000000002}
    assert "in 6 of 9 rows" in of("small_lookup", 1.0, **rounding), "a rounding error is no gain"
    told = of("small_lookup", 1.0, block_gain=1.5, block_gain_lo=1.4, block_gain_hi=1.6)
    assert "Largest gain: 1.500 [1.400, 1.600] at T = 1, `small_lookup`; smallest: 1.000" in told
    assert "in 7 of 9 rows" in told and "`small_lookup` has from 1.000 to 1.500." in told


def test_gains_without_intervals_or_without_values(study: Params) -> None:
    for path in Path("metrics").rglob("*.json"):
        if "block_gain" in cells.read_json(path):
            fake_cells.without_intervals(path)
    told = section(text(), "Block verification")
    assert "1.015 [–]" in told and "The interval lies" not in told
    unknown = dict.fromkeys(("block_gain", "expected_emitted_token", "expected_emitted_block"))
    for pair in study.study.pairs:
        for t in study.study.temperature:
            fake_cells.edit(cells.sweep_temperature("fake", pair, t), **unknown)
        if pair == "small_bf16":  # the lookup's are left
            assert "smallest: 1.000 [–] at T = 0.3, `small_lookup`" in section(text(), "Block verification")
    told = section(text(), "Block verification")
    assert "No gain is known." in told and "nan" not in told
    assert {row["expected / round, block"] for row in table(told)} == {"–"}


def test_the_toy_pairs_gain_is_told_by_temperature(study: Params) -> None:
    fake_cells.edit(cells.toy_temperature(0.2), block_gain=1.25, block_gain_lo=1.2, block_gain_hi=1.3)
    told = section(text(), "Toy pair against temperature")
    rows = {row["T"]: row["gain by block verification"] for row in table(told)}
    assert rows["0.2"] == "1.250 [1.200, 1.300]" and len(rows) == len(study.toy.temperature)
    assert "Largest gain: 1.250 [1.200, 1.300] at T = 0.2, `toy`" in told
    assert "without laws of its own" not in told


def test_what_a_threshold_saves_and_costs_is_told(study: Params) -> None:
    told = section(text(), STOPPING)
    rows = table(told)
    assert [row["threshold"] for row in rows] == ["0", "0.4", "0.8"] and {row["k"] for row in rows} == {"8"}
    record = cells.read_json(cells.sweep_confidence("fake", "small_int8", 0.8))
    ratio = record["mean_drafted_per_round"] / record["mean_acceptance_length"]
    assert rows[2]["drafted / round"] == f"{record['mean_drafted_per_round']:.2f}"
    assert rows[2]["drafted / emitted"] == f"{ratio:.2f}"
    assert rows[2]["acceptance rate"].startswith(f"{record['draft_acceptance_rate']:.3f} [")
    ends = [(row["drafted / emitted"], row["τ"].split(" ")[0]) for row in (rows[0], rows[2])]
    (saved, tau), (saved_by_most, tau_by_most) = ends
    assert (
        f"- `small_int8`, k = 8, from threshold 0 to 0.8: drafted / emitted falls from {saved} to {saved_by_most}, "
        f"τ falls from {tau} to {tau_by_most}."
    ) in told


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2.0, 1.0, "falls from 2.00 to 1.00"),
        (1.0, 2.0, "rises from 1.00 to 2.00"),
        (1.0, 1.001, "stays at 1.00"),
        (9.99, 10.0, "rises from 9.99 to 10.00"),
        (None, 1.0, "goes from – to 1.00"),
    ],
)
def test_the_verb_agrees_with_the_digits(before: float | None, after: float | None, words: str) -> None:
    assert report.change(before, after) == words


def test_one_threshold_is_compared_with_nothing(study: Params, tmp_path: Path) -> None:
    fake_cells.write(tmp_path, fake_cells.PARAMS.replace("[0.0, 0.4, 0.8]", "[0.4]"))
    fake_cells.edit(cells.sweep_confidence("fake", "small_int8", 0.4), mean_drafted_per_round=None, alpha=None)
    told = section(text(), STOPPING)
    assert "- `small_int8`, k = 8: measured at one threshold only." in told
    assert table(told)[0]["drafted / emitted"] == table(told)[0]["drafted / round"] == "–"
    assert table(told)[0]["α"].startswith("– [")


def test_divergences_in_other_formats_are_told_by_kind(study: Params) -> None:
    bfloat16 = cells.greedy_identity("fake", "small_int8", "bfloat16")
    told = section(text(), IDENTITY)
    rows = table(told)
    assert [tuple(row.values())[1:6] for row in rows] == [
        ("bfloat16", "12", "10", "2", "0"),
        ("float16", "12", "12", "0", "0"),
    ]
    assert (rows[0]["largest gap, ulps"], rows[0]["limit, ulps"]) == ("2.50", "4")
    assert (rows[0]["within the limit, % of positions"], rows[0]["farthest below the best, ulps"]) == ("5.5", "3.00")
    assert rows[1]["largest gap, ulps"] == "–"
    assert "In float32, 3 of 3 timed cells compare the two, and 36 of 36 prompts are identical" in told
    assert (
        "In bfloat16, 2 of 12 prompts diverge, all of them at near-ties. In float16, 0 of 12 prompts diverge." in told
    )
    fake_cells.edit(bfloat16, near_ties=1, identical_prompts=11)
    assert "In bfloat16, 1 of 12 prompts diverges, at a near-tie." in section(text(), IDENTITY)
    fake_cells.edit(bfloat16, near_ties=2, faults=1, identical_prompts=9)
    fake_cells.edit(BENCHMARK, identical_prompts=10, identical="identical but for 2 ties")
    told = section(text(), IDENTITY)
    assert "In bfloat16, 3 of 12 prompts diverge, 2 at near-ties and 1 by a fault." in told
    assert "34 of 36 prompts are identical" in told


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


def test_toy_findings_say_which_alpha_they_mean(study: Params) -> None:
    fake_cells.edit(cells.toy_temperature(0.02), alpha=0.5)
    quantities = [
        row["quantity"] for row in table(section(text(), "What the toy sweep shows beside the original's findings"))
    ]
    of_temperature = [quantity for quantity in quantities if "over temperatures" in quantity or "at T =" in quantity]
    assert len(of_temperature) == 3 and all("α (mean Σ min(p, q))" in quantity for quantity in of_temperature)


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
