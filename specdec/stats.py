"""What happened in the rounds of speculative decoding, and intervals for it. Names as in vLLM's and AIPerf's records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Unit = TypeVar("Unit")

MIN_UNITS_FOR_INTERVAL = 12  # a bootstrap over fewer prompts is not an interval worth printing


@dataclass(frozen=True)
class Round:
    """One draft and one verification.

    Args:
        drafted: tokens that the drafter produced, the work done.
        proposed: those of them that could be emitted: all, or those up to and including the first end token.
        accepted: emitted draft tokens.
        emitted: accepted, and the corrected or bonus token if there was one.
        overlaps: Σ min(p, q) for each tested position.
    """

    drafted: int
    proposed: int
    accepted: int
    emitted: int
    overlaps: tuple[float, ...]

    @property
    def tested(self) -> int:
        """Positions whose acceptance was decided: the accepted ones and the first rejected one."""
        return len(self.overlaps)


@dataclass(frozen=True)
class AcceptanceStats:
    """The rounds of one generation, or of several pooled with `+`. A rate over nothing is None."""

    rounds: tuple[Round, ...] = ()

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(self.rounds + other.rounds)

    @property
    def target_forwards(self) -> int:
        """Forward passes of the target after the prompt: one a round."""
        return len(self.rounds)

    @property
    def new_tokens(self) -> int:
        return sum(r.emitted for r in self.rounds)

    @property
    def proposed(self) -> int:
        return sum(r.proposed for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def tested(self) -> int:
        return sum(r.tested for r in self.rounds)

    @property
    def overlap(self) -> float:
        """Σ min(p, q), summed over the tested positions."""
        return sum(sum(r.overlaps) for r in self.rounds)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / proposed. It falls with k even when nothing decays, for tokens behind a rejection count as proposed."""
        return ratio(self.accepted, self.proposed)

    @property
    def alpha(self) -> float | None:
        """Accepted / tested: the α of (1 − α^(k+1)) / (1 − α) in Leviathan et al., counted. Of token verification only."""
        return ratio(self.accepted, self.tested)

    @property
    def alpha_overlap(self) -> float | None:
        """Mean Σ min(p, q) over the tested positions: the same α, estimated with a smaller variance; of any verifier."""
        return ratio(self.overlap, self.tested)

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ: tokens emitted per target forward; 1 for plain decoding."""
        return ratio(self.new_tokens, len(self.rounds))

    @property
    def mean_accepted_per_round(self) -> float | None:
        return ratio(self.accepted, len(self.rounds))

    @property
    def proposed_per_position(self) -> list[int]:
        """Rounds that proposed a token at position 1, 2, ..."""
        return self._count(lambda r: r.proposed)

    @property
    def tested_per_position(self) -> list[int]:
        return self._count(lambda r: r.tested)

    @property
    def accepted_per_position(self) -> list[int]:
        return self._count(lambda r: r.accepted)

    @property
    def acceptance_per_position(self) -> list[float | None]:
        """P(position j accepted), over the rounds that proposed it."""
        return [ratio(a, n) for a, n in zip(self.accepted_per_position, self.proposed_per_position, strict=True)]

    @property
    def conditional_acceptance_per_position(self) -> list[float | None]:
        """P(j accepted given that j − 1 was), over the rounds that tested position j."""
        return [ratio(a, n) for a, n in zip(self.accepted_per_position, self.tested_per_position, strict=True)]

    def _count(self, reached: Callable[[Round], int]) -> list[int]:
        longest = max((r.proposed for r in self.rounds), default=0)
        return [sum(reached(r) >= j for r in self.rounds) for j in range(1, longest + 1)]


def ratio(numerator: float, denominator: float) -> float | None:
    """None where the denominator is 0: an undefined value is left out, not invented."""
    return numerator / denominator if denominator else None


def bootstrap_interval(
    units: Sequence[Unit],
    statistic: Callable[[list[Unit]], float | None],
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> tuple[float | None, float | None]:
    """Percentile bootstrap over units (prompts, not tokens: tokens of one prompt are not independent).

    Returns:
        The interval's ends; (None, None) with fewer than `MIN_UNITS_FOR_INTERVAL` units or an undefined statistic.
    """
    if len(units) < MIN_UNITS_FOR_INTERVAL or statistic(list(units)) is None:
        return None, None
    draws = np.random.default_rng(seed).integers(len(units), size=(resamples, len(units)))
    values = [statistic([units[i] for i in draw]) for draw in draws]
    low, high = np.quantile([v for v in values if v is not None], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Σ first / Σ second: the ratio estimator for accepted / tested over prompts."""
    return ratio(sum(a for a, _ in pairs), sum(b for _, b in pairs))
