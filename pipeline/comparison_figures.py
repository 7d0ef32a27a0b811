"""The figure of stage `comparison`: tokens per second of every contestant, a panel per pair."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.drawing import DARK, GREY, LIGHT, WIDTH, Look, errors, interval_entry, line, looks_of

# Of what decodes without our draft; speculative decoding has the draft's own colour.
COLOURS = {"ar": DARK, "hf": LIGHT, "hf_assisted": LIGHT}


def comparison(table: pd.DataFrame, looks: dict[str, Look]) -> Figure:
    """Horizontal bars, the fastest on top; the dotted line is the fastest decoding without a draft.

    An interval is that of the ratio to this line: tokens per second differ far more from prompt to prompt than ratios do.
    """
    table = table[table["refusal"].isna()]
    parts = [
        part.sort_values("tokens_per_second", kind="stable", na_position="first")
        for _, part in table.groupby("pair", sort=False)
    ]
    sizes = [len(part) for part in parts]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.8 * len(parts) + 0.27 * sum(sizes)), layout="constrained")
    axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for ax, part in zip(axes, parts, strict=True):
        _bars(ax, part, looks)
    patches = [
        Patch(color=look["color"], label=f"speculative, {pair}") for pair, look in looks_of(looks, table).items()
    ]
    patches += [Patch(color=DARK, label="plain"), Patch(color=LIGHT, label="Hugging Face")]
    interval = interval_entry(table[["speedup_over_fastest_lo"]], color="black")
    figure.legend(
        handles=[*patches, line("fastest without a draft", ":"), *interval], loc="outside upper left", ncols=3
    )
    return figure


def _bars(ax: Axes, part: pd.DataFrame, looks: dict[str, Look]) -> None:
    pair, speeds, places = part["pair"].iloc[0], part["tokens_per_second"], range(len(part))
    colours = [COLOURS.get(method, looks[pair]["color"]) for method in part["method"]]
    baseline = speeds[part["name"] == part["fastest_plain"]].iloc[0]
    ends = pd.DataFrame({f"x{end}": baseline * part[f"speedup_over_fastest{end}"] for end in ("", "_lo", "_hi")})
    ax.barh(places, speeds.fillna(0), color=colours, height=0.7)
    bars: Look = {"linestyle": "", "color": "black", "capsize": 2.5, "elinewidth": 1.1}
    ax.errorbar(ends["x"], places, xerr=errors(ends, "x"), **bars)
    right = ends["x_hi"].fillna(speeds).clip(lower=speeds)
    for place, speed, edge in zip(places, speeds, right, strict=True):
        if pd.notna(speed):
            ax.annotate(f"{speed:.1f}", (edge, place), (5, 0), textcoords="offset points", va="center")
    ax.axvline(baseline, color=GREY, linestyle=":", linewidth=1.2)
    ax.set(title=pair, xlabel="tokens per second, prompt not counted")
    ax.set_yticks(places, [label(name) for name in part["name"]])
    ax.margins(x=0.1, y=0.02)


def label(name: str) -> str:
    """A contestant in words."""
    method, _, rest = name.partition(" ")
    words = {"ar": "plain,", "spec": "speculative,", "hf": "HF generate", "hf_assisted": "HF with the draft,"}[method]
    return f"{words} {rest.replace(' k=', ', k = ').replace('k=', 'k = ')}".strip()
