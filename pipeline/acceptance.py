"""What a cell says of acceptance: the same keys in every cell that decodes speculatively."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.stats import AcceptanceStats, bootstrap_interval, ratio_of_sums
from specdec.theory import iid_acceptance_length

# Each of these is a ratio of two counts of `AcceptanceStats`, pooled over prompts, with an interval over prompts.
_RATIOS = {
    "draft_acceptance_rate": ("accepted", "proposed"),
    "alpha": ("accepted", "tested"),
    "alpha_overlap": ("overlap", "tested"),
    "mean_acceptance_length": ("new_tokens", "target_forwards"),
    "mean_accepted_per_round": ("accepted", "target_forwards"),
}


@dataclass(frozen=True)
class PromptResult:
    """The rounds of one prompt."""

    question_id: int | str
    category: str
    stats: AcceptanceStats


def prompt_generator(seed: int, question_id: int | str) -> torch.Generator:
    """One generator per prompt, so that a prompt's tokens depend neither on the other prompts nor on their order."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{question_id}".encode()))


def acceptance_record(results: Sequence[PromptResult]) -> dict[str, Any]:
    """The acceptance keys of a cell, prompts pooled; an undefined value, or the interval of too few prompts, is None."""
    pooled = AcceptanceStats(tuple(round_ for result in results for round_ in result.stats.rounds))
    record: dict[str, Any] = {
        "prompts": len(results),
        "new_tokens": pooled.new_tokens,
        "rounds": pooled.target_forwards,
        "proposed": pooled.proposed,
        "accepted": pooled.accepted,
        "tested": pooled.tested,
        "iid_acceptance_length": None
        if pooled.alpha is None
        else iid_acceptance_length(pooled.alpha, [r.drafted for r in pooled.rounds]),
        "acceptance_per_position": pooled.acceptance_per_position,
        "conditional_acceptance_per_position": pooled.conditional_acceptance_per_position,
        "proposed_per_position": pooled.proposed_per_position,
        "tested_per_position": pooled.tested_per_position,
        "per_prompt": [_raw(result) for result in results],
    }
    for name in ("acceptance_per_position", "conditional_acceptance_per_position"):
        record |= _position_intervals(name, results, len(record[name]))
    for name, (numerator, denominator) in _RATIOS.items():
        counts = [(getattr(r.stats, numerator), getattr(r.stats, denominator)) for r in results]
        record[name] = ratio_of_sums(counts)
        record[f"{name}_lo"], record[f"{name}_hi"] = bootstrap_interval(counts, ratio_of_sums)
    return record


def _position_intervals(name: str, results: Sequence[PromptResult], positions: int) -> dict[str, list[float | None]]:
    """The ends of the interval of each position's rate, over prompts."""
    denominator = "proposed_per_position" if name == "acceptance_per_position" else "tested_per_position"
    lows, highs = [], []
    for j in range(positions):
        counts = [(_at(r.stats.accepted_per_position, j), _at(getattr(r.stats, denominator), j)) for r in results]
        low, high = bootstrap_interval(counts, ratio_of_sums)
        lows.append(low)
        highs.append(high)
    return {f"{name}_lo": lows, f"{name}_hi": highs}


def _at(counts: Sequence[int], position: int) -> int:
    """A prompt whose rounds never reached the position has no count there."""
    return counts[position] if position < len(counts) else 0


def _raw(result: PromptResult) -> dict[str, Any]:
    rounds = result.stats.rounds
    return {
        "question_id": result.question_id,
        "category": result.category,
        "per_round_drafted": [r.drafted for r in rounds],
        "per_round_proposed": [r.proposed for r in rounds],
        "per_round_accepted": [r.accepted for r in rounds],
        "per_round_emitted": [r.emitted for r in rounds],
    }
