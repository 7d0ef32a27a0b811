"""The report's part on T(n): what a pass over several tokens costs, and how far that is from what the machine could do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from pipeline.cost_figures import in_milliseconds
from pipeline.wording import PAIR, UNKNOWN, Column, Row, interval, is_known, markdown, number, rows_of, words

NOISY = 2  # a median this many times its interval's lower end was slowed down by something else, and is not compared
SHOWN = (2, 5, 9, 16)  # n whose T(n) / T(1) is told: of k = 1, 4, 8, and more
COST = (
    "T(n) is the time of one pass over n tokens behind a context that is in the cache already: T(1) is a step of plain decoding, "
    "T(k+1) verifies k drafted tokens, and T(k+1) / T(1) is v. Median of passes that took turns, so that all columns are of one "
    "machine; in brackets two of these passes between which the median lies with 95 % confidence. Roof: the time to read the "
    "weights once at the measured memory bandwidth, or that of 2n operations for each weight at the measured arithmetic of a "
    "float32 product, whichever is longer; a step a little below it says that the bandwidth was measured too low. Kernels: "
)
KERNELS = {
    "default": "transformers' forward",
    "joined": "a Llama written out for one text at a time",
    "packed": "the same with float32 matrices in the CPU's own order",
    "compiled": "packed, with generated code between the products",
    "native": "a Llama's blocks and head as one piece of C++",
}


def cost_words(table: pd.DataFrame) -> str:
    """How the curves are to be read, and what the kernels in them are."""
    return (
        COST
        + "; ".join(f"`{name}`, {KERNELS[name]}" for name in dict.fromkeys(table["kernels"]) if name in KERNELS)
        + "."
    )


def is_noisy(table: pd.DataFrame) -> pd.Series:
    """Whether most passes of a row took far longer than the quickest; a straggler or two do not move a median."""
    return table["seconds"] > NOISY * table["seconds_lo"]


def cost_machine(table: pd.DataFrame) -> str:
    """What the cells were measured on, and what that machine could do while they were; a range over the cells."""
    cells = table.drop_duplicates("pair")
    cpus, threads, devices, torch = (
        " / ".join(str(value) for value in cells[key].dropna().unique()) or UNKNOWN
        for key in ("cpu", "threads", "device", "torch")
    )
    memory, arithmetic = (_range(cells[f"{name}_per_second"]) for name in ("bytes", "operations"))
    return (
        f"CPU {cpus}, threads {threads}, device {devices}; torch {torch}. Memory bandwidth {memory} GB/s, arithmetic "
        f"{arithmetic} GFLOP/s in float32."
    )


def _range(values: pd.Series) -> str:
    ends = dict.fromkeys(f"{value / 1e9:.1f}" for value in (values.min(), values.max()) if is_known(value))
    return " to ".join(ends) or UNKNOWN


def cost_curves(table: pd.DataFrame) -> str:
    """A row per curve."""
    measured = sorted(set(table["n"]) & set(SHOWN))
    columns: list[Column] = [
        PAIR,
        ("model", words("of")),
        ("kernels", words("kernels")),
        ("context", number("context", 0)),
        ("T(1), ms", interval("seconds", 1)),
        *((f"T({n}) / T(1)", number(f"ratio_{n}")) for n in measured),
        ("T(1) / roof", number("over_roof", 2)),
    ]
    return markdown(pd.DataFrame(_curves(table)), columns)


def _curves(table: pd.DataFrame) -> list[Row]:
    """For each curve its row at n = 1, with the other n as ratios to it."""
    rows = []
    for _, part in in_milliseconds(table).groupby(["pair", "role", "kernels", "context"], sort=False):
        row = rows_of(part)[0]
        ratios = {
            f"ratio_{n}": _ratio(seconds, row["seconds"]) for n, seconds in zip(part["n"], part["seconds"], strict=True)
        }
        of = {"of": f"{row['role']} {row['model']}", "over_roof": _ratio(row["seconds"], row["roof_seconds"])}
        rows.append({**row, **ratios, **of})
    return rows


def _ratio(value: Any, other: Any) -> float | None:
    return value / other if is_known(value) and is_known(other) and other > 0 else None


def cost_findings(table: pd.DataFrame) -> str:
    """A line per pair, behind the shortest context: the fastest step of the target, and c, by kernels; and what was not run."""
    return "\n".join(line for pair, part in table.groupby("pair", sort=False) for line in _of_pair(str(pair), part))


def _of_pair(pair: str, part: pd.DataFrame) -> Iterator[str]:
    steps = part[(part["n"] == 1) & (part["context"] == part["context"].min())]
    busy = [f"{row['role']} with {row['kernels']} kernels" for row in rows_of(steps[is_noisy(steps)])]
    steps = steps[~is_noisy(steps)]
    seconds = {(row["role"], row["kernels"]): row["seconds"] for row in rows_of(steps) if is_known(row["seconds"])}
    targets = {kernels: value for (role, kernels), value in seconds.items() if role == "target"}
    if targets:
        fastest, (first, of_first) = min(targets, key=lambda name: targets[name]), next(iter(targets.items()))
        line = f"- `{pair}`, behind {part['context'].min()} tokens: the target's T(1) is least with {fastest} kernels"
        if (saved := _ratio(of_first, targets[fastest])) is not None and fastest != first:
            line += f", {saved:.2f} times as fast as {first}"
        costs = [
            f"{ratio:.3f} with {name}"
            for name in targets
            if (ratio := _ratio(seconds.get(("draft", name)), targets[name])) is not None
        ]
        yield f"{line}; c = T_draft(1) / T_target(1) is {', '.join(costs)}." if costs else f"{line}."
    if busy:
        yield f"- `{pair}`: too noisy to compare: {', '.join(busy)}."
    refused = part[part["refusal"].notna()].drop_duplicates(["role", "kernels"])
    for row in rows_of(refused):
        yield f"- `{pair}`, {row['role']}, {row['kernels']} not run: {row['refusal']}."
