"""How numbers and tables of the report are written, and what an interval allows to say. Every text is made from a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

UNKNOWN = "–"

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]  # the heading, and the text for a row


def verdict(row: Row, *names: str) -> str:
    """What the intervals of a timed row allow to say; `names` are the keys that tell it from others."""
    fastest = words("fastest_baseline")(row)
    if row["speedup"] == row["speedup_over_fastest"]:
        comparisons = comparison(row, "speedup", f"{fastest}, the fastest baseline")
    else:
        over_own = comparison(row, "speedup", "own plain decoding")
        comparisons = f"{over_own}; {comparison(row, 'speedup_over_fastest', f'the fastest baseline, {fastest}')}"
    place = ", ".join([*(f"`{row[name]}`" for name in names), f"k = {row['k']}"])
    return f"{place}: {comparisons}. Measured / predicted = {number('overhead_factor')(row)}.{repeatability(row)}"


def repeatability(row: Row) -> str:
    """A sentence where runs with the same seed gave different tokens, or nothing."""
    runs = row["unrepeatable_runs"]
    if not is_known(runs) or runs == 0:
        return ""
    count = f"{runs:.0f} timed {'run' if runs == 1 else 'runs'}"
    return f" Not repeatable: {count} gave other tokens than the first of the same kind."


def comparison(row: Row, key: str, baseline: str) -> str:
    """One speed-up in words; faster or slower is said only where the interval leaves out 1 and noise does not reach as far."""
    value, low, high = row[key], row[f"{key}_lo"], row[f"{key}_hi"]
    noise = noise_distance(row)
    if not is_known(value):
        return f"not compared with {baseline}"
    if not is_known(low):
        conclusion = "too few prompts for an interval"
    elif low <= 1 <= high:
        conclusion = "not distinguishable from 1"
    elif noise is None:
        conclusion = "the noise of this run is unknown"
    elif abs(value - 1) <= noise:
        conclusion = "within the noise of this run"
    else:
        conclusion = "faster" if value > 1 else "slower"
    return f"{interval(key)(row)} times the speed of {baseline}: {conclusion}"


def noise_distance(row: Row) -> float | None:
    """How far from 1 plain decoding against itself may lie: the farther end of its interval, or the value without one."""
    ends = [row[f"noise_floor{end}"] for end in ("_lo", "_hi")]
    known = [end for end in (ends if all(map(is_known, ends)) else [row["noise_floor"]]) if is_known(end)]
    return max((abs(end - 1) for end in known), default=None)


def markdown(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    lines = [[heading for heading, _ in columns], ["---"] * len(columns)]
    lines += [[text(row).replace("|", r"\|") for _, text in columns] for row in rows_of(table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def words(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key]) if is_known(row[key]) else UNKNOWN


def number(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A value; what rounds to 0 has no sign (z)."""
    return lambda row: f"{row[key]:z.{digits}f}" if is_known(row[key]) else UNKNOWN


def interval(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A value and its interval; of too few prompts there is none."""
    value, low, high = (number(name, digits) for name in (key, f"{key}_lo", f"{key}_hi"))

    def text(row: Row) -> str:
        ends = f"{low(row)}, {high(row)}" if is_known(row[f"{key}_lo"]) else UNKNOWN
        return f"{value(row)} [{ends}]"

    return text


def rows_of(table: pd.DataFrame) -> list[Row]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def is_known(value: Any) -> bool:
    return bool(pd.notna(value))


PAIR: Column = ("pair", words("pair"))
K: Column = ("k", number("k", 0))
PEAK_MEMORY: Column = (
    "peak memory, GiB",
    lambda row: number("gib")({"gib": row["peak_memory_bytes"] / 2**30}),
)
T: Column = ("T", lambda row: f"{row['temperature']:g}")
