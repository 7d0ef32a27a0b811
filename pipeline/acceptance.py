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
    for name, (numerator, denominator) in _RATIOS.items():
        counts = [(getattr(r.stats, numerator), getattr(r.stats, denominator)) for r in results]
        record[name] = ratio_of_sums(counts)
        record[f"{name}_lo"], record[f"{name}_hi"] = bootstrap_interval(counts, ratio_of_sums)
    return record


def _raw(result: PromptResult) -> dict[str, Any]:
    rounds = result.stats.rounds
    return {
        "question_id": result.question_id,
        "category": result.category,
        "per_round_proposed": [r.proposed for r in rounds],
        "per_round_accepted": [r.accepted for r in rounds],
        "per_round_emitted": [r.emitted for r in rounds],
    }
