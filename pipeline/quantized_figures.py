"""The figures on quantised drafts: in all of them a colour stands for a method of rounding.

Where only a few variants are shown, each has a marker of its own; else a method has, hollow where the LM head is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.drawing import GREY, HOLLOW, KINDS, WIDTH, Look, errors, interval_entry, legend, line
from pipeline.quantized_tables import SIXTEEN_BITS
from specdec.theory import break_even_alpha, equal_speed_alpha

METHODS = {"rtn": "round to nearest", "gptq": "GPTQ", "awq": "AWQ", "cast": "16-bit floats"}
MANY = 15  # variants, from which on their markers are drawn smaller
BITS = (2, 3, 4, 5, 6, 8, 16)
BITS_LABEL = "bits per weight, reciprocal scale"
PREDICTION: Look = {"linestyle": "", "marker": "_", "markersize": 16, "markeredgewidth": 2, "color": "black"}


def quantized_alpha(table: pd.DataFrame) -> Figure:
    """α against bits per weight: a row of panels per pair, a panel per temperature."""
    pairs, temperatures = _names(table["pair"]), sorted(table["temperature"].unique())
    figure = Figure(figsize=(WIDTH, 1.4 + 3.8 * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), len(temperatures), sharex=True, sharey="row", squeeze=False)
    looks = method_looks(table["method"])
    size: Look = {"markersize": 4.5} if table["variant"].nunique() > MANY else {}
    for row, pair in zip(axes, pairs, strict=True):
        for ax, t in zip(row, temperatures, strict=True):
            part = table[(table["pair"] == pair) & (table["temperature"] == t)]
            for unquantized in part["alpha_unquantized"].dropna().head(1):
                ax.axhline(unquantized, color=GREY, linestyle=":", linewidth=1.2)
            for head, hollow in (("out", HOLLOW), ("in", {})):  # the hollow ones behind
                for method, points in _by_method(part[part["head"] == head], looks):
                    _points(ax, points, "alpha", looks[method] | size | hollow)
            ax.set_title(f"{pair}\nT = {t:g}" if len(pairs) > 1 else f"T = {t:g}")
            _bits_axis(ax, table["bits_per_weight"])
        row[0].set_ylabel("acceptance of a draft token (α)")
    for ax in axes[-1]:
        ax.set_xlabel(BITS_LABEL)
    hollow_entry = line("LM head left as it is", "", marker="o", **HOLLOW)
    named = {METHODS[method]: look for method, look in looks.items()}
    legend(figure, named, [*interval_entry(table), hollow_entry, line("draft as it was", ":")])
    return figure


def quantized_by_category(table: pd.DataFrame) -> Figure:
    """α by category of prompts: a row of panels per pair, a panel for the lowest and one for the highest temperature."""
    pairs, categories, looks = _names(table["pair"]), _names(table["category"]), variant_looks(table)
    temperatures = sorted({table["temperature"].min(), table["temperature"].max()})
    height = 0.9 + 0.13 * len(categories) * (len(looks) + 1)
    figure = Figure(figsize=(WIDTH, 1 + height * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), len(temperatures), sharex=True, sharey=True, squeeze=False)
    for row, pair in zip(axes, pairs, strict=True):
        for ax, t in zip(row, temperatures, strict=True):
            part = table[(table["pair"] == pair) & (table["temperature"] == t)]
            for index, (variant, look) in enumerate(looks.items()):
                points = part[part["variant"] == variant]
                y = points["category"].map(categories.index) + 0.8 * ((index + 0.5) / len(looks) - 0.5)
                ax.errorbar(points["alpha"], y, xerr=errors(points, "alpha"), capsize=2, elinewidth=1, **look)
            for place in range(1, len(categories)):
                ax.axhline(place - 0.5, color="0.9", linewidth=0.8, zorder=0)
            ax.set(title=f"{pair}, T = {t:g}", ylim=(len(categories) - 0.5, -0.5))
            ax.tick_params(axis="y", length=0)
        row[0].set_yticks(range(len(categories)), [category.replace("_", " ") for category in categories])
    for ax in axes[-1]:
        ax.set_xlabel("acceptance of a draft token (α)")
    legend(figure, looks, interval_entry(table))
    return figure


def quantized_speedup(benchmark: pd.DataFrame) -> Figure:
    """Speed-up over own plain decoding against bits per weight, with its prediction; a panel per pair."""
    pairs = _names(benchmark["pair"])
    figure = Figure(figsize=(WIDTH, 1.6 + 2.8 * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0]
    methods, looks = method_looks(benchmark["method"]), variant_looks(benchmark)
    for ax, pair in zip(axes, pairs, strict=True):
        part = benchmark[benchmark["pair"] == pair]
        ax.axhline(1, color=GREY, linestyle=":", linewidth=1.2)
        for _, of_method in _by_method(part, methods, step=0.02):
            ax.plot(of_method["x"], of_method["predicted_speedup"], **PREDICTION)
            for variant, points in of_method.groupby("variant", sort=False):
                _points(ax, points, "speedup", looks[str(variant)])
        _bits_axis(ax, benchmark["bits_per_weight"])
        ax.set(ylabel="speed-up over plain decoding", title=_pair_and_k(pair, part))
    axes[-1].set_xlabel(BITS_LABEL)
    legend(figure, looks, [*interval_entry(benchmark), line("predicted", **PREDICTION), line("plain decoding", ":")])
    return figure


def break_even(benchmark: pd.DataFrame) -> Figure:
    """α against c: what each timed variant has, and what it would need to be as fast as the 16-bit draft, or to pay at all.

    Both curves are theory, of a draft whose acceptances are i.i.d., at the mean v of the pair's variants.
    """
    pairs = _names(benchmark["pair"])
    figure = Figure(figsize=(WIDTH, 1.6 + 3.2 * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), 1, squeeze=False)[:, 0]
    looks = variant_looks(benchmark)
    for ax, pair in zip(axes, pairs, strict=True):
        part = benchmark[benchmark["pair"] == pair]
        _needed(ax, part)
        for variant, points in part.groupby("variant", sort=False):
            _points(ax, points.assign(x=points["cost_coefficient"]), "alpha", looks[str(variant)])
        ax.set(ylabel="acceptance of a tested token (α)", title=_pair_and_k(pair, part))
    axes[-1].set_xlabel("cost of a draft step in steps of the target (c)")
    curves = [line("needed to pay at all", "--")]
    if (benchmark["variant"] == SIXTEEN_BITS).any():
        curves.insert(0, line("needed to equal the 16-bit draft", "-"))
    legend(figure, looks, [*interval_entry(benchmark), *curves])
    return figure


def _needed(ax: Axes, part: pd.DataFrame) -> None:
    """The two curves around the variants' c; left out where nothing is known to draw them from."""
    v, k = part["verify_cost_ratio"].mean(), int(part["k"].iloc[0])
    low, high = part["cost_coefficient"].min(), part["cost_coefficient"].max()
    if pd.isna(v) or pd.isna(high):
        return
    costs = np.linspace(0.75 * low, 1.15 * high, 101)
    ax.plot(costs, [_or_nan(break_even_alpha(k, c, v)) for c in costs], color=GREY, linestyle="--", linewidth=1.3)
    base = part[(part["variant"] == SIXTEEN_BITS) & part["alpha"].notna() & part["cost_coefficient"].notna()]
    for alpha, base_c in zip(base["alpha"], base["cost_coefficient"], strict=True):
        equal = [_or_nan(equal_speed_alpha(alpha, k, base_c, c, v)) for c in costs]
        ax.plot(costs, equal, color=GREY, linestyle="-", linewidth=1.3)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def method_looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of each method that occurs, which is the same in every figure."""
    found = {*methods}
    everywhere = zip(METHODS, KINDS[:4], "os^D", strict=True)
    return {name: {"color": c, "marker": m, "linestyle": ""} for name, c, m in everywhere if name in found}


def variant_looks(table: pd.DataFrame) -> dict[str, Look]:
    """The colour of the variant's method, and a marker of its own; of many variants, its own among those of its colour."""
    methods = dict(zip(table["variant"], table["method"], strict=True))
    fillings: tuple[Look, ...] = ({}, HOLLOW)
    markers = [{"marker": marker} | filling for filling in fillings for marker in "osD^vPX*<>"]
    own = (
        dict.fromkeys(METHODS, cycle(markers)) if len(methods) <= len(markers) else {m: cycle(markers) for m in METHODS}
    )
    looks = method_looks(methods.values())
    return {variant: looks[method] | next(own[method]) for variant, method in methods.items()}


def _by_method(part: pd.DataFrame, looks: dict[str, Look], step: float = 0.05) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each method's rows with column x: bits per weight, moved by `step` octaves lest methods on one grid hide each other."""
    for index, method in enumerate(looks):
        points = part[part["method"] == method]
        yield method, points.assign(x=points["bits_per_weight"] * 2 ** (step * (index - (len(looks) - 1) / 2)))


def _points(ax: Axes, points: pd.DataFrame, column: str, look: Look) -> None:
    ax.errorbar(points["x"], points[column], yerr=errors(points, column), capsize=2, elinewidth=1, **look)


def _bits_axis(ax: Axes, bits: pd.Series) -> None:
    """A reciprocal scale, which gives the room to few bits, where variants differ; ticks at whole numbers of bits."""
    ax.set_xscale("function", functions=(_minus_reciprocal, _minus_reciprocal))
    low, high = bits.min() / 1.1, bits.max() * 1.25
    ax.set_xlim(low, high)
    ax.set_xticks([b for b in BITS if low <= b <= high])
    ax.xaxis.set_major_formatter("{x:g}")


def _minus_reciprocal(values: Any) -> Any:
    """−1/x, its own inverse, and rising; matplotlib also asks at 0."""
    values = np.asarray(values, dtype=float)
    return -1 / np.where(values == 0, 1e-6, values)


def _pair_and_k(pair: str, part: pd.DataFrame) -> str:
    return f"{pair}, k = {part['k'].iloc[0]}"


def _names(values: pd.Series) -> list[Any]:
    return list(dict.fromkeys(values))
