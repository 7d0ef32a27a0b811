"""The figures show what the tables hold, legibly, in the same bytes each time; so do DVC's own charts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fake_cells
import matplotlib
import numpy as np
import pandas as pd
import pytest
from dvc_render.vega import VegaRenderer
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from ruamel.yaml import YAML

from pipeline import captions, cells, plot, tables
from pipeline.drawing import DRAFTS, KINDS, OTHER_DRAFTS, PALETTE, WIDTH, legend, line, pair_looks
from pipeline.panel_figures import panels, real_pair, toy_pair
from pipeline.results import read_table
from pipeline.study import Params

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("plots/fake")
NAMES = {
    *(
        "tokens_per_round",
        "acceptance_per_position",
        "acceptance_vs_temperature",
        "speedup",
        "cost_curve",
        "comparison",
        "toy",
        "real",
    ),
    *("accepted_per_round", "by_category", "speedup_by_k"),
    *("block_verification", "confidence", "attribution"),
    *("quantized_alpha", "quantized_by_category", "quantized_speedup", "break_even"),
}
SMALLEST = (
    fake_cells.PARAMS.replace("[small_int8, small_bf16, small_lookup]", "[small_int8]")
    .replace("comparisons: [small_int8, small_lookup]", "comparisons: [small_int8]")
    .replace("k: [1, 2, 4, 8]", "k: [2]")
    .replace("[0.3, 1.0, 1.5]", "[1.0]")
    .replace("[0.0, 0.4, 0.8]", "[0.4]")
    .replace("k: [1, 2, 3, 4, 5, 6, 7, 8]", "k: [2]")
    .replace("[0.02, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]", "[1.0]")
)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plot.py"])
    params = fake_cells.write(tmp_path)
    tables.main()
    return params


@pytest.fixture(scope="module")
def drawn_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """Every figure of the made-up study as it is; to draw them takes seconds."""
    root = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context(plot.STYLE):
        patch.chdir(root)
        patch.setattr("sys.argv", ["plot.py"])
        fake_cells.write(root)
        tables.main()
        return plot.draw(FOLDER)


@pytest.fixture
def figures(study: Params, drawn_once: dict[str, Figure]) -> Iterator[dict[str, Figure]]:
    """The figures of `study`, for tests that do not change it."""
    with matplotlib.rc_context(plot.STYLE):
        yield drawn_once


def lines_of(figure: Figure, panel: int, style: str) -> list[list[float]]:
    """Heights of the lines of a style, in the order drawn."""
    lines = [
        line for line in figure.axes[panel].lines if line.get_linestyle() == style and np.size(line.get_xdata()) > 2
    ]
    return [np.asarray(line.get_ydata(), dtype=float).tolist() for line in lines if line.get_marker() not in ("_", "|")]


def test_every_figure_is_written_twice_alike_and_as_plain_shapes(study: Params) -> None:
    settings = dict(matplotlib.rcParams)
    plot.main()
    assert dict(matplotlib.rcParams) == settings, "nothing is left in them"
    first = {path.stem: path.read_bytes() for path in FOLDER.glob("*.svg")}
    assert first.keys() == NAMES
    plot.main()
    assert first == {path.stem: path.read_bytes() for path in FOLDER.glob("*.svg")}
    for content in first.values():
        tags = [element.tag.split("}")[1] for element in ElementTree.fromstring(content).iter()]
        assert "text" not in tags and "date" not in tags
        assert "path" in tags


def test_text_is_legible_and_legends_cover_no_data(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        assert figure.get_figwidth() <= 9, f"{name} would be shrunk in a README"
        figure.draw_without_rendering()
        assert min(float(text.get_fontsize()) for text in figure.findobj(Text)) >= 10
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, f"the legend of {name} is cut off"
        for ax in figure.axes:
            assert not box.overlaps(ax.get_window_extent()), f"the legend of {name} lies on the data"
            assert ax.get_xlabel()


def test_tokens_per_round_shows_measured_and_predicted(study: Params, figures: dict[str, Figure]) -> None:
    by_k = read_table(FOLDER, "sweep_k")
    for style, column in (("-", "mean_acceptance_length"), ("--", "iid_acceptance_length")):
        expected = [by_k.loc[by_k["pair"] == pair, column].tolist() for pair in study.study.pairs]
        assert lines_of(figures["tokens_per_round"], 0, style) == expected
    assert len(figures["tokens_per_round"].axes[0].collections) == len(study.study.pairs), "interval bars"


def test_acceptance_per_position_is_that_of_the_largest_k(study: Params, figures: dict[str, Figure]) -> None:
    record = cells.read_json(cells.sweep_k("fake", "small_int8", 8))
    figure = figures["acceptance_per_position"]
    assert lines_of(figure, 0, "-")[0] == pytest.approx(record["acceptance_per_position"], rel=1e-5)
    assert lines_of(figure, 1, "-")[0] == pytest.approx(record["conditional_acceptance_per_position"], rel=1e-5)
    assert lines_of(figure, 0, "--")[0] == pytest.approx([record["alpha"] ** j for j in range(1, 9)], rel=1e-4)


def test_positions_have_intervals_where_there_are_any(study: Params) -> None:
    path, key = cells.sweep_k("fake", "small_int8", 8), "acceptance_per_position"
    record = cells.read_json(path)
    low = [*record[f"{key}_lo"][:-1], None]
    fake_cells.edit(path, **{f"{key}_lo": low})
    tables.main()
    with matplotlib.rc_context(plot.STYLE):
        drawn = plot.draw(FOLDER)
    left, right = drawn["acceptance_per_position"].axes
    assert [len(ax.collections) for ax in (left, right)] == [len(study.study.pairs)] * 2
    assert len(drawn["toy"].axes[1].collections) == 2
    drawn_bars: Any = left.collections[0]
    bars = [segment[:, 1] for segment in drawn_bars.get_segments() if len(segment) == 2]  # an unknown end is dropped
    assert [bar[0] for bar in bars] == pytest.approx(low[:7], rel=1e-4)
    assert [bar[1] for bar in bars] == pytest.approx(record[f"{key}_hi"][:7], rel=1e-4)


def test_rates_from_few_tokens_are_hollow(figures: dict[str, Figure]) -> None:
    right = figures["acceptance_per_position"].axes[1]
    hollow = [line for line in right.lines if line.get_markerfacecolor() == "white"]
    tested = cells.read_json(cells.sweep_k("fake", "small_lookup", 8))["tested_per_position"]
    assert sum(np.size(line.get_xdata()) for line in hollow) == len([n for n in tested if n < plot.FEW_TESTS]) > 0


def test_the_toy_figure_has_both_limits_and_the_geometric_form(figures: dict[str, Figure]) -> None:
    rounds, _, temperature = figures["toy"].axes
    by_k = read_table(FOLDER, "toy_k")
    assert lines_of(figures["toy"], 0, "--") == [by_k["geometric_tokens_per_round"].tolist()]
    assert temperature.get_xscale() == "log"
    limits = [np.asarray(line.get_ydata())[0] for line in temperature.lines if line.get_linestyle() in (":", "-.")]
    assert limits == [0.97, 1.0]
    assert rounds.get_ylabel() and temperature.get_ylabel()


@pytest.mark.parametrize(("name", "own", "other"), [("toy", "toy", "small_int8"), ("real", "small_int8", "toy")])
def test_three_panels_of_one_pair_with_the_other_beside_it_in_the_second(
    figures: dict[str, Figure], name: str, own: str, other: str
) -> None:
    tables_of = {"toy": ("toy_k", "toy_acceptance_per_position"), "small_int8": ("sweep_k", "acceptance_per_position")}
    (by_k, positions), (_, beside) = (
        [table[table["pair"] == pair] for table in (read_table(FOLDER, each) for each in tables_of[pair])]
        for pair in (own, other)
    )
    rounds, depth, _ = figures[name].axes
    assert lines_of(figures[name], 0, "-") == [by_k["mean_acceptance_length"].tolist()]
    assert lines_of(figures[name], 0, "--") == [by_k["geometric_tokens_per_round"].tolist()]
    at_eight = [table[table["k"] == 8] for table in (positions, beside)]
    column = "conditional_acceptance_per_position"
    assert lines_of(figures[name], 1, "-") == [table[column].tolist() for table in at_eight]
    written = [text.get_text() for text in depth.texts]
    assert written == [str(count) for table in at_eight for count in table["tested"]], "the tokens at risk"
    assert rounds.get_ylim()[1] > by_k["mean_acceptance_length_hi"].max()


def test_the_limits_of_a_real_pair_are_its_greedy_acceptance_and_one(figures: dict[str, Figure]) -> None:
    temperature = figures["real"].axes[2]
    by_k = read_table(FOLDER, "sweep_k")
    greedy = by_k[(by_k["pair"] == "small_int8") & (by_k["k"] == 4)]["alpha_overlap"].iloc[0]
    limits = [np.asarray(line.get_ydata())[0] for line in temperature.lines if line.get_linestyle() in (":", "-.")]
    assert limits == [greedy, 1.0]


def test_copied_tokens_have_no_limit_at_high_temperatures_and_depths_may_differ(study: Params) -> None:
    read = (read_table(FOLDER, name) for name in ("sweep_k", "acceptance_per_position", "sweep_temperature"))
    real = [table[table["pair"] == "small_lookup"] for table in read]
    toy = [read_table(FOLDER, name) for name in ("toy_k", "toy_acceptance_per_position", "toy_temperature")]
    real[1], toy[1] = real[1][real[1]["k"] == 2], toy[1][toy[1]["k"] == 3]
    looks = pair_looks(real[0], toy[0])
    copied = real_pair(looks, *real)
    assert copied.name == "small_lookup" and np.isnan(copied.at_infinity)
    with matplotlib.rc_context(plot.STYLE):
        _, depth, _ = panels(copied, toy_pair(looks, *toy)).axes
    assert len(depth.texts) == 2 + 3, "each at its own largest k, where they share none"


def test_categories_have_acceptance_of_every_pair_and_speed_of_the_timed_ones(
    study: Params, figures: dict[str, Figure]
) -> None:
    for ax, name, key in zip(
        figures["by_category"].axes,
        ("acceptance_by_category", "speedup_by_category"),
        ("alpha", "speedup"),
        strict=True,
    ):
        table = read_table(FOLDER, name)
        drawn = [line.get_xdata() for line in ax.lines if line.get_marker() in "osD" and line.get_linestyle() == "None"]
        assert [np.asarray(x).tolist() for x in drawn] == [
            table.loc[table["pair"] == pair, key].tolist() for pair in study.study.pairs
        ]
    left = figures["by_category"].axes[0]
    assert [text.get_text() for text in left.get_yticklabels()] == ["all prompts", "qa", "multi turn"]
    ranges: Any = left.collections[0]
    part = read_table(FOLDER, "acceptance_by_category").query("pair == 'small_int8'")
    ends = [segment[:, 0].tolist() for segment in ranges.get_segments()]
    assert ends == part[["alpha_lowest", "alpha_highest"]].to_numpy().tolist()


def test_a_histogram_of_accepted_tokens_per_pair_at_the_largest_k(study: Params, figures: dict[str, Figure]) -> None:
    table = read_table(FOLDER, "accepted_per_round")
    for ax, pair in zip(figures["accepted_per_round"].axes, study.study.pairs, strict=True):
        part = table[(table["pair"] == pair) & (table["k"] == 8)]
        bars: list[Any] = [patch for patch in ax.patches if hasattr(patch, "get_height")]
        assert [bar.get_height() for bar in bars] == part["share"].tolist()
        (outline,) = [patch for patch in ax.patches if not hasattr(patch, "get_height")]
        stairs: Any = outline
        assert stairs.get_data().values.tolist() == part["iid_share"].tolist()
        assert ax.get_title() == f"{pair}: 120 rounds" and len(ax.collections) == 1, "interval bars"


def test_speedup_by_k_is_measured_predicted_and_ideal(study: Params, figures: dict[str, Figure]) -> None:
    table = read_table(FOLDER, "speedup_by_k")
    for panel, pair in enumerate(study.study.pairs):
        part, ax = table[table["pair"] == pair], figures["speedup_by_k"].axes[panel]
        drawn = {line.get_linestyle(): np.asarray(line.get_ydata()).tolist() for line in ax.lines}
        assert drawn["-"] == part["speedup"].tolist() and len(ax.collections) == 1, "interval bars"
        assert drawn["--"] == part["predicted_speedup"].tolist()
        assert drawn["-."] == part["ideal_speedup"].tolist()
        assert ax.get_title().startswith(pair)


def test_many_pairs_have_rows_of_panels_and_looks_of_their_own(study: Params) -> None:
    speedups = read_table(FOLDER, "speedup_by_k").query("pair == 'small_int8'")
    many = pd.concat([speedups.assign(pair=f"small_draft{index}") for index in range(9)])
    looks = pair_looks(many)
    assert len({(look["marker"], look.get("markerfacecolor")) for look in looks.values()}) == 9, "of one colour"
    with matplotlib.rc_context(plot.STYLE):
        figure = plot.speedup_by_k(many, looks)
    figure.draw_without_rendering()
    boxes = [ax.xaxis.label.get_window_extent() for ax in figure.axes]
    assert len(boxes) == 9 and not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert [bool(ax.get_ylabel()) for ax in figure.axes] == [True, False, False] * 3


def test_pairs_with_one_value_of_k_or_t_lie_beside_each_other(study: Params) -> None:
    looks = pair_looks(read_table(FOLDER, "sweep_k"))
    by_temperature = read_table(FOLDER, "sweep_temperature").query("temperature == 1")
    by_k = read_table(FOLDER, "sweep_k").query("k == 4")
    with matplotlib.rc_context(plot.STYLE):
        drawn = [plot.acceptance_vs_temperature(by_temperature, looks), plot.tokens_per_round(by_k, looks)]
    for figure in drawn:
        figure.draw_without_rendering()
        (ax,) = figure.axes
        places = [ax.transData.transform(container.lines[0].get_xydata()[0])[0] for container in ax.containers]
        assert len(places) == 3 and min(np.diff(sorted(places))) > 8, "pixels, more than a marker's half"


@pytest.mark.parametrize("letters", [54, 90])
def test_long_names_do_not_leave_the_picture(letters: int) -> None:
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    figure.subplots()
    legend(
        figure, {"x" * letters: {"color": "red"}, "y" * letters: {"color": "blue"}}, [line("measured"), line("none")]
    )
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_pair_that_never_drafts_has_empty_panels(study: Params) -> None:
    read = [read_table(FOLDER, name) for name in ("sweep_k", "acceptance_per_position", "sweep_temperature")]
    looks = pair_looks(read[0], read_table(FOLDER, "toy_k"))
    silent = [table[table["pair"] == "small_int8"] for table in read]
    silent[1] = silent[1].iloc[:0]
    unknown = dict.fromkeys((f"alpha_overlap{end}" for end in ("", "_lo", "_hi")), float("nan"))
    silent[0], silent[2] = silent[0].assign(**unknown), silent[2].assign(**unknown)
    pair = real_pair(looks, *silent)
    with matplotlib.rc_context(plot.STYLE):
        _, depth, temperature = panels(pair, pair).axes
    assert not depth.texts and np.isfinite(temperature.get_ylim()).all()


def test_a_draft_has_one_colour_in_every_figure_and_study() -> None:
    def table(*pairs: str) -> pd.DataFrame:
        return pd.DataFrame({"pair": pairs, "draft": [pair.split("_")[1] for pair in pairs]})

    looks = pair_looks(table("a_int8", "a_lookup", "a_own", "b_own", "b_int8"), table("toy_toy-draft"))
    assert (
        looks["a_int8"]["color"] == looks["b_int8"]["color"] == pair_looks(table("c_int4", "c_int8"))["c_int8"]["color"]
    )
    assert looks["a_own"]["color"] == looks["b_own"]["color"]
    assert len({looks[pair]["color"] for pair in ("a_int8", "a_lookup", "a_own", "toy_toy-draft")}) == 4
    assert len({look["marker"] for look in looks.values()}) == len(looks)
    drafts = {look["color"] for look in looks.values()}
    assert not drafts & {*KINDS}, "what is no draft looks otherwise"


def test_charts_have_the_colours_of_the_figures() -> None:
    for path in (ROOT / ".dvc" / "plots").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        for draft, colour in zip(DRAFTS, PALETTE, strict=False):
            assert f"'{draft}': '{to_hex(colour)}'" in text, path.name
        others = ", ".join(f"'{to_hex(colour)}'" for colour in OTHER_DRAFTS)
        assert f"[{others}]" in text, path.name


def test_the_chart_over_temperatures_differs_from_the_one_over_k_by_its_scale() -> None:
    linear, log = (json.loads((ROOT / f".dvc/plots/line_by_pair{end}.json").read_text("utf-8")) for end in ("", "_log"))
    assert log["encoding"]["x"].pop("scale") == {"type": "log"} and log["encoding"]["x"].pop("axis")
    assert "log scale" in log.pop("description") and linear.pop("description") and log == linear


def test_every_figure_is_described() -> None:
    assert captions.FIGURES.keys() == NAMES


def test_block_verification_shows_real_pairs_and_the_toy_over_one_axis(
    study: Params, figures: dict[str, Figure]
) -> None:
    (ax,) = figures["block_verification"].axes
    real, toy = read_table(FOLDER, "sweep_temperature"), read_table(FOLDER, "toy_temperature")
    expected = [real.loc[real["pair"] == pair, "block_gain"].tolist() for pair in study.study.pairs]
    assert lines_of(figures["block_verification"], 0, "-") == [*expected, toy["block_gain"].tolist()]
    assert len(ax.collections) == len(expected) + 1, "interval bars"
    assert ax.get_xscale() == "log"
    places = [np.asarray(line.get_xdata(), dtype=float) for line in ax.lines if line.get_linestyle() == "-"]
    drawn = [x.tolist() for x in places if x.size > 2]
    assert drawn[-1] == study.toy.temperature
    for x in drawn[:-1]:
        assert x == pytest.approx(study.study.temperature, rel=0.1), "moved by no more than a marker"
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == ["0.02", "0.1", "0.2", "0.3", "0.5", "1", "1.5", "2", "5"]


def test_confidence_shows_what_the_draft_and_the_target_have_to_do(study: Params, figures: dict[str, Figure]) -> None:
    left, right = figures["confidence"].axes
    table = read_table(FOLDER, "sweep_confidence")
    ((line, *_), *_) = [container.lines for container in left.containers]
    assert np.asarray(line.get_xdata()).tolist() == (
        (table["mean_drafted_per_round"] / table["mean_acceptance_length"]).tolist()
    )
    assert np.asarray(line.get_ydata()).tolist() == table["mean_acceptance_length"].tolist()
    assert {text.get_text(): text.xy for text in left.texts} == {
        f"threshold {row['confidence_threshold']:g}": (
            row["mean_drafted_per_round"] / row["mean_acceptance_length"],
            row["mean_acceptance_length"],
        )
        for row in (table.iloc[0], table.iloc[-1])
    }
    assert lines_of(figures["confidence"], 1, "-") == [table["draft_acceptance_rate"].tolist()]
    assert right.get_xlabel() == "confidence threshold"


def test_with_several_pairs_only_one_has_its_thresholds_named(study: Params, tmp_path: Path) -> None:
    both = "detail_pairs: [small_int8, small_bf16]"
    fake_cells.write(tmp_path, fake_cells.PARAMS.replace("detail_pairs: [small_int8]", both))
    tables.main()
    with matplotlib.rc_context(plot.STYLE):
        left, right = plot.draw(FOLDER)["confidence"].axes
    assert len(left.containers) == len(right.containers) == 2
    assert [text.get_text() for text in left.texts] == ["threshold 0.8", "threshold 0"]


def test_speedup_writes_every_value_beside_its_row(study: Params, figures: dict[str, Figure]) -> None:
    (ax,) = figures["speedup"].axes
    benchmark = read_table(FOLDER, "hf_benchmark")
    written = {text.get_text() for text in ax.texts}
    assert written == {f"{v:.2f}×" for c in ("speedup", "speedup_over_fastest") for v in benchmark[c]}
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"{pair}, k = 4" for pair in study.study.pairs]


def test_the_cost_curve_shows_every_curve_and_the_roof(study: Params, figures: dict[str, Figure]) -> None:
    """A row of panels per pair; the pair whose draft copies text has one panel."""
    table = read_table(FOLDER, "cost_curve")
    axes = figures["cost_curve"].axes
    titles = [
        "small_int8: target small",
        "small_int8: draft int8",
        "small_bf16: target small",
        "small_bf16: draft bf16",
    ]
    assert [ax.get_title() for ax in axes] == [*titles, "small_lookup: target small"]
    for panel, (pair, role) in enumerate(
        (pair, role) for pair in ("small_int8", "small_bf16") for role in ("target", "draft")
    ):
        part = table[(table["pair"] == pair) & (table["role"] == role)]
        curves = [points["seconds"].tolist() for _, points in part.groupby(["kernels", "context"], sort=False)]
        assert len(curves) == 6
        assert lines_of(figures["cost_curve"], panel, "-") == [
            pytest.approx([1000 * s for s in curve]) for curve in curves
        ]
        roof = part["roof_seconds"].iloc[:16].tolist()
        assert lines_of(figures["cost_curve"], panel, "--") == [pytest.approx([1000 * s for s in roof])]
        assert len(axes[panel].collections) == 6, "interval bars"


def test_kernels_that_were_not_run_have_no_line(study: Params) -> None:
    path = cells.cost_curve("fake", "small_int8")
    curves = cells.read_json(path)["curves"]
    unknown: dict[str, Any] = dict.fromkeys(("seconds", "seconds_lo", "seconds_hi"), [None] * 16)
    curves = [c | (unknown | {"refusal": "why"} if c["kernels"] == "joined" else {}) for c in curves]
    fake_cells.edit(path, curves=curves)
    tables.main()
    with matplotlib.rc_context(plot.STYLE):
        figure = plot.draw(FOLDER)["cost_curve"]
    heights = lines_of(figure, 0, "-")
    assert sum(np.isnan(line).all() for line in heights) == 2 and sum(np.isfinite(line).all() for line in heights) == 4


def test_a_comparison_has_a_bar_for_each_contestant_the_fastest_on_top(study: Params) -> None:
    path = cells.comparison("fake", "small_int8")
    slow = [
        c | ({"tokens_per_second": None} if c["name"] == "hf" else {}) for c in cells.read_json(path)["contestants"]
    ]
    fake_cells.edit(path, contestants=slow, refusals=[{"kernels": "compiled", "reason": "why"}])
    tables.main()
    with matplotlib.rc_context(plot.STYLE):
        figure = plot.draw(FOLDER)["comparison"]
    table = read_table(FOLDER, "comparison")
    for ax, (pair, part) in zip(figure.axes, table[table["refusal"].isna()].groupby("pair", sort=False), strict=True):
        bars: list[Any] = [*ax.patches]
        widths = [bar.get_width() for bar in bars]
        assert widths == sorted(part["tokens_per_second"].fillna(0)) and ax.get_title() == pair
        names = [text.get_text() for text in ax.get_yticklabels()]
        assert names[-1] == "speculative, packed, k = 4" and "HF with the draft, k = 4" in names
        assert len({bar.get_facecolor() for bar in bars}) == 3, "plain, speculative, Hugging Face"
        (intervals,) = ax.collections
        drafting = part.sort_values("tokens_per_second", kind="stable").query("method == 'spec'")
        ends = [segment[:, 0].tolist() for segment in intervals.get_segments() if len(segment) == 2]
        assert ends == [
            pytest.approx([30 * low, 30 * high])
            for low, high in zip(drafting["speedup_over_fastest_lo"], drafting["speedup_over_fastest_hi"], strict=True)
        ]
        (baseline,) = [line for line in ax.lines if line.get_linestyle() == ":"]
        assert np.asarray(baseline.get_xdata()).tolist() == [30.0, 30.0]
    assert "plain, packed" in names and len(figure.axes[0].texts) == len(figure.axes[0].patches) - 1


def test_the_smallest_study_without_intervals_or_acceptances_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plot.py"])
    fake_cells.write(tmp_path, SMALLEST)
    for path in Path("metrics").rglob("*.json"):
        fake_cells.without_intervals(path)
    unknown: dict[str, Any] = dict.fromkeys(("alpha", "alpha_overlap", "iid_acceptance_length"))
    fake_cells.edit(cells.sweep_k("fake", "small_int8", 2), **unknown)
    fake_cells.edit(cells.hf_benchmark("fake", "small_int8", 4), speedup_over_fastest=None)
    fake_cells.edit(cells.sweep_temperature("fake", "small_int8", 1.0), block_gain=None)
    fake_cells.edit(cells.sweep_confidence("fake", "small_int8", 0.4), mean_drafted_per_round=None)
    tables.main()
    plot.main()
    assert {path.stem for path in FOLDER.glob("*.svg")} == NAMES
    with matplotlib.rc_context(plot.STYLE):
        labels = [text.get_text() for text in plot.draw(FOLDER)["tokens_per_round"].legends[0].get_texts()]
    assert "measured" in labels and "measured, 95 % interval" not in labels


# Columns of theory, which has no interval, and factors between it and what is measured.
PREDICTED = (
    *("iid_acceptance_length", "geometric_tokens_per_round", "predicted_speedup", "ideal_speedup"),
    *("iid_factor", "verify_cost_factor", "overhead_factor"),
)


def dvc_charts() -> list[tuple[str, dict[str, Any]]]:
    plots = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["plots"]
    return [(title, chart) for entry in plots if isinstance(entry, dict) for title, chart in entry.items() if chart]


@pytest.mark.parametrize(("title", "chart"), dvc_charts())
def test_dvc_can_fill_the_template_of_each_chart(study: Params, title: str, chart: dict[str, Any]) -> None:
    ((path, columns),) = chart["y"].items()
    table = pd.read_csv(path.replace("${study.name}", "fake"), dtype=str, keep_default_na=False)
    several = isinstance(columns, list)
    rows = []
    for column in columns if several else [columns]:
        assert column in table and chart["x"] in table
        predicted = column in PREDICTED  # of what is measured, the templates draw the interval
        assert predicted or {f"{column}_lo", f"{column}_hi"} <= {*table}
        rows += [row | {"field": column, "rev": "workspace", "y": row[column]} for row in table.to_dict("records")]
    y = "y" if several else columns
    renderer = VegaRenderer(
        rows, title, template=chart["template"], template_dir=ROOT / ".dvc/plots", x=chart["x"], y=y
    )
    filled = renderer.get_filled_template()
    assert "<DVC_METRIC" not in json.dumps(filled)
    assert len(filled["data"]["values"]) == len(rows)
