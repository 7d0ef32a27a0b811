"""What the literature predicts, and how measurement is compared with it. No torch: plain numbers in, plain numbers out.

α is the probability that a *tested* draft token is accepted, never accepted / proposed.
"""

import itertools
from collections.abc import Sequence

from specdec.errors import InputError


def expected_tokens_per_round(alpha: float, k: int) -> float:
    """(1 − α^(k+1)) / (1 − α), tokens emitted per round if acceptances are i.i.d. (Leviathan et al. 2023, Eq. 1).

    Written as 1 + α + ... + α^k, which needs no special case at α = 1.
    """
    _check(alpha, k)
    return sum(alpha**j for j in range(k + 1))


def walltime_factor(alpha: float, k: int, c: float) -> float:
    """(1 − α^(k+1)) / ((1 − α)(kc + 1)): the ideal speed-up, one verification at the cost of one step (Theorem 3.8)."""
    return predicted_speedup(expected_tokens_per_round(alpha, k), k, c, 1.0)


def predicted_speedup(tau: float, k: float, c: float, v: float) -> float:
    """τ / (kc + v): tokens per round over the cost of a round, in steps of plain decoding.

    Args:
        tau: measured tokens per target forward.
        k: draft tokens per round; where it varies, the mean.
        c: cost coefficient, T_draft(1) / T_target(1).
        v: verify cost ratio, T_target(k + 1) / T_target(1).
    """
    return tau / (k * c + v)


def optimal_k(alpha: float, c: float, v: Sequence[float] | None = None, *, max_k: int = 64) -> int:
    """The k with the largest predicted speed-up; 0 where none gains (Leviathan et al., §3.5, with measured verification).

    Args:
        v: v[k] is the verify cost ratio of k drafted tokens, v[0] = 1; None takes it as 1 throughout. Its length limits k.
    """
    limit = max_k if v is None else len(v) - 1
    costs = [1.0] * (limit + 1) if v is None else v
    factors = [predicted_speedup(expected_tokens_per_round(alpha, k), k, c, costs[k]) for k in range(limit + 1)]
    return max(range(limit + 1), key=lambda k: factors[k])  # the smallest among equals, so 0 where none gains


def speedups(acceptance: Sequence[float], c: float, v: Sequence[float]) -> list[float]:
    """The predicted speed-up of k = 0, 1, ... drafted tokens where acceptance depends on the depth in the draft.

    Args:
        acceptance: P(token j accepted given that j − 1 was), j = 1, 2, ... Where all are α, the best is `optimal_k`.
        v: v[k] is the verify cost ratio of k drafted tokens. The shorter of the two limits k.
    """
    tokens = itertools.accumulate(accepted_at_least_by_token(acceptance), initial=1.0)
    return [predicted_speedup(tau, k, c, cost) for k, (tau, cost) in enumerate(zip(tokens, v, strict=False))]


def break_even_alpha(k: int, c: float, v: float = 1.0) -> float | None:
    """The α at which k drafted tokens pay exactly: expected_tokens_per_round(α, k) = kc + v. None where even α = 1 loses."""
    return _alpha_for(k * c + v, k)


def equal_speed_alpha(alpha: float, k: int, c: float, cheaper_c: float, v: float = 1.0) -> float | None:
    """The α with which a draft of another cost is as fast as one of (α, c): how much acceptance a cheaper draft may lose.

    Solves expected_tokens(α', k) / (k c' + v) = expected_tokens(α, k) / (k c + v). 0 where even a draft that is always rejected
    would be as fast, None where no α is enough.

    Args:
        alpha: of the draft compared with.
        c: its cost coefficient.
        cheaper_c: c', that of the other draft.
        v: verify cost ratio, common to both.
    """
    return _alpha_for(expected_tokens_per_round(alpha, k) * (k * cheaper_c + v) / (k * c + v), k)


def _alpha_for(tokens: float, k: int) -> float | None:
    """The least α with expected_tokens_per_round(α, k) of at least `tokens`; None where α = 1 is not enough."""
    if expected_tokens_per_round(1.0, k) * (1 + 1e-12) < tokens:  # k + 1, but for the rounding of what was asked
        return None
    if tokens <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: tokens grow with α
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_per_round(middle, k) < tokens else (low, middle)
    return high


def iid_acceptance_length(alpha: float, per_round_k: Sequence[int]) -> float | None:
    """τ_iid where k varies: the mean over rounds of (1 − α^(k_r+1)) / (1 − α)."""
    if not per_round_k:
        return None
    return sum(expected_tokens_per_round(alpha, k) for k in per_round_k) / len(per_round_k)


def accepted_at_least_by_token(acceptance: Sequence[float]) -> list[float]:
    """P(at least i tokens of a draft are accepted) by token verification, i = 1..k: a_1 ⋯ a_i.

    Args:
        acceptance: min(1, p / q) at each drafted token, from `verify.token_acceptance`.
    """
    return list(itertools.accumulate(acceptance, lambda all_so_far, a: all_so_far * a))


def accepted_at_least_by_block(acceptance: Sequence[float]) -> list[float]:
    """P(at least i tokens of a draft are accepted) by block verification: that a prefix of i tokens or more passes.

    Args:
        acceptance: the probability that each prefix passes its test, from `verify.block_acceptance`.
    """
    none_behind = itertools.accumulate(reversed(acceptance), lambda none, h: none * (1 - h), initial=1.0)
    return [1 - none for none in none_behind][:0:-1]


def expected_emitted(at_least: Sequence[float], end: int | None) -> float:
    """How many tokens a round emits in expectation, given its draft: the accepted ones and the one that the target adds.

    Args:
        at_least: P(at least i tokens are accepted), i = 1..k.
        end: place of the first end token in the draft, from 1; nothing behind it is emitted, and nothing is added to it.
    """
    if end is None:
        return 1 + sum(at_least)
    return 1 + sum(at_least[:end]) - at_least[end - 1]


def _check(alpha: float, k: int) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}; allowed: a probability from 0 to 1")
    if k < 0:
        raise InputError(f"k is {k}; allowed: an integer of at least 0")
