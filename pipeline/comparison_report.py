"""The report's part on stage `comparison`: who was how much faster than whom, in one interleaved run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from pipeline.comparison_figures import label
from pipeline.wording import (
    PAIR,
    UNKNOWN,
    Column,
    Row,
    comparison,
    interval,
    is_known,
    markdown,
    number,
    rows_of,
    words,
)

COMPARISON = (
    "All rows of a pair decoded the same prompts in turns, in one process. Same kernels: over plain decoding with the kernels of "
    "the row. Fastest: over the fastest decoding without a draft, whatever its kernels. HF, HF with the draft: over Hugging "
    "Face's generate, and its assisted generation or prompt lookup with the same draft and k. Measured / predicted: the speed-up "
    "over the same kernels, over τ / (k̄c + v) with c and v of those kernels. k = auto is chosen from round to round by c, v and "
    "the acceptance of the text so far. The kernels `default` are transformers' forward, which generate has too."
)


def comparison_table(table: pd.DataFrame) -> str:
    """A row per contestant, the fastest of its pair first."""
    ran = table[table["refusal"].isna()]
    parts = [
        part.sort_values("tokens_per_second", ascending=False, kind="stable")
        for _, part in ran.groupby("pair", sort=False)
    ]
    columns: list[Column] = [
        PAIR,
        ("decoding", lambda row: label(row["name"])),
        ("tok/s", number("tokens_per_second", 1)),
        ("end to end", number("end_to_end_tokens_per_second", 1)),
        ("τ", number("mean_acceptance_length")),
        ("over same kernels", _ratio("speedup")),
        ("over fastest", _ratio("speedup_over_fastest")),
        ("over HF", _ratio("speedup_over_hf")),
        ("over HF with the draft", _ratio("speedup_over_hf_assisted")),
        ("measured / predicted", _ratio("measured_over_predicted")),
        ("greedy output against plain", words("identical")),
    ]
    return markdown(pd.concat(parts), columns)


def _ratio(key: str) -> Callable[[Row], str]:
    """A value with its interval; a dash alone where a row is not compared."""
    return lambda row: interval(key)(row) if is_known(row[key]) else UNKNOWN


def comparison_findings(table: pd.DataFrame) -> str:
    """A few sentences per pair, and what was not run."""
    return "\n".join(f"- `{pair}`: {' '.join(_of_pair(part))}" for pair, part in table.groupby("pair", sort=False))


def _of_pair(part: pd.DataFrame) -> Iterator[str]:
    rows = {row["name"]: row for row in rows_of(part) if not is_known(row["refusal"])}
    best = rows[next(iter(rows.values()))["fastest_speculative"]]
    plain = rows[best["fastest_plain"]]
    speed = number("tokens_per_second", 1)
    yield (
        f"fastest with a draft: {label(best['name'])}, {speed(best)} tokens/s, greedy output {words('identical')(best)}; fastest "
        f"without one: {label(plain['name'])}, {speed(plain)}."
    )
    over = [("speedup_over_fastest", "the fastest decoding without a draft"), ("speedup_over_hf", "HF generate")]
    yield _sentence(best, [*over, ("speedup_over_hf_assisted", "HF with the draft")], "The first has ")
    most = rows[best["best_over_same_kernels"]]
    same = comparison(most, "speedup", label(f"ar {most['kernels']}"))
    yield f"Most over plain decoding with the same kernels: {label(most['name'])}, {same}."
    if is_known(best["auto_over_best_fixed_k"]):
        fixed = f"the best fixed k here, {best['best_fixed_k']:.0f}"
        yield _sentence(best, [("auto_over_best_fixed_k", fixed)], "k = auto has ")
    if is_known(best["measured_over_predicted"]):
        yield f"Measured / predicted of the fastest draft: {interval('measured_over_predicted')(best)}."
    for row in rows_of(part[part["refusal"].notna()]):
        yield f"{row['kernels']} not run: {row['refusal']}."


def _sentence(row: Row, ratios: list[tuple[str, str]], start: str) -> str:
    return f"{start}{'; '.join(comparison(row, key, baseline) for key, baseline in ratios)}."
