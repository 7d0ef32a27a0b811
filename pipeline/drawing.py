"""How every figure looks, and the parts that figures share.

A solid line stands for what was measured, a dashed one for what theory predicts, a dash-dotted one for an ideal or a limit, a
dotted grey one for decoding without a draft, and a bar for a 95 % interval. A draft has one colour in every figure and every
study; what is no draft (a kernel, a factor, a method of rounding) has a colour that no draft has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

WIDTH = 8.6  # inches
GREY = "0.35"
DARK, LIGHT = "0.45", "0.75"  # bars of what decodes without our draft
# Both are made for readers who do not tell all colours apart: seaborn's palette, and from Paul Tol's "muted" what is far from it.
PALETTE = sns.color_palette("colorblind")
KINDS = sns.color_palette(["#332288", "#999933", "#882255", "#88ccee", "#ddcc77"])  # of what is no draft
DRAFTS = ("int8", "bf16", "lookup", "int4", "toy-draft")  # the first colours are theirs always
OTHER_DRAFTS = [PALETTE[index] for index in (9, 5, 7, 6, 8)]
STYLE: dict[Any, Any] = {
    **sns.axes_style("ticks"),
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "svg.fonttype": "path",  # looks alike with any fonts installed
    "svg.hashsalt": "speculative-decoding-lab",  # element ids are random otherwise
}

LETTERS = 108  # that fit beside each other into a legend
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.3}
FEW_TESTS = 10  # a rate over fewer is drawn hollow

Look = dict[str, Any]  # keyword arguments of a line


def measured(ax: Axes, part: pd.DataFrame, column: str, look: Look) -> None:
    """A line over column x, with a bar for each interval that there is."""
    ax.errorbar(part["x"], part[column], yerr=errors(part, column), capsize=2.5, elinewidth=1.1, **look)


def rates(ax: Axes, part: pd.DataFrame, column: str, tokens: str, look: Look) -> None:
    """A line with intervals, whose markers are hollow where few tokens stand behind the rate."""
    measured(ax, part, column, look)
    few = part[part[tokens] < FEW_TESTS]
    ax.plot(few["x"], few[column], **look | {"linestyle": "", "markerfacecolor": "white", "zorder": 3})


def grid(panels: int, *, columns: int, height: float, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels in rows of at most `columns`, each `height` inches high, on one vertical scale."""
    columns = max(min(panels, columns), 1)
    rows = max(math.ceil(panels / columns), 1)
    figure = Figure(figsize=(WIDTH, 1.1 + height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=True).ravel().tolist()
    for ax in axes[panels:]:
        ax.remove()
    return figure, axes[:panels]


def legend(figure: Figure, looks: dict[str, Look], styles: Sequence[Line2D]) -> None:
    """Above the data: what each colour is, then what each kind of line is."""
    handles = [Line2D([], [], **look, label=name) for name, look in looks.items()]
    empty = Line2D([], [], linestyle="", label=" ")
    for wide in (3, 2, 1):
        rows = [*handles, *[empty] * (-len(handles) % wide), *styles, *[empty] * (-len(styles) % wide)]
        columns = [rows[column::wide] for column in range(wide)]  # a legend is filled column by column
        if sum(8 + max(len(str(handle.get_label())) for handle in column) for column in columns) <= LETTERS:
            break
    figure.legend(handles=[handle for column in columns for handle in column], loc="outside upper left", ncols=wide)


def pair_looks(*tables: pd.DataFrame) -> dict[str, Look]:
    """The colour of its draft and a marker of its own for each pair, in the order of the tables."""
    colours = dict(zip(DRAFTS, PALETTE, strict=False))
    markers: dict[str, Look] = {draft: {"marker": m} for draft, m in zip(DRAFTS, "osD^v", strict=True)}
    other_colours = cycle(OTHER_DRAFTS)
    other_markers = cycle([{"marker": m} | filling for filling in ({}, HOLLOW) for m in "PX*<>hp"])
    looks: dict[str, Look] = {}
    for table in tables:
        for pair, draft in dict(zip(table["pair"], table["draft"], strict=True)).items():
            if pair not in looks:
                marker = markers.pop(draft, None) or next(other_markers)
                looks[pair] = {"color": colours.get(draft) or next(other_colours), **marker}
                colours.setdefault(draft, looks[pair]["color"])
    return looks


def looks_of(looks: dict[str, Look], *tables: pd.DataFrame) -> dict[str, Look]:
    """Those of the pairs that occur."""
    found = {pair for table in tables for pair in table["pair"]}
    return {pair: look for pair, look in looks.items() if pair in found}


def errors(table: pd.DataFrame, column: str) -> list[pd.Series]:
    """Lengths of the bars below and above; no bar where there is no interval."""
    below, above = table[column] - table[f"{column}_lo"], table[f"{column}_hi"] - table[column]
    return [below.clip(lower=0), above.clip(lower=0)]


def ticks(ax: Axes, values: pd.Series, *, log: bool = False, room: float = 0.05) -> None:
    """Ticks where something was measured, but for those that would run into the one before.

    Args:
        room: the part of the axis that a tick's label needs.
    """
    places = sorted(values.unique())
    drawn = [math.log(place) for place in places] if log else places
    kept: list[int] = []
    for index, place in enumerate(drawn):
        if not kept or place - drawn[kept[-1]] >= room * (drawn[-1] - drawn[0]):
            kept.append(index)
    ax.set_xticks([places[index] for index in kept])
    ax.minorticks_off()
    if log:
        ax.xaxis.set_major_formatter("{x:g}")


def measured_entry(table: pd.DataFrame, **look: Any) -> Line2D:
    """The legend's entry; with few prompts there are no intervals to speak of."""
    intervals = table["alpha_lo"].notna().any()
    return line("measured, 95 % interval" if intervals else "measured", **look)


def interval_entry(table: pd.DataFrame, **look: Any) -> list[Line2D]:
    """The legend's entry for the bars; with few prompts there are none."""
    known = any(table[column].notna().any() for column in table if str(column).endswith("_lo"))
    return [line("95 % interval", "", marker="|", markersize=13, **look)] if known else []


def dashed(look: Look) -> Look:
    return {"color": look["color"], "linestyle": "--", "linewidth": 1.3}


def line(label: str, linestyle: Any = "-", **look: Any) -> Line2D:
    return Line2D([], [], label=label, linestyle=linestyle, **{"color": GREY, **look})
