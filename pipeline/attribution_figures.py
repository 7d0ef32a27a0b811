"""The figure of what separates each measured speed-up from Leviathan's ideal."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.attribution import FACTORS, configurations, is_attributed, setting
from pipeline.drawing import GREY, KINDS, WIDTH, Look, legend, line
from pipeline.wording import Row, is_known

COLOURS = dict(zip(FACTORS, KINDS, strict=False))
LABELS = {
    "iid_factor": "acceptance that is not i.i.d.",
    "verify_cost_factor": "cost of verification",
    "overhead_factor": "overhead",
}
PRODUCT: Look = {"marker": "|", "markersize": 20, "markeredgewidth": 2.2, "color": "black"}
# Factors that the axis may name: the most of these whose names do not run into each other, and over the widest range.
TICKS = (
    *((0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15), (0.7, 0.8, 0.9, 1, 1.1, 1.25), (0.5, 0.65, 0.8, 1, 1.25, 1.5, 2)),
    *((0.1, 0.2, 0.5, 1, 2, 5, 10), (0.01, 0.1, 1, 10)),
)


def attribution(benchmark: pd.DataFrame, quantized_benchmark: pd.DataFrame) -> Figure:
    """A row per configuration: the factors' logarithms, end to end, those below 1 to the left and those above to the right.

    A mark stands at their product, measured / ideal; both speed-ups are written beside it. Rows without factors are left out.
    """
    rows = [row for row in configurations(benchmark, quantized_benchmark) if is_attributed(row)]
    figure = Figure(figsize=(WIDTH, 1.7 + 0.55 * max(len(rows), 1)), layout="constrained")
    ax = figure.subplots()
    for y, row in enumerate(rows):
        _bars(ax, y, row)
    ax.axvline(0, color=GREY, linestyle=":", linewidth=1.2, zorder=3)
    ax.set(ylim=(max(len(rows), 1) - 0.5, -0.5), xlabel="factor from the ideal speed-up to the measured one, log scale")
    ax.set_yticks(range(len(rows)), [f"{_name(row)}\n{setting(row)}" for row in rows])
    ax.tick_params(axis="y", length=0)
    _factor_axis(ax, rows)
    _beside(ax, rows)
    looks: dict[str, Look] = {
        LABELS[key]: {"color": colour, "marker": "s", "markersize": 9, "linestyle": ""}
        for key, colour in COLOURS.items()
    }
    legend(figure, looks, [line("measured / ideal", "", **PRODUCT | {"markersize": 12}), line("the ideal", ":")])
    return figure


def _name(row: Row) -> str:
    return f"{row['pair']}, {row['variant']}" if is_known(row["variant"]) else str(row["pair"])


def _bars(ax: Axes, y: int, row: Row) -> None:
    ends = {-1: 0.0, 1: 0.0}  # how far either side reaches
    for key, colour in COLOURS.items():
        width = math.log(row[key])
        side = -1 if width < 0 else 1
        ax.barh(y, width, left=ends[side], height=0.6, color=colour, edgecolor="white", linewidth=0.8)
        ends[side] += width
    ax.plot([sum(ends.values())], [y], linestyle="", zorder=4, **PRODUCT)


def _factor_axis(ax: Axes, rows: list[Row]) -> None:
    """Ticks at round factors; 1 is in sight always."""
    logs = [[math.log(row[key]) for key in FACTORS] for row in rows]
    low = min([sum(min(value, 0) for value in values) for values in logs], default=0.0)
    high = max([sum(max(value, 0) for value in values) for values in logs], default=0.0)
    low, high = min(1.08 * low, -0.05), max(1.08 * high, 0.05)
    inside = [[factor for factor in ticks if low <= math.log(factor) <= high] for ticks in TICKS]
    factors = max(
        (some for some in inside if _apart(some, high - low)), key=lambda some: (len(some), some[-1] / some[0])
    )
    ax.set_xlim(low, high)
    ax.set_xticks([math.log(factor) for factor in factors], [f"×{factor:g}" for factor in factors])


def _apart(factors: list[float], width: float) -> bool:
    """Whether the names of neighbours have room."""
    return all(math.log(b / a) >= 0.1 * width for a, b in pairwise(factors))


def _beside(ax: Axes, rows: list[Row]) -> None:
    """Two columns of numbers on the right."""
    for y, row in enumerate(rows):
        ends = [row.get("speedup_lo"), row.get("speedup_hi")]
        interval = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if all(map(is_known, ends)) else ""
        _write(ax, (f"{row['ideal_speedup']:.2f}×", f"{row['speedup']:.2f}×{interval}"), y, va="center")
    _write(ax, ("ideal", "measured"), -0.55, va="bottom", color=GREY)


def _write(ax: Axes, texts: tuple[str, str], y: float, **look: Any) -> None:
    for text, points in zip(texts, (10, 54), strict=True):
        place: Any = ("axes fraction", "data")
        ax.annotate(text, (1, y), (points, 0), xycoords=place, textcoords="offset points", **look)
