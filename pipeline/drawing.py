"""How every figure looks, and the parts that figures share.

A solid line stands for what was measured, a dashed one for what i.i.d. acceptance predicts, and a bar for a 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle, pairwise
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

WIDTH = 8.6  # inches
GREY = "0.35"
BLUE, ORANGE = sns.color_palette("colorblind", 2)
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

Look = dict[str, Any]  # keyword arguments of a line


def measured(ax: Axes, part: pd.DataFrame, column: str, look: Look) -> None:
    """A line over column x, with a bar for each interval that there is."""
    ax.errorbar(part["x"], part[column], yerr=errors(part, column), capsize=2.5, elinewidth=1.1, **look)


def legend(figure: Figure, looks: dict[str, Look], styles: Sequence[Line2D]) -> None:
    """Above the data: what each colour is, then what each kind of line is."""
    handles = [Line2D([], [], **look, label=name) for name, look in looks.items()]
    filler = [Line2D([], [], linestyle="", label=" ")] * (-len(handles) % 3)
    rows = [*handles, *filler, *styles, *[Line2D([], [], linestyle="", label=" ")] * (-len(styles) % 3)]
    columns = [rows[column::3] for column in range(3)]  # a legend is filled column by column
    figure.legend(handles=[handle for column in columns for handle in column], loc="outside upper left", ncols=3)


def pair_looks(pairs: Iterable[str]) -> dict[str, Look]:
    """A colour that colour-blind readers can tell apart and a marker for each pair, in the order of the study."""
    colours, markers = cycle(sns.color_palette("colorblind")), cycle("osD^vPX")
    return {pair: {"color": next(colours), "marker": next(markers)} for pair in dict.fromkeys(pairs)}


def errors(table: pd.DataFrame, column: str) -> list[pd.Series]:
    """Lengths of the bars below and above; no bar where there is no interval."""
    below, above = table[column] - table[f"{column}_lo"], table[f"{column}_hi"] - table[column]
    return [below.clip(lower=0), above.clip(lower=0)]


def ticks(ax: Axes, values: pd.Series, *, log: bool = False) -> None:
    """Ticks where something was measured, unless they would run into each other."""
    places = sorted(values.unique())
    drawn = [math.log(place) for place in places] if log else places
    if all(b - a >= 0.05 * (drawn[-1] - drawn[0]) for a, b in pairwise(drawn)):
        ax.set_xticks(places)
        ax.minorticks_off()
    if log:
        ax.xaxis.set_major_formatter("{x:g}")


def measured_entry(table: pd.DataFrame, **look: Any) -> Line2D:
    """The legend's entry; with few prompts there are no intervals to speak of."""
    intervals = table["alpha_lo"].notna().any()
    return line("measured, 95 % interval" if intervals else "measured", **look)


def dashed(look: Look) -> Look:
    return {"color": look["color"], "linestyle": "--", "linewidth": 1.3}


def line(label: str, linestyle: Any = "-", **look: Any) -> Line2D:
    return Line2D([], [], label=label, linestyle=linestyle, **{"color": GREY, **look})
