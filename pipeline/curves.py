"""From timed passes to a curve T(n). Pure functions: no models, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import Any


def curve(samples: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Medians with their intervals, and the samples themselves; by n, from 1 on. Of no samples there is no median."""
    intervals = [median_interval(values) for values in samples]
    return {
        "seconds": [median(values) if values else None for values in samples],
        "seconds_lo": [low for low, _ in intervals],
        "seconds_hi": [high for _, high in intervals],
        "samples": [list(values) for values in samples],
    }


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float | None, float | None]:
    """Two order statistics with the median between them, whatever the law of the independent values.

    The r-th smallest lies above the median if fewer than r values lie below it, with probability Σ_{i<r} C(n, i) / 2^n; so does
    the r-th largest below it. r is the largest with twice that of at most 1 − level.

    Returns:
        The interval's ends; (None, None) of values too few for any: fewer than 6 at 0.95.
    """
    count, ordered = len(values), sorted(values)
    rank, missed = 0, 0.0
    while rank < count // 2:
        missed += 2 * comb(count, rank) / 2**count
        if missed > 1 - level:
            break
        rank += 1
    return (None, None) if rank == 0 else (ordered[rank - 1], ordered[-rank])


def roof(
    rows: int, weight_bytes: int, weights: int, bytes_per_second: float | None, operations_per_second: float | None
) -> list[float | None]:
    """Seconds that a pass over n tokens takes at least, n = 1..rows: to read the weights once, or for 2n operations on each."""
    if not bytes_per_second or not operations_per_second:  # a clock that stood still
        return [None] * rows
    reading = weight_bytes / bytes_per_second
    return [max(reading, 2 * weights * n / operations_per_second) for n in range(1, rows + 1)]
