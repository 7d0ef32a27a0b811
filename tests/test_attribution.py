"""Why a speed-up is not more, drawn and told: every bar and every word is that of the numbers."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_cells
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from report_text import section, table

from pipeline import cells, report, tables
from pipeline.attribution import FACTORS, configurations, is_attributed
from pipeline.attribution_figures import COLOURS, LABELS, attribution
from pipeline.attribution_report import attribution_findings, place_for_speculation
from pipeline.drawing import STYLE
from pipeline.results import read_table

FOLDER = Path("plots/fake")
NONE = pd.DataFrame()


def timed(**changes: Any) -> dict[str, Any]:
    """A row of a timed cell."""
    factors = {"iid_factor": 0.9, "verify_cost_factor": 0.8, "overhead_factor": 1.25}
    speeds = {"ideal_speedup": 2.0, "speedup": 1.8, "speedup_lo": 1.7, "speedup_hi": 1.9, "speedup_over_fastest": 1.8}
    ends = {"speedup_over_fastest_lo": 1.7, "speedup_over_fastest_hi": 1.9, "fastest_baseline": "own plain decoding"}
    noise = {"noise_floor": 1.0, "noise_floor_lo": 0.99, "noise_floor_hi": 1.01}
    costs = {"cost_coefficient": 0.3, "verify_cost_ratio": 1.4}
    return {"pair": "small_int8", "k": 4, "kernels": "packed", **factors, **speeds, **ends, **noise, **costs, **changes}


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(rows)


# The rows of both tables


def test_a_configuration_is_a_row_of_either_table() -> None:
    rows = configurations(frame(timed(), timed(k=8)), frame(timed(variant="w4-g64-rtn")))
    assert [(row["k"], row["variant"]) for row in rows] == [(4, None), (8, None), (4, "w4-g64-rtn")]
    without = pd.DataFrame([timed()]).drop(columns="kernels")
    assert configurations(without, NONE)[0]["kernels"] is None, "as in tables of older cells"


@pytest.mark.parametrize("key", [*FACTORS, "ideal_speedup", "speedup"])
@pytest.mark.parametrize("value", [None, math.nan, 0.0])
def test_a_row_without_a_factor_is_not_attributed(key: str, value: float | None) -> None:
    assert is_attributed(timed())
    assert not is_attributed(timed(**{key: value}))


# The figure


def drawn(benchmark: pd.DataFrame, quantized: pd.DataFrame = NONE) -> Axes:
    with matplotlib.rc_context(STYLE):
        figure = attribution(benchmark, quantized)
        figure.draw_without_rendering()
    (ax,) = figure.axes
    return ax


def bars(ax: Axes) -> dict[int, dict[str, tuple[float, float]]]:
    """By row and factor: where the bar begins and how far it goes; negative to the left."""
    names = {to_rgb(colour): key for key, colour in COLOURS.items()}
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for patch in ax.patches:
        assert isinstance(patch, Rectangle)
        row = round(patch.get_y() + patch.get_height() / 2)
        found.setdefault(row, {})[names[to_rgb(patch.get_facecolor())]] = (patch.get_x(), patch.get_width())
    return found


def marks(ax: Axes) -> list[Any]:
    return [np.asarray(line.get_xydata())[0].tolist() for line in ax.lines if line.get_marker() == "|"]


def written(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_bars_stand_end_to_end_on_the_side_of_their_sign_and_the_mark_at_their_product() -> None:
    ax = drawn(frame(timed(), timed(pair="other", iid_factor=1.1, overhead_factor=1.2, verify_cost_factor=1.0)))
    first, second = bars(ax)[0], bars(ax)[1]
    log = math.log
    assert first["iid_factor"] == pytest.approx((0, log(0.9)))
    assert first["verify_cost_factor"] == pytest.approx((log(0.9), log(0.8)))
    assert first["overhead_factor"] == pytest.approx((0, log(1.25)))
    assert second["iid_factor"] == pytest.approx((0, log(1.1))) and second["verify_cost_factor"][1] == 0
    assert second["overhead_factor"] == pytest.approx((log(1.1), log(1.2)))
    assert marks(ax) == [pytest.approx((log(0.9 * 0.8 * 1.25), 0)), pytest.approx((log(1.1 * 1.2), 1))]


def test_a_row_is_named_and_has_both_speedups_beside_it() -> None:
    ax = drawn(frame(timed()), frame(timed(variant="w4-g64-rtn", k=8, speedup_lo=None, speedup_hi=None)))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["small_int8\nk = 4, packed kernels", "small_int8, w4-g64-rtn\nk = 8, packed kernels"]
    assert written(ax) == ["2.00×", "1.80× [1.70, 1.90]", "2.00×", "1.80×", "ideal", "measured"]


def test_the_legend_names_every_factor_and_the_mark() -> None:
    (legend,) = drawn(frame(timed())).figure.legends
    assert {text.get_text() for text in legend.get_texts()} >= {*LABELS.values(), "measured / ideal", "the ideal"}


def test_rows_without_values_are_left_out_and_none_at_all_is_an_empty_figure() -> None:
    unknown = timed(pair="unknown", **dict.fromkeys((*FACTORS, "ideal_speedup")))
    assert [label.get_text() for label in drawn(frame(unknown, timed())).get_yticklabels()] == [
        "small_int8\nk = 4, packed kernels"
    ]
    for ax in (drawn(frame(unknown)), drawn(NONE)):
        assert not ax.patches and not marks(ax)


@pytest.mark.parametrize("factor", [0.02, 0.3, 0.8, 0.97, 1.0, 1.03, 1.6, 30.0])
def test_whatever_the_factors_are_they_are_in_sight_with_ticks_that_do_not_run_together(factor: float) -> None:
    ax = drawn(frame(timed(iid_factor=factor, verify_cost_factor=1.0, overhead_factor=1.0)))
    low, high = ax.get_xlim()
    assert low < min(0, math.log(factor)) and high > max(0, math.log(factor))
    assert "×1" in [label.get_text() for label in ax.get_xticklabels()]
    for tick, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True):
        assert math.exp(tick) == pytest.approx(float(label.get_text().removeprefix("×")))
    boxes = sorted((label.get_window_extent() for label in ax.get_xticklabels()), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


# The sentences on factors


def finding(**changes: Any) -> str:
    (line,) = attribution_findings(frame(timed(**changes)), NONE).splitlines()
    return line


def test_the_factor_that_costs_most_is_named() -> None:
    assert finding() == "- `small_int8`, k = 4, packed kernels: verification costs most, ×0.800."
    assert "packed kernels: overhead costs most, ×0.500." in finding(overhead_factor=0.5)
    assert "acceptance that is not i.i.d. costs most, ×0.700." in finding(iid_factor=0.7)


def test_factors_that_are_printed_alike_cost_the_same() -> None:
    assert finding(iid_factor=0.8001).endswith("acceptance that is not i.i.d. and verification cost most, ×0.800 each.")


def test_where_no_factor_is_printed_below_1_none_costs_anything() -> None:
    line = finding(iid_factor=0.9999, verify_cost_factor=1.02)
    assert line.endswith("no factor costs anything, the least of them being ×1.000.")


def test_an_ideal_that_is_no_gain_is_told() -> None:
    assert finding(ideal_speedup=0.9, cost_coefficient=0.71).endswith(
        "×0.800, and the ideal itself is no gain, 0.90, at c = 0.71."
    )
    assert "no gain" in finding(ideal_speedup=1.004) and "no gain" not in finding(ideal_speedup=1.006)


def test_what_is_not_known_is_said_to_be_so_and_a_variant_is_named() -> None:
    assert finding(variant="w4-g64-rtn", iid_factor=None).endswith(
        "`small_int8` with w4-g64-rtn, k = 4, packed kernels: not known."
    )


# The paragraph on the machine


def curves(
    seconds: dict[str, list[float | None]],
    roof: list[float | None],
    drafts: dict[str, float] | None = None,
    pair: str = "small_int8",
    context: int = 64,
) -> pd.DataFrame:
    """Rows of cost_curve: the target's seconds by kernels, and one step of the draft int8 by kernels."""
    common = {"pair": pair, "device": "cpu", "context": context}
    rows = [
        {**common, "role": "target", "model": "small", "kernels": name, "n": n, "seconds": value, "roof_seconds": top}
        for name, values in seconds.items()
        for n, (value, top) in enumerate(zip(values, roof, strict=True), start=1)
    ]
    rows += [
        {**common, "role": "draft", "model": "int8", "kernels": name, "n": 1, "seconds": value, "roof_seconds": 0.1}
        for name, value in (drafts or {}).items()
    ]
    table = pd.DataFrame(rows)
    return table.assign(seconds_lo=table["seconds"])


def five(last: float | None) -> list[float | None]:
    return [1.0, 1.1, 1.1, 1.1, last]


FLAT_ROOF: list[float | None] = [0.5] * 5
STEEP_ROOF: list[float | None] = [0.5, 0.5, 0.5, 0.6, 1.0]


def place(costs: pd.DataFrame) -> list[str]:
    return place_for_speculation(costs).splitlines()


def test_a_flat_roof_is_memorys_and_a_steep_one_arithmetics() -> None:
    first = place(curves({"packed": five(1.2)}, FLAT_ROOF))[0]
    assert first == (
        "- `small` on cpu: memory is the limit of a pass over 1 token and of one over 5 alike, which read the same weights, so "
        "that verifying 4 drafted tokens could cost one step."
    )
    assert (
        "arithmetic is a limit here, for at best a pass over 5 tokens takes 2.00 times as long as one over 1."
        in (place(curves({"packed": five(1.2)}, STEEP_ROOF))[0])
    )
    unknown = place(curves({"packed": five(1.2)}, [None] * 5))
    assert "what the machine could do at best is not known" in unknown[0]
    assert unknown[1] == "- `small` on cpu, packed kernels: verification is cheap, v = T(5) / T(1) = 1.20."


@pytest.mark.parametrize("n", [1, 5])
def test_nothing_is_said_of_kernels_whose_passes_were_mostly_disturbed(n: int) -> None:
    costs = curves({"packed": five(1.2), "native": five(1.5)}, FLAT_ROOF, {"packed": 0.4, "native": 0.3})
    disturbed = (costs["role"] == "target") & (costs["kernels"] == "native") & (costs["n"] == n)
    costs.loc[disturbed, "seconds_lo"] = costs["seconds"] / 2.1
    assert place(costs)[1:] == [
        "- `small` on cpu, packed kernels: verification is cheap, v = T(5) / T(1) = 1.20; what lies above 1 is the kernels' "
        "doing, for arithmetic asks for none of it. c is 0.40 with int8. A step of the target takes 2.00 times its roof.",
        "- `small` on cpu, native kernels: too noisy to say; the machine was busy, or its speed changed.",
    ]


def test_a_pair_that_was_disturbed_leaves_the_median_to_others() -> None:
    quiet, busy = (
        curves({"native": five(v)}, FLAT_ROOF, {"native": 0.3}, pair=pair) for v, pair in ((1.5, "a"), (9.0, "b"))
    )
    (line,) = place(pd.concat([quiet, busy.assign(seconds_lo=busy["seconds"] / 3)]))[1:]
    assert "v = T(5) / T(1) = 1.50;" in line and line.count("with int8") == 1


def test_no_factor_is_blamed_for_a_speed_up_that_is_hardly_known() -> None:
    assert "too noisy to say which factor costs most, with a speed-up between 0.66 and 2.01" in finding(
        speedup_lo=0.66, speedup_hi=2.01
    )


@pytest.mark.parametrize(
    ("last", "roof", "expected"),
    [
        (1.04, FLAT_ROOF, "verification is cheap, v = T(5) / T(1) = 1.04, next to nothing."),
        (1.29, FLAT_ROOF, "verification is cheap, v = T(5) / T(1) = 1.29; what lies above 1 is the kernels' doing"),
        (1.296, FLAT_ROOF, "verification is dear, v = T(5) / T(1) = 1.30; what lies above 1 is the kernels' doing"),
        (3.0, FLAT_ROOF, "verification is dear, v = T(5) / T(1) = 3.00; what lies above 1 is the kernels' doing"),
        (2.05, STEEP_ROOF, "verification is dear, v = T(5) / T(1) = 2.05, which is what arithmetic asks for."),
        (2.5, STEEP_ROOF, "v = T(5) / T(1) = 2.50, of which arithmetic asks for 2.00 and the kernels for the rest."),
    ],
)
def test_v_is_cheap_or_dear_and_has_its_cause(last: float, roof: list[float | None], expected: str) -> None:
    assert expected in place(curves({"packed": five(last)}, roof))[1]


def test_kernels_have_a_line_each_with_c_and_the_distance_from_the_roof_and_those_not_run_have_none() -> None:
    seconds: dict[str, list[float | None]] = {
        "default": [2.0, 2.0, 2.0, 2.0, 3.0],
        "joined": [None] * 5,
        "packed": five(1.2),
    }
    lines = place(curves(seconds, FLAT_ROOF, {"default": 0.5, "packed": 0.4}))
    assert [line.split(":")[0] for line in lines] == [
        "- `small` on cpu",
        "- `small` on cpu, default kernels",
        "- `small` on cpu, packed kernels",
    ]
    assert lines[1].endswith("c is 0.25 with int8. A step of the target takes 4.00 times its roof.")
    assert lines[2].endswith("c is 0.40 with int8. A step of the target takes 2.00 times its roof.")


def test_pairs_with_one_target_share_a_line_and_only_the_shortest_context_counts() -> None:
    parts = [
        curves({"packed": five(v)}, FLAT_ROOF, {"packed": c}, pair, context)
        for pair, v, c, context in (("a", 1.1, 0.2, 64), ("b", 1.2, 0.3, 64), ("c", 1.6, 0.4, 64), ("a", 9.0, 0.9, 512))
    ]
    lines = place(pd.concat(parts))
    assert len(lines) == 2 and "v = T(5) / T(1) = 1.20" in lines[1]
    assert "c is 0.20 with int8, 0.30 with int8, 0.40 with int8." in lines[1]


def test_a_short_curve_is_judged_by_its_last_n_and_a_draft_without_a_model_has_no_c() -> None:
    lines = place(curves({"packed": [1.0, 1.2]}, [0.5, 0.5]))
    assert "of one over 2 alike" in lines[0] and "verifying 1 drafted" in lines[0]
    assert "v = T(2) / T(1) = 1.20" in lines[1] and "c is" not in lines[1]


# In the report


def test_the_report_attributes_every_timed_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["x.py"])
    study = fake_cells.write(tmp_path).study
    tables.main()
    part = section(report.report("fake", FOLDER), "Why not more")
    rows = table(part)
    assert [(row["pair"], row["draft's variant"]) for row in rows] == [
        *((pair, "–") for pair in study.pairs),
        *(("small_int8", variant) for variant in study.kernel_variants),
    ]
    assert {row["kernels"] for row in rows} == {"default"}
    assert part.count("costs most") == len(rows)
    quantized = read_table(FOLDER, "quantized_benchmark")
    assert drawn(read_table(FOLDER, "hf_benchmark"), quantized).get_ylim() == (len(rows) - 0.5, -0.5)
    assert "- `small` on cpu, packed kernels: verification is dear, v = T(5) / T(1) = 1.40; what lies above 1" in part
    whole = report.report("fake", FOLDER)
    assert table(section(whole, "Speed of quantised drafts"))[0]["peak memory, GiB"] == "2.00"
    assert table(section(whole, "Baselines and noise"))[0]["peak memory, GiB"] == "2.00"
    fake_cells.edit(cells.hf_benchmark("fake", "small_int8", 4), iid_factor=None)
    tables.main()
    assert "`small_int8`, k = 4, default kernels: not known." in report.report("fake", FOLDER)
