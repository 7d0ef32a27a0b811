"""The figures that look into a cell: acceptance and speed by category of prompts, and accepted tokens by round."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.drawing import GREY, WIDTH, Look, errors, grid, interval_entry, legend, line, looks_of

PREDICTED: Look = {"linestyle": "--", "linewidth": 1.3}
RANGE: Look = {"linewidth": 3.5, "alpha": 0.35}


def by_category(acceptance: pd.DataFrame, speedup: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """α of every pair and speed-up of the timed ones, a row per category of prompts; both at the k of the timed cells."""
    common = {*acceptance["k"]} & {*speedup["k"]}
    k = max(common or {*acceptance["k"]})
    acceptance, speedup = (table[table["k"] == (k if common else table["k"].max())] for table in (acceptance, speedup))
    looks = looks_of(looks, acceptance, speedup)
    categories = list(dict.fromkeys([*acceptance["category"], *speedup["category"]]))
    figure = Figure(figsize=(WIDTH, 1.6 + 0.13 * len(categories) * (len(looks) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.25, 1])
    right.axvline(1, color=GREY, linestyle=":", linewidth=1.2)
    for ax, table, key in ((left, acceptance, "alpha"), (right, speedup, "speedup")):
        for index, (pair, look) in enumerate(looks.items()):
            part = table[table["pair"] == pair]
            shift = 0.8 * ((index + 0.5) / len(looks) - 0.5)
            _rows(ax, part.assign(y=part["category"].map(categories.index) + shift), key, look)
        for place in range(1, len(categories)):
            ax.axhline(place - 0.5, color="0.9", linewidth=0.8, zorder=0)
    left.set(xlabel=f"acceptance of a tested token (α), k = {acceptance['k'].iloc[0]}", xlim=(-0.03, 1.03))
    right.set(xlabel=f"speed-up over plain decoding, k = {speedup['k'].iloc[0]}", ylim=(len(categories) - 0.5, -0.5))
    left.set_yticks(range(len(categories)), [category.replace("_", " ") for category in categories])
    for ax in (left, right):
        ax.tick_params(axis="y", length=0)
    legend(
        figure,
        looks,
        [*interval_entry(acceptance), line("range of single prompts", **RANGE), line("plain decoding", ":")],
    )
    return figure


def _rows(ax: Axes, part: pd.DataFrame, key: str, look: Look) -> None:
    """A category's value, its interval where there are prompts enough, and how far single prompts lie apart."""
    ax.hlines(part["y"], part[f"{key}_lowest"], part[f"{key}_highest"], color=look["color"], **RANGE)
    ax.errorbar(part[key], part["y"], xerr=errors(part, key), capsize=2.5, elinewidth=1.1, **look | {"linestyle": ""})


def accepted_per_round(table: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """How many draft tokens a round accepted, at the largest k: a panel of bars per pair."""
    table = table[table["k"] == table["k"].max()]
    looks = looks_of(looks, table)
    figure, axes = grid(len(looks), columns=2, height=2.3, sharex=True)
    for index, (ax, (pair, look)) in enumerate(zip(axes, looks.items(), strict=True)):
        part = table[table["pair"] == pair]
        x = part["accepted_per_round"]
        ax.bar(x, part["share"], color=look["color"], alpha=0.75, width=0.75)
        ax.errorbar(
            x, part["share"], yerr=errors(part, "share"), capsize=2.5, elinewidth=1.1, linestyle="", color="black"
        )
        ax.stairs(part["iid_share"], [*(x - 0.5), x.max() + 0.5], baseline=None, color=GREY, **PREDICTED)
        ax.set_title(f"{pair}: {part['rounds'].sum()} rounds")
        ax.set_xticks(x)
        ax.tick_params(labelbottom=True)
        ax.set_xlabel(f"draft tokens accepted in a round (k = {part['k'].iloc[0]})")
        if index % 2 == 0:
            ax.set_ylabel("share of the rounds")
    legend(figure, {}, [*interval_entry(table, color="black"), line("predicted: i.i.d. acceptance", **PREDICTED)])
    return figure
