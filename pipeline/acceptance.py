"""What a cell says of acceptance: the same keys in every cell that decodes speculatively."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.chance import Chooser
from specdec.stats import AcceptanceStats, bootstrap_interval, ratio, ratio_of_sums
from specdec.theory import (
    accepted_at_least_by_block,
    accepted_at_least_by_token,
    expected_emitted,
    iid_acceptance_length,
)
from specdec.verify import VERIFIERS, Verdict, block_acceptance, token_acceptance

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


class ComparingVerifier:
    """Decides by one rule, and adds up how many tokens both rules would emit in expectation, given each draft.

    The expectations are over the verifier's draws alone, so that on the same drafts the two rules are compared without their
    noise. One object serves one text.
    """

    def __init__(self, rule: str, end_tokens: Collection[int] = ()) -> None:
        self._verify = VERIFIERS[rule]
        self._end_tokens = end_tokens
        self.by_token = 0.0
        self.by_block = 0.0

    def __call__(self, draft_tokens: Sequence[int], p: Tensor, q: Tensor | None, chooser: Chooser) -> Verdict:
        end = next((n for n, token in enumerate(draft_tokens, start=1) if token in self._end_tokens), None)
        by_token = accepted_at_least_by_token(token_acceptance(draft_tokens, p, q))
        by_block = accepted_at_least_by_block(block_acceptance(draft_tokens, p, q)[1])
        self.by_token += expected_emitted(by_token, end)
        self.by_block += expected_emitted(by_block, end)
        return self._verify(draft_tokens, p, q, chooser)


def gain_record(verifiers: Sequence[ComparingVerifier]) -> dict[str, Any]:
    """Tokens per round by block verification over those by token verification, expected on the same drafts.

    Args:
        verifiers: one per prompt.
    """
    counts = [(v.by_block, v.by_token) for v in verifiers]
    low, high = bootstrap_interval(counts, ratio_of_sums)
    return {
        "expected_emitted_token": sum(v.by_token for v in verifiers),
        "expected_emitted_block": sum(v.by_block for v in verifiers),
        "block_gain": ratio_of_sums(counts),
        "block_gain_lo": low,
        "block_gain_hi": high,
    }


def prompt_generator(seed: int, question_id: int | str) -> torch.Generator:
    """One generator per prompt, so that a prompt's tokens depend neither on the other prompts nor on their order."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{question_id}".encode()))


def iid_alpha(record: Mapping[str, Any], rule: str) -> float | None:
    """The α of a cell that belongs into the geometric form.

    In block verification a test's outcome depends on the tokens around it, so that accepted / tested is no α; the mean overlap of
    the tested positions still is.
    """
    alpha: float | None = record["alpha" if rule == "token" else "alpha_overlap"]
    return alpha


def acceptance_record(results: Sequence[PromptResult], rule: str = "token") -> dict[str, Any]:
    """The acceptance keys of a cell, prompts pooled; an undefined value, or the interval of too few prompts, is None."""
    pooled = AcceptanceStats(tuple(round_ for result in results for round_ in result.stats.rounds))
    record: dict[str, Any] = {
        "prompts": len(results),
        "new_tokens": pooled.new_tokens,
        "rounds": pooled.target_forwards,
        "proposed": pooled.proposed,
        "accepted": pooled.accepted,
        "tested": pooled.tested,
        "mean_drafted_per_round": ratio(sum(r.drafted for r in pooled.rounds), len(pooled.rounds)),
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
    alpha, drafted = iid_alpha(record, rule), [r.drafted for r in pooled.rounds]
    record["iid_acceptance_length"] = None if alpha is None else iid_acceptance_length(alpha, drafted)
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
