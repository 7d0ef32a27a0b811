"""How many tokens to draft in the next round, chosen while decoding. No torch: what the rounds came to in, a number out.

Every k leaves the output's law as it is. So does a k that changes from round to round, as long as the past decides about it:
whatever has happened, the round that follows emits tokens of the target's law given the text, and it does so for each k. What
must not decide about the number of drafted tokens is the tokens being drafted themselves: if a draft is cut short *before* a
token because of what that token is, the tokens that stay are no longer drawn from the draft's law. (The confidence stop of
`ModelDrafter` ends a draft *behind* the token that it judges.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from specdec.errors import InputError
from specdec.stats import Round
from specdec.theory import speedups

ROUNDS_BETWEEN_LOOKS = 4  # from one to the next, at least


class KPolicy(Protocol):
    """Chooses k for each round of a text; asked once before each round, and told once after it."""

    def begin(self) -> None:
        """Start a new text. What the last one taught is dropped, so that a text depends on its seed alone."""
        ...

    def next_k(self, limit: int) -> int:
        """Draft tokens for the next round, from 0 to `limit`, which is 0 for the last token asked for."""
        ...

    def observe(self, round: Round) -> None:
        """What came of it. The drafter may have drafted fewer tokens."""
        ...


class AdaptiveK:
    """The k with the most predicted tokens per second, by the acceptance seen lately in this text.

    Acceptance is estimated for each depth of the draft, as P(token j accepted given that j − 1 was). Where a text is easy, tokens
    are accepted in a row, so that behind an accepted token the next one is accepted more often than the first. An estimate is
    accepted / tested, in which older rounds weigh less; what all depths have in common counts as `weight` further tests, and
    that is `alpha` in the beginning. So a depth that has hardly been tested has the common estimate.

    What is never drafted is never learned. So now and then the policy looks beyond its choice and drafts the next best larger
    number. Such a round is predicted to lose a little; it is taken when the share `looks` of the time since the last one covers
    the loss, and not before ROUNDS_BETWEEN_LOOKS. In this way k = 0, too, is left when drafting begins to pay.

    Costs are in steps of plain decoding, k·c + v[k] a round. Not counted are the tokens that a draft model has to read after
    rounds without a draft, and that a drafter may stop by itself, as at a confidence threshold: k is then the most it drafts.

    Args:
        c: cost coefficient, T_draft(1) / T_target(1).
        v: v[n] is T_target(n + 1) / T_target(1), n = 0, 1, ...; the last one limits k.
        alpha: the acceptance expected beforehand.
        weight: how many tests that counts for.
        memory: after so many rounds what was seen weighs 1/e.
        looks: share of the time that looks may cost, from 0 (never) up to, not including, 1.

    Raises:
        InputError: a value out of its range.
    """

    def __init__(
        self,
        c: float,
        v: Sequence[float],
        alpha: float,
        *,
        weight: float = 8.0,
        memory: float = 32.0,
        looks: float = 0.02,
    ) -> None:
        if not (math.isfinite(c) and c >= 0):
            raise InputError(f"c is {c}; allowed: a number of at least 0")
        if not v or not all(math.isfinite(cost) and cost > 0 for cost in v):
            raise InputError(f"v is {list(v)}; allowed: one number above 0 or more")
        if not 0 <= alpha <= 1:
            raise InputError(f"alpha is {alpha}; allowed: a probability from 0 to 1")
        if not (weight > 0 and memory > 0):
            raise InputError(f"weight is {weight} and memory {memory}; allowed: numbers above 0")
        if not 0 <= looks < 1:
            raise InputError(f"looks is {looks}; allowed: a share from 0 up to, not including, 1")
        self._c, self._v, self._alpha = c, tuple(v), alpha
        self._weight, self._fading, self._looks = weight, math.exp(-1 / memory), looks
        self.begin()

    @property
    def max_k(self) -> int:
        return len(self._v) - 1

    def begin(self) -> None:
        self._accepted = [0.0] * self.max_k  # at depth 1, 2, ..., faded
        self._tested = [0.0] * self.max_k
        # The same at any depth, with those expected beforehand.
        self._all_accepted, self._all_tested = self._weight * self._alpha, self._weight
        self._unlooked = 0  # rounds since the last look
        self._savings = 0.0  # what they saved for the next one, in steps of plain decoding

    def next_k(self, limit: int) -> int:
        limit = min(limit, self.max_k)
        factors = speedups(self.acceptance()[:limit], self._c, self._v)
        best = max(range(limit + 1), key=lambda k: factors[k])  # the smallest among equals
        # A round with k costs C(k) and emits τ(k) tokens, for which the best choice would have taken τ(k) / factor(best).
        losses = {k: self._cost(k) * (1 - factors[k] / factors[best]) for k in range(best + 1, limit + 1)}
        look = min(losses, key=lambda k: losses[k], default=best)
        if look == best or self._unlooked < ROUNDS_BETWEEN_LOOKS or losses[look] >= self._savings:
            return best
        self._unlooked, self._savings = 0, 0.0
        return look

    def observe(self, round: Round) -> None:
        tested = min(round.accepted + 1, round.proposed)
        for depth in range(self.max_k):
            self._accepted[depth] = self._fading * self._accepted[depth] + (depth < round.accepted)
            self._tested[depth] = self._fading * self._tested[depth] + (depth < tested)
        # No fewer than `weight` tests: through rounds without a draft the estimate stays, and a look then changes it the more.
        fading = max(self._fading, self._weight / self._all_tested)
        self._all_accepted = fading * self._all_accepted + round.accepted
        self._all_tested = fading * self._all_tested + tested
        self._unlooked += 1
        self._savings += self._looks * self._cost(round.drafted)

    def acceptance(self) -> list[float]:
        """P(token j accepted given that j − 1 was), j = 1..max_k, as estimated now."""
        weight, common = self._weight, self._all_accepted / self._all_tested
        return [(a + weight * common) / (n + weight) for a, n in zip(self._accepted, self._tested, strict=True)]

    def _cost(self, k: int) -> float:
        return k * self._c + self._v[min(k, self.max_k)]
