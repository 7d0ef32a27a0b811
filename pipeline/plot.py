"""Stage `plot`: draw the study's tables as SVG files, the same bytes for the same tables.

What colours, markers and lines mean is in `pipeline/drawing.py`. Figures are as wide as a README shows them, so that text keeps
its size.
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

from pipeline import cells
from pipeline.attribution_figures import attribution
from pipeline.cli import run
from pipeline.comparison_figures import comparison
from pipeline.cost_figures import cost_curve
from pipeline.drawing import (
    FEW_TESTS,
    GREY,
    STYLE,
    WIDTH,
    Look,
    dashed,
    errors,
    grid,
    interval_entry,
    legend,
    line,
    looks_of,
    measured,
    measured_entry,
    pair_looks,
    rates,
    ticks,
)
from pipeline.panel_figures import panels, real_pair, toy_pair
from pipeline.prompt_figures import accepted_per_round, by_category
from pipeline.quantized_figures import break_even, quantized_alpha, quantized_by_category, quantized_speedup
from pipeline.results import read_table, study_folder
from pipeline.study import load_params


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
    categories, by_category_k = read_table(folder, "acceptance_by_category"), read_table(folder, "speedup_by_category")
    rounds, speedups = read_table(folder, "accepted_per_round"), read_table(folder, "speedup_by_k")
    compared = read_table(folder, "comparison")
    looks = pair_looks(by_k, toy_k, speedups)
    toy = toy_pair(looks, toy_k, toy_positions, toy_temperature)
    real = real_pair(looks, by_k, positions, by_temperature)
    return {
        "toy": panels(toy, real),
        "real": panels(real, toy),
        "tokens_per_round": tokens_per_round(by_k, looks),
        "acceptance_per_position": acceptance_per_position(positions, by_k, looks),
        "acceptance_vs_temperature": acceptance_vs_temperature(by_temperature, looks),
        "accepted_per_round": accepted_per_round(rounds, looks),
        "by_category": by_category(categories, by_category_k, looks),
        "block_verification": block_verification(by_temperature, toy_temperature, looks),
        "confidence": confidence(read_table(folder, "sweep_confidence"), looks),
        "speedup": speedup(benchmark, looks),
        "speedup_by_k": speedup_by_k(speedups, looks),
        "attribution": attribution(benchmark, quantized_benchmark),
        "cost_curve": cost_curve(read_table(folder, "cost_curve")),
        "comparison": comparison(compared, looks),
        "quantized_alpha": quantized_alpha(read_table(folder, "quantized_alpha")),
        "quantized_by_category": quantized_by_category(read_table(folder, "quantized_by_category")),
        "quantized_speedup": quantized_speedup(quantized_benchmark),
        "break_even": break_even(quantized_benchmark),
    }


def svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    metadata = {"Title": name.replace("_", " ").capitalize(), "Date": None, "Creator": None}
    figure.savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def tokens_per_round(by_k: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """τ against k: measured, and what i.i.d. acceptance at the cell's own α gives."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    ax = figure.subplots()
    looks = looks_of(looks, by_k)
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


def acceptance_per_position(positions: pd.DataFrame, by_k: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """P(position j accepted), and the same given that j − 1 was, at the sweep's largest k."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    k = by_k["k"].max()
    positions = positions[positions["k"] == k]
    alphas = by_k[by_k["k"] == k].set_index("pair")["alpha"]
    looks = looks_of(looks, by_k)
    for pair, part in _by_pair(positions, "position", panels=2):
        left.plot(part["x"], alphas[pair] ** part["position"], **dashed(looks[pair]))
        right.plot(part["x"], [alphas[pair]] * len(part), **dashed(looks[pair]))
        rates(left, part, "acceptance_per_position", "proposed", looks[pair])
        rates(right, part, "conditional_acceptance_per_position", "tested", looks[pair])
    for ax in (left, right):
        ax.set(xlabel=f"position in the round (k = {k})", ylim=(-0.03, 1.03))
        ticks(ax, positions["position"])
    left.set_ylabel("share accepted of all proposed")
    right.set_ylabel("share accepted where the one before was")
    hollow = line(f"from under {FEW_TESTS} tokens", "", marker="o", markerfacecolor="white")
    legend(figure, looks, [measured_entry(by_k), line("predicted: i.i.d. acceptance", "--"), hollow])
    return figure


def acceptance_vs_temperature(by_temperature: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """α = E[Σ min(p, q)] against the temperature."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = figure.subplots()
    looks, temperatures = looks_of(looks, by_temperature), by_temperature["temperature"]
    for pair, part in _by_pair(by_temperature, "temperature", log_span=temperatures.max() / temperatures.min()):
        measured(ax, part, "alpha_overlap", looks[pair])
    ax.set(xscale="log", xlabel="sampling temperature (T), log scale")
    ax.set(ylabel="acceptance of a tested token (α)", ylim=(-0.03, 1.03))
    ticks(ax, temperatures, log=True)
    legend(figure, looks, [measured_entry(by_temperature)])
    return figure


def block_verification(by_temperature: pd.DataFrame, toy_temperature: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """Tokens per round by block verification over those by token verification, expected on the same drafts."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = figure.subplots()
    both = pd.concat([by_temperature, toy_temperature])
    looks = looks_of(looks, both)
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


def confidence(by_confidence: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """What a threshold saves the draft and costs the target, and how much of what is drafted it makes acceptable."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = looks_of(looks, by_confidence)
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


def speedup(benchmark: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """One row per pair and k: the speed-up over own plain decoding, its prediction, and that over the fastest baseline."""
    figure = Figure(figsize=(WIDTH, 1.6 + 0.6 * len(benchmark)), layout="constrained")
    ax = figure.subplots()
    looks = looks_of(looks, benchmark)
    hollow: Look = {"markerfacecolor": "white", "markeredgewidth": 1.4}
    for y, row in enumerate(benchmark.to_dict("records")):
        for column, look, place in (("speedup", {}, y - 0.15), ("speedup_over_fastest", hollow, y + 0.15)):
            _speed(ax, row, column, place, looks[row["pair"]] | look)
    rows = pd.Series(range(len(benchmark)), index=benchmark.index)
    prediction: Look = {"marker": "|", "markersize": 14, "markeredgewidth": 2}
    ax.plot(benchmark["predicted_speedup"], rows - 0.15, linestyle="", color="black", **prediction)
    ax.axvline(1, color=GREY, linestyle=":", linewidth=1.2)
    ax.set(xlabel="speed-up (1 = as fast as without a draft)", ylim=(len(benchmark) - 0.5, -0.5))
    ax.set_yticks(rows, [f"{pair}, k = {k}" for pair, k in zip(benchmark["pair"], benchmark["k"], strict=True)])
    styles = [
        line("over own plain decoding", "", marker="o"),
        line("over the fastest baseline", "", marker="o", **hollow),
        line("predicted over own plain decoding", "", **prediction | {"color": "black"}),
    ]
    legend(figure, {}, [*styles, line("without a draft", ":"), *interval_entry(benchmark)])
    return figure


def _speed(ax: Axes, row: dict[Any, Any], column: str, y: float, look: Look) -> None:
    """A point with its interval, and the value in words at the right edge."""
    part = pd.DataFrame([row])
    ax.errorbar(part[column], [y], xerr=errors(part, column), capsize=3, **look | {"linestyle": ""})
    if pd.notna(row[column]):
        ax.annotate(f"{row[column]:.2f}×", (1.01, y), xycoords=("axes fraction", "data"), va="center")


def speedup_by_k(speedups: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """Speed-up over plain decoding with the same kernels against k: measured, predicted and ideal; a panel per pair."""
    looks = looks_of(looks, speedups)
    figure, axes = grid(len(looks), columns=3, height=2.9)
    for ax, (pair, look) in zip(axes, looks.items(), strict=True):
        part = speedups[speedups["pair"] == pair]
        part = part.sort_values("k").assign(x=part["k"])
        measured(ax, part, "speedup", look)
        ax.plot(part["x"], part["predicted_speedup"], **dashed(look), marker="_", markersize=12, markeredgewidth=2)
        ax.plot(part["x"], part["ideal_speedup"], **dashed(look) | {"linestyle": "-."}, marker="x")
        ax.axhline(1, color=GREY, linestyle=":", linewidth=1.2)
        kernels = part["kernels"].iloc[0]
        ax.set(title=f"{pair}\n{kernels} kernels", xlabel="draft tokens per round (k)")
        ax.set_xlim(part["k"].min() - 1, part["k"].max() + 1)
        ax.set_xticks(part["k"])
    for ax in axes[::3]:
        ax.set_ylabel("speed-up over plain decoding")
    styles = [
        line("measured, 95 % interval" if speedups["speedup_lo"].notna().any() else "measured"),
        line("predicted: τ / (kc + v)", "--", marker="_", markersize=12, markeredgewidth=2),
        line("ideal: i.i.d. acceptance, v = 1", "-.", marker="x"),
    ]
    legend(figure, {}, [*styles, line("plain decoding", ":")])
    return figure


def _by_pair(
    table: pd.DataFrame, axis: str, panels: int = 1, log_span: float | None = None
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each pair's rows with column x: `axis`, moved from pair to pair by a marker's width lest they hide each other.

    Args:
        log_span: highest over lowest value of an axis in log scale.
    """
    names = list(dict.fromkeys(table["pair"]))
    step, span = 0.012 * panels, table[axis].max() - table[axis].min()
    if span == 0:  # a single place, where the axis is as wide as the shifts make it
        step, span, log_span = 0.1, 1, log_span and 2
    for index, name in enumerate(names):
        part = table[table["pair"] == name]
        shift = step * (index - (len(names) - 1) / 2)
        yield name, part.assign(x=part[axis] * log_span**shift if log_span else part[axis] + shift * span)


if __name__ == "__main__":
    run(main)
