"""The figure of T(n): a colour stands for the kernels, a marker for the context, and the dashed line for the machine's limits."""

from __future__ import annotations

from itertools import cycle

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pipeline.drawing import GREY, KINDS, WIDTH, Look, legend, line, measured, ticks

ROLES = ("target", "draft")
KERNELS = ("default", "packed", "compiled", "native", "joined")
ROOF: Look = {"color": GREY, "linestyle": "--", "linewidth": 1.3}


def cost_curve(table: pd.DataFrame) -> Figure:
    """T(n) against n: a row of panels per pair, its target's and its draft's; one that copies text has none."""
    table = in_milliseconds(table).assign(x=table["n"])
    pairs = list(dict.fromkeys(table["pair"]))
    colours, markers = _styles(table)
    figure = Figure(figsize=(WIDTH, 1.6 + 3.0 * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), len(ROLES), squeeze=False)
    for row, pair in zip(axes, pairs, strict=True):
        for ax, role in zip(row, ROLES, strict=True):
            part = table[(table["pair"] == pair) & (table["role"] == role)]
            if part.empty:
                ax.remove()
                continue
            for (kernels, context), points in part.groupby(["kernels", "context"], sort=False):
                measured(ax, points, "seconds", colours[kernels] | markers[context] | {"markersize": 4})
            first = part[(part["kernels"] == part["kernels"].iloc[0]) & (part["context"] == part["context"].iloc[0])]
            ax.plot(first["x"], first["roof_seconds"], **ROOF)
            ax.set(title=f"{pair}: {role} {part['model'].iloc[0]}", xlabel="tokens in one pass (n)", ylim=(0, None))
            ax.set_ylabel("T(n), ms")
            ticks(ax, part["n"])
    contexts = [line(f"behind {context} tokens", "", **marker) for context, marker in markers.items()]
    legend(figure, colours, [*contexts, _measured_entry(table), line("limit of memory and arithmetic", "--")])
    return figure


def in_milliseconds(table: pd.DataFrame) -> pd.DataFrame:
    columns = ["seconds", "seconds_lo", "seconds_hi", "roof_seconds"]
    return table.assign(**{name: 1000 * table[name] for name in columns})


def _styles(table: pd.DataFrame) -> tuple[dict[str, Look], dict[int, Look]]:
    """A colour for each of the kernels, the same in every study, and a marker for each context."""
    colours, markers = dict(zip(KERNELS, KINDS, strict=True)), cycle("osD^vPX")
    kernels = {name: {"color": colours.get(name, GREY)} for name in dict.fromkeys(table["kernels"])}
    return kernels, {context: {"marker": next(markers)} for context in dict.fromkeys(table["context"])}


def _measured_entry(table: pd.DataFrame) -> Line2D:
    return line("median, 95 % interval" if table["seconds_lo"].notna().any() else "median")
