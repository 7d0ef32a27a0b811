"""Stage `plot`: draw the study's tables as SVG files, the same bytes for the same tables.

A colour and a marker stand for a pair (those of `quantized_figures` for a method of rounding), a solid line for what was
measured, a dashed one for what i.i.d. acceptance predicts, and a bar for a 95 % interval. Figures are as wide as a README shows
them, so that text keeps its size.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pipeline import cells
from pipeline.attribution_figures import attribution
from pipeline.cli import run
from pipeline.comparison_figures import comparison
from pipeline.cost_figures import cost_curve
from pipeline.drawing import (
    BLUE,
    GREY,
    ORANGE,
    STYLE,
    WIDTH,
    Look,
    dashed,
    errors,
    legend,
    line,
    measured,
    measured_entry,
    pair_looks,
    ticks,
)
from pipeline.quantized_figures import break_even, quantized_alpha, quantized_speedup
from pipeline.results import read_table, study_folder
from pipeline.study import load_params

FEW_TESTS = 10  # a rate over fewer is drawn hollow


def main() -> None:
    argparse.ArgumentParser(description="Draw the tables of params.yaml's study into plots/<study>/*.svg.").parse_args()
    params = load_params()
    folder = study_folder(params.study.name)
    with matplotlib.rc_context(STYLE):
        for name, figure in draw(folder).items():
            cells.write_text(folder / f"{name}.svg", svg(figure, name))


def draw(folder: Path) -> dict[str, Figure]:
    """Every figure by name, from the tables in `folder`."""
    by_k, positions = read_table(folder, "sweep_k"), read_table(folder, "acceptance_per_position")
    by_temperature, toy_temperature = read_table(folder, "sweep_temperature"), read_table(folder, "toy_temperature")
    toy_k, toy_positions = read_table(folder, "toy_k"), read_table(folder, "toy_acceptance_per_position")
    benchmark, quantized_benchmark = read_table(folder, "hf_benchmark"), read_table(folder, "quantized_benchmark")
    return {
        "tokens_per_round": tokens_per_round(by_k),
        "acceptance_per_position": acceptance_per_position(positions, by_k),
        "acceptance_vs_temperature": acceptance_vs_temperature(by_temperature),
        "block_verification": block_verification(by_temperature, toy_temperature),
        "confidence": confidence(read_table(folder, "sweep_confidence")),
        "speedup": speedup(benchmark),
        "attribution": attribution(benchmark, quantized_benchmark),
        "cost_curve": cost_curve(read_table(folder, "cost_curve")),
        "comparison": comparison(read_table(folder, "comparison")),
        "quantized_alpha": quantized_alpha(read_table(folder, "quantized_alpha")),
        "quantized_speedup": quantized_speedup(quantized_benchmark),
        "break_even": break_even(quantized_benchmark),
        "toy": toy(toy_k, toy_positions, toy_temperature),
    }


def svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    metadata = {"Title": name.replace("_", " ").capitalize(), "Date": None, "Creator": None}
    figure.savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def tokens_per_round(by_k: pd.DataFrame) -> Figure:
    """τ against k: measured, and what i.i.d. acceptance at the cell's own α gives."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    ax = figure.subplots()
    looks = pair_looks(by_k["pair"])
    for pair, part in _by_pair(by_k, "k"):
        measured(ax, part, "mean_acceptance_length", looks[pair])
        ax.plot(part["x"], part["iid_acceptance_length"], **dashed(looks[pair]))
    ax.axhline(1, color=GREY, linestyle=":", linewidth=1.2)
    ax.set(xlabel="draft tokens per round (k)", ylabel="tokens per target forward (τ)", ylim=(0.8, None))
    ticks(ax, by_k["k"])
    legend(
        figure, looks, [measured_entry(by_k), line("predicted: i.i.d. acceptance", "--"), line("plain decoding", ":")]
    )
    return figure


def acceptance_per_position(positions: pd.DataFrame, by_k: pd.DataFrame) -> Figure:
    """P(position j accepted), and the same given that j − 1 was, at the sweep's largest k."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    k = by_k["k"].max()
    positions = positions[positions["k"] == k]
    alphas = by_k[by_k["k"] == k].set_index("pair")["alpha"]
    looks = pair_looks(by_k["pair"])
    for pair, part in _by_pair(positions, "position", panels=2):
        left.plot(part["x"], alphas[pair] ** part["position"], **dashed(looks[pair]))
        right.plot(part["x"], [alphas[pair]] * len(part), **dashed(looks[pair]))
        _rates(left, part, "acceptance_per_position", "proposed", looks[pair])
        _rates(right, part, "conditional_acceptance_per_position", "tested", looks[pair])
    for ax in (left, right):
        ax.set(xlabel=f"position in the round (k = {k})", ylim=(-0.03, 1.03))
        ticks(ax, positions["position"])
    left.set_ylabel("share accepted of all proposed")
    right.set_ylabel("share accepted where the one before was")
    hollow = line(f"from under {FEW_TESTS} tokens", "", marker="o", markerfacecolor="white")
    legend(figure, looks, [measured_entry(by_k), line("predicted: i.i.d. acceptance", "--"), hollow])
    return figure


def acceptance_vs_temperature(by_temperature: pd.DataFrame) -> Figure:
    """α = E[Σ min(p, q)] against the temperature."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = figure.subplots()
    looks = pair_looks(by_temperature["pair"])
    for pair, part in _by_pair(by_temperature, "temperature"):
        measured(ax, part, "alpha_overlap", looks[pair])
    ax.set(xlabel="sampling temperature (T)", ylabel="acceptance of a tested token (α)", ylim=(-0.03, 1.03))
    ticks(ax, by_temperature["temperature"])
    legend(figure, looks, [measured_entry(by_temperature)])
    return figure


def block_verification(by_temperature: pd.DataFrame, toy_temperature: pd.DataFrame) -> Figure:
    """Tokens per round by block verification over those by token verification, expected on the same drafts."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = figure.subplots()
    both = pd.concat([by_temperature, toy_temperature])
    looks = pair_looks(both["pair"])
    temperatures = both["temperature"]
    ax.axhline(1, color=GREY, linestyle=":", linewidth=1.2)
    for pair, part in _by_pair(by_temperature, "temperature", log_span=temperatures.max() / temperatures.min()):
        measured(ax, part, "block_gain", looks[pair])
    for pair, part in _by_pair(toy_temperature, "temperature"):
        measured(ax, part, "block_gain", looks[pair])
    ax.set(xscale="log", xlabel="temperature (T), log scale", ylabel="tokens per round, block / token")
    ticks(ax, temperatures, log=True)
    legend(figure, looks, [measured_entry(both), line("no gain", ":")])
    return figure


def confidence(by_confidence: pd.DataFrame) -> Figure:
    """What a threshold saves the draft and costs the target, and how much of what is drafted it makes acceptable."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = pair_looks(by_confidence["pair"])
    ordered = by_confidence.sort_values("confidence_threshold", kind="stable")
    for pair, part in _by_pair(ordered, "confidence_threshold", panels=2):
        measured(right, part, "draft_acceptance_rate", looks[pair])
        part = part.assign(x=part["mean_drafted_per_round"] / part["mean_acceptance_length"])
        measured(left, part, "mean_acceptance_length", looks[pair])
        if pair == next(iter(looks)):  # more of them would hide each other
            _name_ends(left, part, looks[pair]["color"])
    left.set(xlabel="drafted tokens per emitted token", ylabel="tokens per target forward (τ)")
    left.margins(x=0.12, y=0.12)
    right.set(xlabel="confidence threshold", ylabel="acceptance rate (accepted / proposed)", ylim=(-0.03, 1.03))
    ticks(right, by_confidence["confidence_threshold"])
    legend(figure, looks, [measured_entry(by_confidence)])
    return figure


def _name_ends(ax: Axes, part: pd.DataFrame, colour: Any) -> None:
    """Write the lowest and the highest threshold where their points are, on the sides where the line is not."""
    rows = part.to_dict("records")
    for row, offset, side in ((rows[-1], (6, -14), "left"), (rows[0], (-6, 7), "right"))[: len(rows)]:
        text, place = f"threshold {row['confidence_threshold']:g}", (row["x"], row["mean_acceptance_length"])
        if pd.notna(row["x"]):
            ax.annotate(text, place, offset, textcoords="offset points", ha=side, color=colour)


def speedup(benchmark: pd.DataFrame) -> Figure:
    """One row per pair and k: the speed-up over own plain decoding, its prediction, and that over the fastest baseline."""
    figure = Figure(figsize=(WIDTH, 1.6 + 0.6 * len(benchmark)), layout="constrained")
    ax = figure.subplots()
    looks: dict[str, Look] = {
        "over own plain decoding": {"color": BLUE, "marker": "o", "linestyle": ""},
        "over the fastest baseline": {"color": ORANGE, "marker": "s", "linestyle": ""},
    }
    rows = pd.Series(range(len(benchmark)), index=benchmark.index)
    for column, look, shift in zip(("speedup", "speedup_over_fastest"), looks.values(), (-0.15, 0.15), strict=True):
        ax.errorbar(benchmark[column], rows + shift, xerr=errors(benchmark, column), capsize=3, **look)
        for value, y in zip(benchmark[column].dropna(), (rows + shift)[benchmark[column].notna()], strict=True):
            ax.annotate(f"{value:.2f}×", (1.01, y), xycoords=("axes fraction", "data"), va="center")
    prediction: Look = {"marker": "|", "markersize": 14, "markeredgewidth": 2}
    ax.plot(benchmark["predicted_speedup"], rows - 0.15, linestyle="", color="black", **prediction)
    ax.axvline(1, color=GREY, linestyle=":", linewidth=1.2)
    ax.set(xlabel="speed-up (1 = as fast as without a draft)", ylim=(len(benchmark) - 0.5, -0.5))
    ax.set_yticks(rows, [f"{pair}, k = {k}" for pair, k in zip(benchmark["pair"], benchmark["k"], strict=True)])
    legend(figure, looks, [line("predicted over own plain decoding", "", color="black", **prediction)])
    return figure


def toy(by_k: pd.DataFrame, positions: pd.DataFrame, by_temperature: pd.DataFrame) -> Figure:
    """Tokens per round, acceptance per position, and α between its two limits, for the toy pair."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots(1, 3)
    plain: Look = {"color": BLUE, "marker": "o"}
    conditional: Look = {"color": ORANGE, "marker": "s"}
    dashed: Look = {"color": GREY, "linestyle": "--"}
    _toy_rounds(axes[0], by_k, plain, dashed)
    _toy_positions(axes[1], positions, by_k, plain, conditional, dashed)
    _toy_temperature(axes[2], by_temperature, plain)
    handles = [
        measured_entry(by_k, **plain),
        Line2D([], [], **conditional, label="given that the one before was accepted"),
        Line2D([], [], **dashed, label="constant α, that of k = 1"),
        line("limit for T → 0: the argmaxes agree", ":"),
        line("limit for T → ∞", "-."),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def _toy_rounds(ax: Axes, by_k: pd.DataFrame, look: Look, dashed: Look) -> None:
    measured(ax, by_k.assign(x=by_k["k"]), "mean_acceptance_length", look)
    ax.plot(by_k["k"], by_k["geometric_tokens_per_round"], **dashed)
    ax.set(title="(a)", xlabel="draft tokens per round (k)", ylabel="tokens per target forward (τ)")
    ticks(ax, by_k["k"])


def _toy_positions(
    ax: Axes, positions: pd.DataFrame, by_k: pd.DataFrame, look: Look, conditional: Look, dashed: Look
) -> None:
    k = by_k["k"].max()
    part = positions[positions["k"] == k]
    part = part.assign(x=part["position"])
    for alpha in by_k.loc[by_k["k"] == 1, "alpha"]:
        ax.plot(part["x"], alpha ** part["x"], **dashed)
        ax.plot(part["x"], [alpha] * len(part), **dashed)
    _rates(ax, part.assign(x=part["x"] - 0.06), "acceptance_per_position", "proposed", look)
    _rates(ax, part.assign(x=part["x"] + 0.06), "conditional_acceptance_per_position", "tested", conditional)
    ax.set(title="(b)", xlabel=f"position in the round (k = {k})", ylabel="share accepted", ylim=(-0.03, 1.03))
    ticks(ax, part["position"])


def _toy_temperature(ax: Axes, by_temperature: pd.DataFrame, look: Look) -> None:
    measured(ax, by_temperature.assign(x=by_temperature["temperature"]), "alpha_overlap", look)
    for column, style in (("argmax_agreement", ":"), ("limit_high_temperature", "-.")):
        ax.axhline(by_temperature[column].iloc[0], color=GREY, linestyle=style)
    ax.set(title="(c)", xscale="log", xlabel="temperature (T), log scale", ylim=(-0.03, 1.03))
    ax.set_ylabel("acceptance of a tested token (α)")
    ax.xaxis.set_major_formatter("{x:g}")


def _by_pair(
    table: pd.DataFrame, axis: str, panels: int = 1, log_span: float | None = None
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each pair's rows with column x: `axis`, moved from pair to pair by a marker's width lest they hide each other.

    Args:
        log_span: highest over lowest value of an axis in log scale.
    """
    names = list(dict.fromkeys(table["pair"]))
    step = 0.012 * panels
    for index, name in enumerate(names):
        part = table[table["pair"] == name]
        shift = step * (index - (len(names) - 1) / 2)
        moved = (
            part[axis] * log_span**shift if log_span else part[axis] + shift * (table[axis].max() - table[axis].min())
        )
        yield name, part.assign(x=moved)


def _rates(ax: Axes, part: pd.DataFrame, column: str, tokens: str, look: Look) -> None:
    """A line with intervals, whose markers are hollow where few tokens stand behind the rate."""
    measured(ax, part, column, look)
    few = part[part[tokens] < FEW_TESTS]
    ax.plot(few["x"], few[column], **look | {"linestyle": "", "markerfacecolor": "white", "zorder": 3})


if __name__ == "__main__":
    run(main)
