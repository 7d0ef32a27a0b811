"""The original study's three panels, of the toy pair and of a real one: tokens by k, acceptance by depth, and by temperature."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.drawing import FEW_TESTS, GREY, WIDTH, Look, dashed, legend, line, measured, measured_entry, rates, ticks

COUNT_HEIGHT = 13  # points


@dataclass(frozen=True)
class Swept:
    """The tables of one pair.

    Args:
        at_zero: its α where T → 0: how often the argmaxes agree.
        at_infinity: its α where T → ∞; NaN where that is not known.
    """

    name: str
    look: Look
    by_k: pd.DataFrame
    positions: pd.DataFrame
    by_temperature: pd.DataFrame
    at_zero: float
    at_infinity: float


def toy_pair(
    looks: dict[str, Look], by_k: pd.DataFrame, positions: pd.DataFrame, by_temperature: pd.DataFrame
) -> Swept:
    name, limits = by_k["pair"].iloc[0], by_temperature.iloc[0]
    at_zero, at_infinity = limits["argmax_agreement"], limits["limit_high_temperature"]
    return Swept(name, looks[name], by_k, positions, by_temperature, at_zero, at_infinity)


def real_pair(
    looks: dict[str, Look], by_k: pd.DataFrame, positions: pd.DataFrame, by_temperature: pd.DataFrame
) -> Swept:
    """The study's first pair whose draft is a model.

    Its limits are the α of greedy decoding, and 1, that of two uniform laws, which a copied token knows nothing of.
    """
    models = by_k[by_k["draft"] != "lookup"]
    name = (by_k if models.empty else models)["pair"].iloc[0]
    by_k, positions, by_temperature = (table[table["pair"] == name] for table in (by_k, positions, by_temperature))
    greedy = by_k[(by_k["k"] == by_temperature["k"].iloc[0]) & (by_k["temperature"] == 0)]["alpha_overlap"]
    at_infinity = float("nan") if models.empty else 1.0
    return Swept(name, looks[name], by_k, positions, by_temperature, greedy.mean(), at_infinity)


def panels(pair: Swept, other: Swept) -> Figure:
    """The three panels of one pair; in the second the other one lies beside it."""
    figure = Figure(figsize=(WIDTH, 4.7), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=[1, 1.3, 1.15])
    _rounds(axes[0], pair)
    _depth(axes[1], pair, other)
    _temperature(axes[2], pair)
    styles = [
        measured_entry(pair.by_k),
        line("theory: constant α, that of k = 1", "--"),
        line(" ", ""),
        line("limit for T → 0", ":"),
        line("limit for T → ∞", "-."),
    ]
    if any(mark.get_markerfacecolor() == "white" for mark in axes[1].lines if len(mark.get_xdata())):
        styles.append(line(f"from under {FEW_TESTS} tokens", "", marker="o", markerfacecolor="white"))
    legend(figure, {swept.name: swept.look for swept in (pair, other)}, styles)
    return figure


def _rounds(ax: Axes, pair: Swept) -> None:
    by_k = pair.by_k.sort_values("k").assign(x=pair.by_k["k"])
    measured(ax, by_k, "mean_acceptance_length", pair.look)
    ax.plot(by_k["x"], by_k["geometric_tokens_per_round"], **dashed(pair.look))
    ax.set(title="(a) tokens per round", xlabel="draft tokens per round (k)", ylabel="tokens per target forward (τ)")
    ticks(ax, by_k["k"])


def _depth(ax: Axes, pair: Swept, other: Swept) -> None:
    """Acceptance of a token where the one before was accepted; below the axis, of how many tokens.

    Both at the largest k that both have, or each at its own.
    """
    shown = {*pair.positions["k"]} & {*other.positions["k"]}
    for row, (swept, shift) in enumerate(((pair, -0.1), (other, 0.1)), start=1):
        k = max(shown or swept.positions["k"], default=None)  # of a pair that never drafts there are no positions
        part = swept.positions[swept.positions["k"] == k]
        part = part.assign(x=part["position"] + shift)
        for alpha in swept.by_k.loc[swept.by_k["k"] == 1, "alpha"]:
            ax.plot(part["x"], [alpha] * len(part), **dashed(swept.look))
        rates(ax, part, "conditional_acceptance_per_position", "tested", swept.look)
        for position, count in zip(part["position"], part["tested"], strict=True):
            place: Look = {
                "xycoords": ("data", "axes fraction"),
                "textcoords": "offset points",
                "ha": "center",
                "va": "top",
            }
            offset = (0, -6 - COUNT_HEIGHT * row)
            ax.annotate(f"{count}", (position, 0), offset, color=swept.look["color"], **place)
    k = max(shown or {*pair.positions["k"]} | {*other.positions["k"]}, default=1)
    ax.set(title="(b) acceptance by depth", ylabel="accepted / tested tokens")
    ax.set_ylim(min(0.6, ax.get_ylim()[0]), 1.02)
    ax.set_xlabel(f"position in the round (k = {k}),\nbelow it the tokens tested there", labelpad=4 + 2 * COUNT_HEIGHT)
    ticks(ax, pd.Series(range(1, k + 1)))


def _temperature(ax: Axes, pair: Swept) -> None:
    by_temperature = pair.by_temperature.sort_values("temperature")
    measured(ax, by_temperature.assign(x=by_temperature["temperature"]), "alpha_overlap", pair.look)
    for limit, style in ((pair.at_zero, ":"), (pair.at_infinity, "-.")):
        ax.axhline(limit, color=GREY, linestyle=style, linewidth=1.2)
    lows = [*by_temperature["alpha_overlap_lo"].fillna(by_temperature["alpha_overlap"]), pair.at_zero]
    low = min([value for value in lows if pd.notna(value)], default=0.0)
    ax.set(title="(c) acceptance by temperature", xscale="log", xlabel="temperature (T), log scale")
    ax.set_ylim(low - 0.25 * (1 - low), 1 + 0.06 * (1 - low))  # a good draft's U is a shallow one
    ax.set_ylabel("acceptance of a tested token (α)")
    ticks(ax, by_temperature["temperature"], log=True, room=0.1)
