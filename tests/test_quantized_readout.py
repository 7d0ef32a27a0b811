"""Tables, figures and report on quantised drafts hold what their cells hold, and say no more than their intervals allow."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import fake_cells
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from report_text import section, table

from pipeline import cells, plot, quantized_figures, quantized_report, report, tables
from pipeline.cells import label
from pipeline.quantized_tables import paired_difference
from pipeline.results import read_table
from pipeline.study import Params
from pipeline.wording import interval
from specdec.errors import InputError
from specdec.stats import bootstrap_interval
from specdec.theory import break_even_alpha, equal_speed_alpha, expected_tokens_per_round

FOLDER = Path("plots/fake")
ENDS = ("", "_lo", "_hi")
FINDINGS, SPEED, LOOP = "What costs α and what buys it", "Speed of quantised drafts", "Quantised drafts in the loop"
ALPHA_CELL = cells.quantized_alpha("few", "small_int8", "w4-g64-gptq")
TIMED_CELL = cells.quantized_benchmark("fake", "small_int8", "w4-g64-gptq")
BASE_CELL = cells.quantized_benchmark("fake", "small_int8", "bf16")
LOOP_CELL = cells.quantized_loop("few", "small_int8", "w4-g64-gptq")
# As `quick` is: one variant, without the 16-bit draft to compare with.
ONE_VARIANT = (
    fake_cells.PARAMS.replace(
        "[bf16, w8-row-sym-rtn, w4-g64-rtn, w4-g64-gptq, w4-g64-awq, w3-row-rtn]", "[w4-g64-gptq]"
    )
    .replace("loop_variants: [bf16, w4-g64-gptq]", "loop_variants: [w4-g64-gptq]")
    .replace("kernel_variants: [bf16, w8-row-sym-rtn, w4-g64-gptq]", "kernel_variants: [w4-g64-gptq]")
)
TWO_PAIRS = fake_cells.PARAMS.replace("quantized_pairs: [small_int8]", "quantized_pairs: [small_int8, small_bf16]")


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py"])
    return fake_cells.write(tmp_path)


def text() -> str:
    tables.main()
    return report.report("fake", FOLDER)


def line_with(part: str, whole: str) -> str:
    (found,) = [line for line in whole.splitlines() if part in line]
    return found


def without_all_intervals() -> None:
    for path in Path("metrics").rglob("*.json"):
        fake_cells.without_intervals(path)
    for path in Path("metrics/quantized_alpha").rglob("*.json"):
        fake_cells.edit(path, per_prompt=cells.read_json(path)["per_prompt"][:3])


# Tables


def test_a_row_per_variant_head_and_temperature_holds_the_cells_numbers(study: Params) -> None:
    gathered = tables.gather(study)["quantized_alpha"]
    places = gathered[["pair", "variant", "head", "temperature"]].apply(tuple, axis=1).tolist()
    assert places == [
        ("small_int8", v, head, t) for v in study.study.variants for head in ("in", "out") for t in (0.0, 0.7, 1.0)
    ]
    rows = {place[1:]: row for place, row in zip(places, gathered.to_dict("records"), strict=True)}
    record = cells.read_json(ALPHA_CELL)
    for head, prefix in (("in", ""), ("out", "body_")):
        for t, end, texts in ((0.0, "0", "greedy"), (0.7, "0_7", "sampled"), (1.0, "1", "sampled")):
            row = rows["w4-g64-gptq", head, t]
            assert label(t) == end
            for key in ("alpha", "alpha_change", "tv"):
                assert [row[f"{key}{e}"] for e in ENDS] == [record[f"{prefix}{key}_{end}{e}"] for e in ENDS]
            assert [row[f"alpha_unquantized{e}"] for e in ENDS] == [record[f"alpha_unquantized_{end}{e}"] for e in ENDS]
            for key in ("argmax_agreement", "largest_excess"):
                assert row[key] == record[f"{prefix}{key}_{end}"]
            assert row["perplexity"] == record[f"{prefix}perplexity_{texts}"]
            assert row["perplexity_unquantized"] == record[f"perplexity_unquantized_{texts}"]
            for key in ("bits_per_weight", "weights", "weight_bytes", "other_bytes"):
                assert row[key] == record[f"{prefix}{key}"]
    assert rows["w4-g64-gptq", "in", 0.0]["weights"] > rows["w4-g64-gptq", "out", 0.0]["weights"]
    assert "per_prompt" not in gathered


def test_names_and_missing_values_survive_the_file(study: Params) -> None:
    tables.main()
    read = read_table(FOLDER, "quantized_alpha").set_index(["variant", "head", "temperature"])
    cast, row = read.loc["bf16", "in", 0.0], read.loc["w3-row-rtn", "out", 0.7]
    assert pd.isna(cast["grid"]) and pd.isna(cast["group_size"]) and cast["method"] == "cast"
    assert row["grid"] == "zero" and pd.isna(row["group_size"]) and row["contexts"] == "few"
    assert read.loc["w4-g64-gptq", "in", 0.0]["contexts_sha256"] == "1" * 64, "a hash is no number"
    assert read.loc["w4-g64-gptq", "in", 0.0]["group_size"] == 64


def test_the_loop_stands_beside_the_alpha_of_its_own_variant(study: Params) -> None:
    rows = tables.gather(study)["quantized_loop"]
    assert rows[["variant", "temperature"]].apply(tuple, axis=1).tolist() == [
        (v, t) for v in study.study.loop_variants for t in (0.0, 1.0)
    ]
    row, loop, alpha = rows.iloc[3], cells.read_json(LOOP_CELL), cells.read_json(ALPHA_CELL)
    for end in ENDS:
        for key in ("alpha", "alpha_overlap", "matched_alpha", "difference"):
            assert row[f"{key}{end}"] == loop[f"{key}_1{end}"]
        assert row[f"forced_alpha{end}"] == alpha[f"alpha_1{end}"]
    assert (row["tested"], row["positions"]) == (loop["tested_1"], loop["positions_1"]) and row["k"] == study.decoding.k


def test_a_temperature_of_the_loop_that_the_contexts_lack_is_named(study: Params) -> None:
    fake_cells.edit(LOOP_CELL, temperatures=[0.0, 1.5])
    with pytest.raises(InputError, match=f"^{ALPHA_CELL} lacks the key alpha_1_5"):
        tables.gather(study)


def test_a_variant_that_the_study_does_not_declare_is_left_out(study: Params) -> None:
    cells.write_json(
        cells.quantized_alpha("few", "small_int8", "w4-row-rtn"), fake_cells.quantized_alpha("small_int8", "w4-row-rtn")
    )
    assert "w4-row-rtn" not in tables.gather(study)["quantized_alpha"]["variant"].tolist()


def with_overlaps(overlaps: dict[str, list[float]]) -> None:
    """Give every cell prompts of these categories, of 32 positions each, with these α at T = 0 and half of them at T = 1."""
    alphas = [(category, alpha) for category, values in overlaps.items() for alpha in values]
    prompts = [
        {
            "category": category,
            "greedy": {"overlap_0": 32 * alpha, "change_0": 0.0, "body_change_0": 0.0, "positions_0": 32.0},
            "sampled": {
                f"{key}_{end}": 32.0 if key == "positions" else 16 * alpha if key == "overlap" else 0.0
                for key in ("overlap", "change", "body_change", "positions")
                for end in ("0_7", "1")
            },
        }
        for category, alpha in alphas
    ]
    for path in Path("metrics/quantized_alpha").rglob("*.json"):
        fake_cells.edit(path, per_prompt=prompts)


def test_alpha_of_a_category_is_that_of_its_prompts(study: Params) -> None:
    qa, rag = [0.9 + 0.005 * i for i in range(12)], [0.5, 0.6]
    with_overlaps({"qa": qa, "rag": rag})
    gathered = tables.gather(study)["quantized_by_category"]
    assert [*dict.fromkeys(gathered["variant"])] == study.study.loop_variants, "those that decode too"
    rows = gathered[gathered["variant"] == "w4-g64-gptq"].set_index(["temperature", "category"])
    assert rows.index.tolist() == [(t, c) for t in (0.0, 0.7, 1.0) for c in ("all prompts", "qa", "rag")]
    assert rows["prompts"].tolist() == [14, 12, 2] * 3 and rows["positions"].tolist() == [14 * 32, 12 * 32, 64] * 3
    assert rows.loc[(0.0, "rag"), "alpha"] == pytest.approx(0.55)
    assert rows.loc[(1.0, "all prompts"), "alpha"] == pytest.approx((sum(qa) + sum(rag)) / 28)
    units = [(32 * alpha, 32.0) for alpha in qa]
    ends = bootstrap_interval(units, lambda parts: sum(a for a, _ in parts) / sum(n for _, n in parts))
    assert rows.loc[(0.0, "qa"), ["alpha_lo", "alpha_hi"]].tolist() == pytest.approx(ends)
    assert rows.loc[(0.0, "rag"), ["alpha_lo", "alpha_hi"]].isna().all(), "too few prompts"


@pytest.mark.parametrize(
    ("rag", "conclusion"),
    [
        ([0.5 + 0.01 * i for i in range(12)], "to 0.927 [0.918, 0.937] (qa): they differ."),
        ([0.895 + 0.005 * i for i in range(12)], "(qa): not distinguishable."),
        ([0.5, 0.6], "α from 0.550 [–] (rag) to 0.927 [0.918, 0.937] (qa): too few prompts to tell."),
    ],
)
def test_categories_differ_where_their_intervals_are_apart(study: Params, rag: list[float], conclusion: str) -> None:
    with_overlaps({"qa": [0.9 + 0.005 * i for i in range(12)], "rag": rag})
    told = section(text(), "Quantised drafts by category of prompts")
    assert line_with("w4-g64-gptq, T = 0:", told).endswith(conclusion)


def test_categories_are_drawn_at_the_lowest_and_the_highest_temperature(study: Params) -> None:
    with_overlaps({"qa": [0.9 + 0.005 * i for i in range(12)], "rag": [0.5, 0.6]})
    tables.main()
    with matplotlib.rc_context(plot.STYLE):
        axes = plot.draw(FOLDER)["quantized_by_category"].axes
    assert [ax.get_title() for ax in axes] == ["small_int8, T = 0", "small_int8, T = 1"]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["all prompts", "qa", "rag"]
    rows = read_table(FOLDER, "quantized_by_category")
    for ax, t in zip(axes, (0.0, 1.0), strict=True):
        drawn = [np.asarray(line.get_xdata()).tolist() for line in ax.lines if line.get_marker() in ("o", "s")]
        expected = [
            rows[(rows["variant"] == v) & (rows["temperature"] == t)]["alpha"].tolist()
            for v in study.study.loop_variants
        ]
        assert drawn == expected


def test_a_contrast_is_the_difference_of_two_changes_paired_over_prompts(study: Params) -> None:
    path = cells.quantized_alpha("few", "small_int8", "w4-g64-rtn")
    record, other = cells.read_json(ALPHA_CELL), cells.read_json(path)
    mine, its = [-0.01 * i for i in range(12)], [-0.01 * i - 0.02 + 0.001 * (i % 4) for i in range(12)]
    fake_cells.set_changes(record, "body_", "0_7", mine)
    fake_cells.set_changes(other, "body_", "0_7", its)
    cells.write_json(ALPHA_CELL, record)
    cells.write_json(path, other)
    gathered = tables.gather(study)["quantized_contrasts"]
    keys = ["question", "variant", "other", "head", "temperature"]
    row = gathered.set_index(keys).loc["method", "w4-g64-gptq", "w4-g64-rtn", "out", 0.7]
    assert row["difference"] == pytest.approx(0.0185)
    units = [(32 * a, 32.0, 32 * b, 32.0) for a, b in zip(mine, its, strict=True)]

    def difference(some: list[tuple[float, ...]]) -> float:
        a, n, b, m = (sum(unit[i] for unit in some) for i in range(4))
        return a / n - b / m

    interval = bootstrap_interval(units, difference)
    assert (row["difference_lo"], row["difference_hi"]) == pytest.approx(interval)
    assert 0 < row["difference_hi"] - row["difference_lo"] < 0.002, (
        "narrow, since both change alike from prompt to prompt"
    )


def test_every_contrast_is_there_once(study: Params) -> None:
    gathered = tables.gather(study)["quantized_contrasts"]
    assert not gathered.duplicated(["pair", "question", "variant", "head", "temperature"]).any()
    by_question = {str(name): part for name, part in gathered.groupby("question")}
    variants = set(study.study.variants)
    assert set(by_question["method"]["variant"]) == {"w4-g64-gptq", "w4-g64-awq"}
    assert set(by_question["method"]["other"]) == {"w4-g64-rtn"} and len(by_question["method"]) == 2 * 2 * 3
    assert set(by_question["head"]["variant"]) == variants and set(by_question["head"]["head"]) == {"out"}
    assert len(by_question["head"]) == len(variants) * 3
    assert set(by_question["temperature"]["temperature"]) == {0.0}
    assert len(by_question["temperature"]) == len(variants) * 2


def test_contrasts_of_few_prompts_have_no_interval() -> None:
    few = np.array([[-0.1, 1.0]] * 11)
    assert paired_difference(few, 2 * few * [1, 0.5]) == (pytest.approx(0.1), None, None)
    assert paired_difference(0 * few, few) == (None, None, None), "nothing was judged"


def test_variants_behind_other_texts_are_not_compared(study: Params) -> None:
    fake_cells.edit(ALPHA_CELL, contexts_sha256="3" * 64)
    with pytest.raises(InputError, match=f"^{ALPHA_CELL} and .*bf16.json were measured behind other texts"):
        tables.gather(study)


def test_a_cell_without_its_prompts_sums_is_named(study: Params) -> None:
    fake_cells.edit(ALPHA_CELL, per_prompt=[{"question_id": 1, "greedy": {}, "sampled": {}}])
    with pytest.raises(InputError, match=f"^{ALPHA_CELL} lacks the key change_0;"):
        tables.gather(study)


def test_the_alpha_needed_is_that_of_theory(study: Params) -> None:
    fake_cells.edit(BASE_CELL, verify_cost_ratio=1.35)
    row = tables.gather(study)["quantized_benchmark"].set_index("variant").loc["w4-g64-gptq"]
    base, v = cells.read_json(BASE_CELL), (1.35 + 1.25 + 1.25) / 3
    needed = row["equal_speed_alpha"]
    assert needed == equal_speed_alpha(base["alpha"], 4, 0.7, 0.35, v) and needed < base["alpha"]
    assert row["break_even_alpha"] == break_even_alpha(4, 0.35, v)
    speeds = [expected_tokens_per_round(a, 4) / (4 * c + v) for a, c in ((needed, 0.35), (base["alpha"], 0.7))]
    assert speeds[0] == pytest.approx(speeds[1])


@pytest.mark.parametrize(
    ("path", "unknown"), [(BASE_CELL, "alpha"), (BASE_CELL, "cost_coefficient"), (TIMED_CELL, "cost_coefficient")]
)
def test_what_theory_cannot_know_is_left_empty(study: Params, path: Path, unknown: str) -> None:
    fake_cells.edit(path, **{unknown: None})
    row = tables.gather(study)["quantized_benchmark"].set_index("variant").loc["w4-g64-gptq"]
    assert pd.isna(row["equal_speed_alpha"])
    assert pd.isna(row["break_even_alpha"]) == (path == TIMED_CELL)
    assert "nan" not in section(text(), SPEED)
    plot.draw(FOLDER)


def test_without_a_16_bit_row_nothing_is_equalled(study: Params, tmp_path: Path) -> None:
    row = tables.gather(fake_cells.write(tmp_path, ONE_VARIANT))["quantized_benchmark"].iloc[0]
    assert pd.isna(row["equal_speed_alpha"]) and 0 < row["break_even_alpha"] < 1


# Figures


def drawn(name: str) -> list[Axes]:
    tables.main()
    with matplotlib.rc_context(plot.STYLE), warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot.draw(FOLDER)[name]
        figure.draw_without_rendering()
    return figure.axes


def points_of(ax: Axes) -> list[tuple[float, float, Any]]:
    """Place and face colour of every measured point."""
    lines = [container.lines[0] for container in ax.containers]
    places = [(line, np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in lines]
    return [(x, y, line.get_markerfacecolor()) for line, xs, ys in places for x, y in zip(xs, ys, strict=True)]


def test_alpha_is_drawn_against_bits_a_panel_per_temperature(study: Params) -> None:
    axes = drawn("quantized_alpha")
    assert [ax.get_title() for ax in axes] == ["T = 0", "T = 0.7", "T = 1"]
    read = read_table(FOLDER, "quantized_alpha")
    for ax, t in zip(axes, (0.0, 0.7, 1.0), strict=True):
        part = read[read["temperature"] == t]
        found = points_of(ax)
        assert sorted(y for _, y, _ in found) == sorted(part["alpha"])
        for x, y, face in found:
            (row,) = part[part["alpha"] == y].to_dict("records")
            assert x == pytest.approx(row["bits_per_weight"], rel=0.08), "moved by no more than a marker"
            assert (face == "white") == (row["head"] == "out")
        (unquantized,) = [line for line in ax.lines if line.get_linestyle() == ":"]
        assert np.asarray(unquantized.get_ydata()).tolist() == [1.0, 1.0]
        assert len(ax.collections) > 0, "interval bars"


def test_several_pairs_have_a_row_of_panels_each(study: Params, tmp_path: Path) -> None:
    fake_cells.write(tmp_path, TWO_PAIRS)
    assert [ax.get_title() for ax in drawn("quantized_alpha")][::3] == ["small_int8\nT = 0", "small_bf16\nT = 0"]
    for name in ("quantized_speedup", "break_even"):
        assert [ax.get_title() for ax in drawn(name)] == ["small_int8, k = 4", "small_bf16, k = 4"]


def test_speed_is_drawn_against_bits_beside_its_prediction(study: Params) -> None:
    (ax,) = drawn("quantized_speedup")
    read = read_table(FOLDER, "quantized_benchmark")
    assert sorted(y for _, y, _ in points_of(ax)) == sorted(read["speedup"])
    predicted = [y for line in ax.lines if line.get_marker() == "_" for y in np.asarray(line.get_ydata())]
    assert {*read["predicted_speedup"]} <= {*predicted}
    (plain,) = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert np.asarray(plain.get_ydata()).tolist() == [1, 1]


def test_the_curve_goes_through_the_16_bit_draft_and_others_lie_on_their_side(study: Params) -> None:
    tau = expected_tokens_per_round(0.6, 4)
    fake_cells.edit(TIMED_CELL, alpha=0.6, alpha_lo=0.55, alpha_hi=0.65, mean_acceptance_length=tau)
    (ax,) = drawn("break_even")
    read = read_table(FOLDER, "quantized_benchmark").set_index("variant")
    curves = {line.get_linestyle(): line for line in ax.lines if np.size(line.get_xdata()) > 50}
    assert {*curves} == {"-", "--"}

    def at(style: str, c: float) -> float:
        xs, ys = (np.asarray(values, dtype=float) for values in curves[style].get_data())
        return float(np.interp(c, xs, ys))

    assert at("-", 0.7) == pytest.approx(read.loc["bf16", "alpha"], abs=1e-3)
    for variant in ("w8-row-sym-rtn", "w4-g64-gptq"):
        row = read.loc[variant]
        assert at("-", row["cost_coefficient"]) == pytest.approx(row["equal_speed_alpha"], abs=1e-3)
        assert at("--", row["cost_coefficient"]) == pytest.approx(row["break_even_alpha"], abs=1e-3)
    assert read.loc["w8-row-sym-rtn", "alpha"] > at("-", 0.45) and at("-", 0.35) > read.loc["w4-g64-gptq", "alpha"]
    assert [(x, y) for x, y, _ in points_of(ax)] == list(zip(read["cost_coefficient"], read["alpha"], strict=True))


def test_one_variant_without_intervals_or_a_16_bit_draft_is_drawn(study: Params, tmp_path: Path) -> None:
    fake_cells.write(tmp_path, ONE_VARIANT)
    without_all_intervals()
    for name in ("quantized_alpha", "quantized_speedup", "break_even"):
        (ax, *_) = drawn(name)
        labels = [entry.get_text() for entry in ax.figure.legends[0].get_texts()]
        assert not any("interval" in label or "16-bit draft" in label for label in labels)
    assert [line.get_linestyle() for line in ax.lines if np.size(line.get_xdata()) > 50] == ["--"]


def test_a_method_has_one_colour_and_a_timed_variant_its_own_marker() -> None:
    rows = pd.DataFrame(
        [("bf16", "cast"), ("w4-g64-rtn", "rtn"), ("w8-row-sym-rtn", "rtn"), ("w4-g64-gptq", "gptq")],
        columns=["variant", "method"],
    )
    looks = quantized_figures.variant_looks(rows)
    assert looks["w4-g64-rtn"]["color"] == looks["w8-row-sym-rtn"]["color"] != looks["w4-g64-gptq"]["color"]
    assert len({look["marker"] for look in looks.values()}) == 4
    alone = quantized_figures.method_looks(["gptq"])["gptq"]["color"]
    assert alone == looks["w4-g64-gptq"]["color"], "whatever else is in the figure"
    many = pd.DataFrame([(f"v{i}", ("rtn", "gptq", "awq")[i % 3]) for i in range(33)], columns=["variant", "method"])
    seen = {
        (look["color"], look["marker"], look.get("markerfacecolor"))
        for look in quantized_figures.variant_looks(many).values()
    }
    assert len(seen) == 33


# Report


def test_there_is_a_table_per_temperature(study: Params) -> None:
    whole, record = text(), cells.read_json(ALPHA_CELL)
    assert "for T = 0 behind the target's own greedy text, for every T > 0 behind its text at T = 1" in whole
    assert "Contexts few, read on CPU Imaginary CPU 9000; calibration tokens: 960." in whole
    for t, end in (("0", "0"), ("0.7", "0_7"), ("1", "1")):
        told = section(whole, f"α at T = {t}")
        rows = {(row["variant"], row["head"]): row for row in table(told)}
        assert len(rows) == 12
        row = rows["w4-g64-gptq", "out"]
        low, high = (f"{record[f'body_alpha_{end}{e}']:.3f}" for e in ("_lo", "_hi"))
        assert row["α"] == f"{record[f'body_alpha_{end}']:.3f} [{low}, {high}]"
        assert row["change, points"].startswith(f"{100 * record[f'body_alpha_change_{end}']:+.2f} [")
        assert row["bits / weight"] == "4.31"
        assert "draft as it was: α 1.000 [1.000, 1.000]" in told and "384 positions of 12 prompts" in told


def test_who_loses_little_follows_value_and_interval(study: Params) -> None:
    both = "at most 0.5 points are lost at every T by `bf16`, `w8-row-sym-rtn`, intervals included; at most 1 point is lost"
    assert both in line_with("head rounded: at most", section(text(), FINDINGS))
    path = cells.quantized_alpha("few", "small_int8", "w8-row-sym-rtn")
    fake_cells.edit(path, alpha_change_1=-0.005, alpha_change_1_lo=-0.0101)
    line = line_with("head rounded: at most", section(text(), FINDINGS))
    assert "0.5 points are lost at every T by `bf16`, `w8-row-sym-rtn`, intervals included by `bf16`;" in line
    assert line.endswith("1 point is lost at every T by `bf16`, `w8-row-sym-rtn`, intervals included by `bf16`.")
    assert "intervals included by" not in line_with("head left as it is: at most", section(text(), FINDINGS))
    fake_cells.edit(path, alpha_change_1=-0.0051)
    line = line_with("head rounded: at most", section(text(), FINDINGS))
    assert (
        "0.5 points are lost at every T by `bf16`, intervals included; at most 1 point is lost at every T by `bf16`, "
        in line
    )
    fake_cells.edit(path, alpha_change_1=None)
    assert "`w8-row-sym-rtn`" not in line_with("head rounded: at most", section(text(), FINDINGS))


def change(path: Path, value: float, spread: float, *places: tuple[str, str]) -> None:
    """Let every prompt of an alpha cell have lost so many points, half of them more and half of them less by the spread."""
    record = cells.read_json(path)
    for prefix, end in places:
        changes = [(value + spread * (-1) ** i) / 100 for i in range(12)]
        fake_cells.set_changes(record, prefix, end, changes)
    cells.write_json(path, record)


ALL_T = ("0", "0_7", "1")
EVERYWHERE = [(prefix, end) for prefix in ("", "body_") for end in ALL_T]


def test_what_a_method_buys_is_told_in_both_directions(study: Params) -> None:
    change(cells.quantized_alpha("few", "small_int8", "w4-g64-rtn"), -5, 0, *EVERYWHERE)
    change(ALPHA_CELL, -3, 0.1, *EVERYWHERE)
    change(ALPHA_CELL, -4.5, 3, ("", "1"))
    change(ALPHA_CELL, -6.5, 0, ("", "0_7"))
    whole = text()
    row = read_table(FOLDER, "quantized_contrasts").set_index(["variant", "head", "temperature"])
    low, high = (100 * row.loc["w4-g64-gptq", "in", 0.0][f"difference{end}"].iloc[0] for end in ("_lo", "_hi"))
    assert line_with("GPTQ against", whole).endswith(
        "α higher in 5 (4 clearly) and lower in 1 (1 clearly) of 6 comparisons; from -1.50 [-1.50, -1.50] (`w4-g64-gptq`, "
        f"head in, T = 0.7) to +2.00 [{low:+.2f}, {high:+.2f}] (`w4-g64-gptq`, head in, T = 0)."
    )
    first = table(section(whole, "Methods on the same grid"))[0]
    assert [first[key] for key in ("pair", "variant", "head")] == ["small_int8", "w4-g64-gptq", "in"]
    assert first["T = 0"] == f"+2.00 [{low:+.2f}, {high:+.2f}]" and first["T = 0.7"] == "-1.50 [-1.50, -1.50]"
    assert first["T = 1"].startswith("+0.50 [-")


def test_a_method_is_compared_on_its_own_grid_only(study: Params, tmp_path: Path) -> None:
    fake_cells.write(
        tmp_path, fake_cells.PARAMS.replace("w4-g64-rtn, ", "w4-g32-rtn, w4-g64-min-rtn, w4-g64-sym-rtn, ")
    )
    whole = text()
    assert "GPTQ against rounding to nearest on the same grid: nothing to compare." in whole
    assert "No grid was rounded to by another method than to nearest" in whole


def test_what_the_head_costs_is_told_in_points_and_bytes(study: Params, tmp_path: Path) -> None:
    fake_cells.write(tmp_path, ONE_VARIANT)
    change(ALPHA_CELL, -4, 0, *EVERYWHERE)
    change(ALPHA_CELL, -3, 0, ("body_", "0"))
    fake_cells.edit(
        ALPHA_CELL, weight_bytes=70_000_000, other_bytes=1, body_weight_bytes=55_000_001, body_other_bytes=0
    )
    line = line_with("LM head left as it is against rounded", text())
    assert "α higher in 1 (1 clearly) and lower in 0 of 3 comparisons; from +0.00 [+0.00, +0.00] (" in line
    assert line.endswith("to +1.00 [+1.00, +1.00] (`w4-g64-gptq`, T = 0). It changes the draft's size by -15.0 MB.")
    change(ALPHA_CELL, -5, 0, ("body_", "0"))
    assert "α higher in 0 and lower in 1 (1 clearly) of 3" in line_with("LM head left as it is against rounded", text())


def test_where_greedy_is_more_fragile_is_told(study: Params) -> None:
    for variant in study.study.variants:
        change(cells.quantized_alpha("few", "small_int8", variant), -4, 0, *EVERYWHERE)
    assert "α higher in 0 and lower in 0 of 12" in line_with("T = 0 against T = 1", text())
    change(ALPHA_CELL, -6, 0.1, ("", "0"))
    line = line_with("T = 0 against T = 1", text())
    assert "lower in 1 (1 clearly) of 12 comparisons; from -2.00 [" in line
    assert line.endswith("Clearly more is lost at the lower T: head rounded, `w4-g64-gptq`.")
    change(ALPHA_CELL, -4.5, 3, ("", "0"))
    line = line_with("T = 0 against T = 1", text())
    assert "lower in 1 (0 clearly) of 12" in line and "more is lost" not in line


@pytest.mark.parametrize(
    ("excess", "conclusion"),
    [
        (-0.25, "is -2.5e-01 (`w4-g64-gptq`, head out, T = 1, `small_int8`), so the bound holds."),
        (2e-6, "is 2.0e-06 (`w4-g64-gptq`, head out, T = 1, `small_int8`), which is rounding, so the bound holds."),
        (0.01, "is 1.0e-02 (`w4-g64-gptq`, head out, T = 1, `small_int8`), so the bound does not hold."),
    ],
)
def test_the_bound_is_checked(study: Params, excess: float, conclusion: str) -> None:
    for variant in study.study.variants:
        path = cells.quantized_alpha("few", "small_int8", variant)
        fake_cells.edit(path, **{f"{p}largest_excess_{t}": -0.5 for p in ("", "body_") for t in ALL_T})
    fake_cells.edit(ALPHA_CELL, body_largest_excess_1=excess)
    assert line_with("largest excess", text()).endswith(f"the largest excess of |Δβ| over TV(q, q̂) {conclusion}")


@pytest.mark.parametrize(
    ("loop", "difference", "inside", "finding"),
    [
        (0.9, (0.0, -0.01, 0.01), "yes", "inside in 4 of 4 rows."),
        (0.96, (0.03, 0.01, 0.05), "above", "is +3.00 [+1.00, +5.00] points, clearly not 0."),
        (0.7, (-0.2, -0.3, -0.1), "below", "is -20.00 [-30.00, -10.00] points, clearly not 0."),
        (0.7, (-0.01, -0.03, 0.01), "below", "is -1.00 [-3.00, +1.00] points, not distinguishable from 0: "),
        (0.7, (-0.2, None, None), "below", "is -20.00 [–] points."),
    ],
)
def test_the_loop_is_held_against_the_interval_behind_contexts(
    study: Params, loop: float, difference: tuple[float | None, ...], inside: str, finding: str
) -> None:
    fake_cells.edit(
        LOOP_CELL, alpha_overlap_0=loop, **dict(zip([f"difference_0{e}" for e in ENDS], difference, strict=True))
    )
    fake_cells.edit(ALPHA_CELL, alpha_0=0.9, alpha_0_lo=0.87, alpha_0_hi=0.93)
    told = section(text(), LOOP)
    assert [row["inside"] for row in table(told)] == ["yes", "yes", inside, "yes"]
    assert finding in told
    if inside != "yes":
        assert f"in 3 of 4 rows. `w4-g64-gptq` at T = 0, `small_int8`, lies {inside}; on the same prompts the" in told


@pytest.mark.parametrize(
    ("alpha", "words"),
    [
        ((0.9, 0.85, 0.95), "so by theory faster;"),
        ((0.7, 0.65, 0.72), "so by theory slower;"),
        ((0.76, 0.7, 0.8), "is needed, not distinguishable;"),
        ((0.9, None, None), "is needed, too few prompts for an interval;"),
        ((None, None, None), "Against the 16-bit draft: by theory unknown;"),
    ],
)
def test_whether_fewer_bits_pay_by_theory_follows_the_interval(
    study: Params, alpha: tuple[float | None, ...], words: str
) -> None:
    fake_cells.edit(TIMED_CELL, **dict(zip([f"alpha{e}" for e in ENDS], alpha, strict=True)))
    told = section(text(), SPEED)
    assert words in line_with("- `small_int8`, `w4-g64-gptq`, k = 4: ", told)
    assert "Against the 16-bit draft" not in line_with("- `small_int8`, `bf16`, k = 4: ", told)
    needed = {row["variant"]: row["α to equal the 16-bit draft"] for row in table(told)}
    assert needed["w4-g64-gptq"] == "0.755" and needed["bf16"] == f"{cells.read_json(BASE_CELL)['alpha']:.3f}"


def test_where_no_alpha_is_enough_that_is_said(study: Params) -> None:
    fake_cells.edit(TIMED_CELL, cost_coefficient=0.99)
    told = section(text(), SPEED)
    assert "by theory no α is enough at this c;" in line_with("- `small_int8`, `w4-g64-gptq`", told)
    assert table(told)[2]["α to equal the 16-bit draft"] == "–"


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        ((1.6, 1.5, 1.7), "measured 1.60 [1.50, 1.70] beside 1.20 [1.10, 1.30], so faster."),
        ((0.9, 0.8, 1.0), "measured 0.90 [0.80, 1.00] beside 1.20 [1.10, 1.30], so slower."),
        ((1.3, 1.2, 1.4), "measured 1.30 [1.20, 1.40] beside 1.20 [1.10, 1.30], intervals overlapping."),
        ((1.3, None, None), "measured 1.30 [–] beside 1.20 [1.10, 1.30], too few prompts for an interval."),
        ((None, None, None), "; not compared as measured."),
    ],
)
def test_whether_fewer_bits_pay_as_measured_follows_the_intervals(
    study: Params, speedup: tuple[float | None, ...], words: str
) -> None:
    fake_cells.edit(BASE_CELL, speedup=1.2, speedup_lo=1.1, speedup_hi=1.3)
    fake_cells.edit(TIMED_CELL, **dict(zip([f"speedup{e}" for e in ENDS], speedup, strict=True)))
    assert line_with("- `small_int8`, `w4-g64-gptq`, k = 4: ", section(text(), SPEED)).endswith(words)


def test_a_variant_without_a_kernel_has_no_speed(study: Params) -> None:
    told = section(text(), SPEED)
    assert "and so without a speed: `w4-g64-rtn`, `w4-g64-awq`, `w3-row-rtn`." in told
    assert [row["variant"] for row in table(told)] == study.study.kernel_variants
    record = cells.read_json(TIMED_CELL)
    row = table(told)[2]
    assert row["draft, MB"] == f"{record['draft_bytes'] / 1e6:.1f}" and row["c"] == "0.350" and row["v"] == "1.250"
    assert row["greedy output against plain"] == "identical"


def test_one_variant_without_intervals_is_told(study: Params, tmp_path: Path) -> None:
    fake_cells.write(tmp_path, ONE_VARIANT)
    without_all_intervals()
    whole = text()
    told = whole[whole.index("## Quantised drafts") : whole.index("## Toy pair")]
    assert "nan" not in told and "None" not in told
    assert "No 16-bit draft was timed beside it." in told
    assert "Every variant above was timed." in told
    assert "Too few prompts for an interval to lie in." in told
    assert "clearly" not in told and "intervals included" not in told
    assert "at most 0.5 points are lost at every T by none; at most 1 point" in told


def test_unknown_seconds_and_excess_are_told_as_such() -> None:
    unknown = pd.DataFrame({"method": ["rtn"], "quantisation_seconds": [np.nan], "largest_excess": [np.nan]})
    assert quantized_report.effort(unknown) == "How long rounding took is unknown."
    assert quantized_report.bound(unknown).endswith(": not measured.")


def test_a_self_draft_does_not_test_the_bound() -> None:
    table = pd.DataFrame({"target": ["one", "one"], "draft": ["one", "one"], "largest_excess": [1e-7, 0.2]})
    assert quantized_report.bound(table).endswith(
        ": not tested: of a draft that is the target itself both sides are one number."
    )


def test_what_rounds_to_nothing_has_no_sign() -> None:
    row = {f"x{end}": value for end, value in zip(("", "_lo", "_hi"), (-1e-9, -0.02, 1e-9), strict=True)}
    assert quantized_report.points("x")(row) == "+0.00 [-2.00, +0.00]"
    assert interval("x", 3)(row) == "0.000 [-0.020, 0.000]"
