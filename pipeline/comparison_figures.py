"""The figure of stage `comparison`: tokens per second of every contestant, a panel per pair."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.drawing import BLUE, GREY, ORANGE, WIDTH, line

# By what decodes; the two of Hugging Face share a colour.
COLOURS = {"plain": ORANGE, "speculative": BLUE, "Hugging Face": sns.color_palette("colorblind")[7]}
KIND = {"ar": "plain", "spec": "speculative", "hf": "Hugging Face", "hf_assisted": "Hugging Face"}


def comparison(table: pd.DataFrame) -> Figure:
    """Horizontal bars, the fastest on top; the dotted line is the fastest decoding without a draft."""
    table = table[table["refusal"].isna()]
    parts = [
        part.sort_values("tokens_per_second", kind="stable", na_position="first")
        for _, part in table.groupby("pair", sort=False)
    ]
    sizes = [len(part) for part in parts]
    figure = Figure(figsize=(WIDTH, 1.0 + 0.8 * len(parts) + 0.27 * sum(sizes)), layout="constrained")
    axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for ax, part in zip(axes, parts, strict=True):
        speeds, places = part["tokens_per_second"], range(len(part))
        ax.barh(places, speeds.fillna(0), color=[COLOURS[KIND[method]] for method in part["method"]], height=0.7)
        for place, speed in zip(places, speeds, strict=True):
            if pd.notna(speed):
                ax.annotate(f"{speed:.1f}", (speed, place), (4, 0), textcoords="offset points", va="center")
        ax.axvline(speeds[part["name"] == part["fastest_plain"]].iloc[0], color=GREY, linestyle=":", linewidth=1.2)
        ax.set(title=part["pair"].iloc[0], xlabel="tokens per second, prompt not counted")
        ax.set_yticks(places, [label(name) for name in part["name"]])
        ax.margins(x=0.1, y=0.02)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=[*handles, line("fastest without a draft", ":")], loc="outside upper left", ncols=4)
    return figure


def label(name: str) -> str:
    """A contestant in words."""
    method, _, rest = name.partition(" ")
    words = {"ar": "plain,", "spec": "speculative,", "hf": "HF generate", "hf_assisted": "HF with the draft,"}[method]
    return f"{words} {rest.replace(' k=', ', k = ').replace('k=', 'k = ')}".strip()
