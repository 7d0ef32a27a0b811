"""Rows of the tables that look into a cell: acceptance and speed by category of prompts, accepted tokens by round, speed by k.

A missing key is a KeyError here; `tables` knows whose file it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.stats import MIN_UNITS_FOR_INTERVAL, bootstrap_interval, ratio, ratio_of_sums
from specdec.theory import predicted_speedup

Record = dict[str, Any]
Unit = tuple[float, ...]  # what a prompt adds to the sums of a ratio
Statistic = Callable[[Sequence[Unit]], float | None]

ALL = "all prompts"  # beside the categories
PAIR = ("pair", "target", "draft", "k")
ENDS = ("", "_lo", "_hi", "_lowest", "_highest")  # a value, its interval, and the ends of what single prompts have
ACCEPTANCE_BY_CATEGORY = (*PAIR, "category", "prompts", *(f"alpha{end}" for end in ENDS))
SPEEDUP_BY_CATEGORY = (*PAIR, "kernels", "category", "prompts", *(f"speedup{end}" for end in ENDS))
ROUNDS = (*PAIR, "accepted_per_round", "rounds", "share", "share_lo", "share_hi", "iid_share")
SPEEDUPS = ("speedup", "speedup_lo", "speedup_hi", "predicted_speedup", "ideal_speedup")
SPEEDUP_BY_K = (*PAIR, "stage", "kernels", *SPEEDUPS)


def acceptance_by_category(record: Record) -> list[Record]:
    """α of a cell's prompts of each category, and of all of them.

    Raises:
        KeyError: the cell lacks a key.
    """
    units = [(prompt["category"], _accepted_and_tested(prompt)) for prompt in record["per_prompt"]]
    return list(_by_category(record, "alpha", units, lambda parts: ratio_of_sums([(a, b) for a, b in parts]), PAIR))


def _accepted_and_tested(prompt: Record) -> Unit:
    """Tested are the accepted tokens of a round and the first refused one."""
    accepted, proposed = prompt["per_round_accepted"], prompt["per_round_proposed"]
    return sum(accepted), sum(min(a + 1, n) for a, n in zip(accepted, proposed, strict=True))


def speedup_by_category(record: Record) -> list[Record]:
    """Speed-up over own plain decoding of a timed cell's prompts of each category, and of all of them.

    Raises:
        KeyError: the cell lacks a key.
    """
    units = [(sample["category"], (*_cost(sample, "ar"), *_cost(sample, "spec"))) for sample in record["samples"]]
    return list(_by_category(record, "speedup", units, _speedup, (*PAIR, "kernels")))


def _cost(sample: Record, method: str) -> tuple[float, float]:
    """Median seconds of a prompt's runs, and the tokens they paid for."""
    seconds = sample["decode_seconds"][method]
    runs = [float(run) for run in (seconds.split() if isinstance(seconds, str) else seconds)]
    return median(runs), sample["decoded" if "decoded" in sample else "new_tokens"][method]


def _speedup(units: Sequence[Unit]) -> float | None:
    """Seconds per token of the first method over those of the second, each summed over prompts."""
    slow_seconds, slow_tokens, fast_seconds, fast_tokens = (sum(column) for column in zip(*units, strict=True))
    return ratio(slow_seconds * fast_tokens, fast_seconds * slow_tokens)


def _by_category(
    record: Record, key: str, units: Sequence[tuple[str, Unit]], statistic: Statistic, names: Sequence[str]
) -> Iterator[Record]:
    """A row for each category in the order of the prompts; before them one for all prompts, with the cell's own interval."""
    for category in [ALL, *dict.fromkeys(category for category, _ in units)]:
        parts = [unit for name, unit in units if category in (ALL, name)]
        known = [value for value in (statistic([part]) for part in parts) if value is not None]
        value, (low, high) = statistic(parts), bootstrap_interval(parts, statistic) if category != ALL else (None, None)
        if category == ALL:
            value, low, high = record[key], record[f"{key}_lo"], record[f"{key}_hi"]
        lowest, highest = min(known, default=None), max(known, default=None)
        row = {name: record[name] for name in names} | {"category": category, "prompts": len(parts)}
        yield row | {f"{key}{end}": v for end, v in zip(ENDS, (value, low, high, lowest, highest), strict=True)}


def round_rows(record: Record) -> list[Record]:
    """How many draft tokens a round accepts: its share of the cell's rounds, and what i.i.d. acceptance at the cell's α gives.

    The last round of a text drafts fewer tokens, and a look-up may find none: the prediction is for rounds of the same lengths.

    Raises:
        KeyError: the cell lacks a key.
    """
    longest = record["k"]
    prompts = [prompt["per_round_accepted"] for prompt in record["per_prompt"]]
    proposed = [n for prompt in record["per_prompt"] for n in prompt["per_round_proposed"]]
    counts = np.array([np.bincount(rounds, minlength=longest + 1) for rounds in prompts], dtype=float)
    low, high = _share_intervals(counts)
    total, alpha = counts.sum(axis=0), record["alpha"]
    return [
        {
            **{name: record[name] for name in PAIR},
            "accepted_per_round": n,
            "rounds": int(total[n]),
            "share": ratio(total[n], total.sum()),
            "share_lo": low[n],
            "share_hi": high[n],
            "iid_share": None if alpha is None else fmean(_iid_share(n, length, alpha) for length in proposed),
        }
        for n in range(longest + 1)
    ]


def _iid_share(n: int, length: int, alpha: float) -> float:
    """P(n of `length` draft tokens are accepted): α^n (1 − α), or α^n where that is all of them."""
    if n > length:
        return 0.0
    return alpha**n * (1.0 if n == length else 1 - alpha)


def _share_intervals(counts: NDArray[np.float64]) -> tuple[list[Any], list[Any]]:
    """Intervals of all shares, by the same draws as `specdec.stats.bootstrap_interval`.

    Args:
        counts: shape (prompts, k + 1), the rounds of each prompt with so many accepted tokens.
    """
    if len(counts) < MIN_UNITS_FOR_INTERVAL:
        return [None] * counts.shape[1], [None] * counts.shape[1]
    draws = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    sums = counts[draws].sum(axis=1)
    low, high = np.quantile(sums / sums.sum(axis=1, keepdims=True), [0.025, 0.975], axis=0)
    return low.tolist(), high.tolist()


def timed_row(record: Record) -> Record:
    """A timed cell as a row of the table by k.

    Raises:
        KeyError: the cell lacks a key.
    """
    return {"stage": "hf_benchmark"} | {key: record[key] for key in (*PAIR, "kernels", *SPEEDUPS)}


def compared_rows(record: Record) -> list[Record]:
    """Of a comparison, a row for each fixed k with the kernels that ran every k.

    Raises:
        KeyError: the cell lacks a key.
    """
    drafting = [x for x in record["contestants"] if x["method"] == "spec"]
    kernels = drafting[-1]["kernels"]
    c = next((run["cost_coefficient"] for run in record["kernels_run"] if run["kernels"] == kernels), None)
    names = {key: record[key] for key in ("pair", "target", "draft")}
    return [
        {**names, "stage": "comparison", **{key: x[key] for key in ("k", "kernels", *SPEEDUPS[:-1])}}
        | {"ideal_speedup": _ideal(x["alpha"], x["mean_drafted_per_round"], c)}
        for x in sorted(drafting, key=lambda x: x["k"] if isinstance(x["k"], int) else 0)
        if x["kernels"] == kernels and isinstance(x["k"], int)
    ]


def _ideal(alpha: float | None, k: float | None, c: float | None) -> float | None:
    """Leviathan's (1 − α^(k+1)) / ((1 − α)(kc + 1)) at the mean number of drafted tokens; of each round nothing is kept."""
    if alpha is None or k is None or c is None:
        return None
    return predicted_speedup(k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha), k, c, 1.0)
