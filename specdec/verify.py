"""The modified rejection step that keeps the output distributed as the target's.

Two rules: token verification (Leviathan et al. 2023, Algorithm 1) and block verification (Sun et al. 2024).

Pure functions over probability vectors and a `Chooser`: no models, no caches, no generators. They work in the dtype that they
are given. Throughout, p is the target's law and q the draft's, as in Leviathan et al. (Chen et al. 2023 use the mirror image).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from specdec.chance import Chooser


@dataclass(frozen=True)
class Verdict:
    """What one round commits: the first `accepted` draft tokens, then `token`.

    `token` is the bonus token, drawn from the target's law, when every draft token was accepted; else it is the corrected token
    that replaces the first rejected one. `overlaps` holds Σ min(p, q) for every *tested* position (the accepted ones and the
    rejected one); in token verification it is the conditional expectation of the test's outcome.
    """

    accepted: int
    token: int
    is_bonus: bool
    overlaps: tuple[float, ...]


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Σ min(p, q) = 1 − TV(p, q), the probability that a token drawn from q is accepted (Leviathan et al., Theorem 3.5).

    Args:
        p, q: shape (..., V).

    Returns:
        Shape (...).
    """
    return torch.minimum(p, q).sum(dim=-1)


def residual(p: Tensor, q: Tensor, scale: float = 1.0) -> Tensor:
    """norm(max(0, scale · p − q)), the law of the corrected token (Leviathan et al., §2.3). Shape (V,).

    Where p and q agree to the last bit nothing is left to normalise. Only rounding can cause a rejection there, and p itself is
    then the right law.

    Args:
        scale: 1 in token verification; in block verification the probability that the accepted tokens are acceptable together.
    """
    excess = (scale * p - q).clamp_min(0)
    mass = excess.sum()
    return excess / mass if mass > 0 else p


def verify_tokens(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None, chooser: Chooser) -> Verdict:
    """Accept a prefix of the draft, token by token, and draw the token that follows it (Leviathan et al., Algorithm 1).

    Args:
        draft_tokens: x_1..x_k, k ≥ 0; none makes this a plain draw from p.
        p: the target's laws after the context, after x_1, ..., after x_k; shape (k + 1, V).
        q: the laws that x_1..x_k were *drawn from*, shape (k, V); None for a deterministic draft, whose laws are point masses.

    Raises:
        ValueError: shapes that do not fit, or a draft token to which its own law gives probability 0.
    """
    _check_shapes(draft_tokens, p, q)
    overlaps: list[float] = []
    for j, token in enumerate(draft_tokens):
        q_j = _draft_law(draft_tokens, p, q, j)
        ratio = _ratio(token, p[j], q_j, j)
        overlaps.append(_overlap(p[j], q_j))
        if not chooser.bernoulli(min(1.0, ratio)):
            return Verdict(j, chooser.categorical(residual(p[j], q_j)), False, tuple(overlaps))
    return Verdict(len(draft_tokens), chooser.categorical(p[-1]), True, tuple(overlaps))


def verify_block(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None, chooser: Chooser) -> Verdict:
    """Accept the longest prefix that passes as a whole, and draw the token that follows it (Sun et al. 2024).

    Never accepts less in expectation than `verify_tokens`, and in fact the most that any lossless rule can that leaves later
    rounds as they are: where a token's ratio p / q is above 1, the surplus carries over to the tokens behind it. Greedy laws
    leave no surplus, so both rules agree at temperature 0, and likewise for deterministic drafts. Arguments and errors as for
    `verify_tokens`.

    A failed test does not end the round: a longer prefix may still pass, and the longest one counts. `overlaps` covers the
    accepted tokens and the first one behind them; its mean is no longer the rate at which they are accepted.
    """
    joint, acceptance = block_acceptance(draft_tokens, p, q)
    accepted = 0
    for length, probability in enumerate(acceptance, start=1):
        if chooser.bernoulli(probability):
            accepted = length
    is_bonus = accepted == len(draft_tokens)
    tested = range(accepted if is_bonus else accepted + 1)
    overlaps = tuple(_overlap(p[j], _draft_law(draft_tokens, p, q, j)) for j in tested)
    if is_bonus:
        return Verdict(accepted, chooser.categorical(p[-1]), True, overlaps)
    law = residual(p[accepted], _draft_law(draft_tokens, p, q, accepted), joint[accepted])
    return Verdict(accepted, chooser.categorical(law), False, overlaps)


def token_acceptance(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None) -> list[float]:
    """min(1, p / q) at each drafted token: the tests of `verify_tokens`, had they all been made."""
    _check_shapes(draft_tokens, p, q)
    laws = (_draft_law(draft_tokens, p, q, j) for j in range(len(draft_tokens)))
    return [
        min(1.0, _ratio(token, p[j], law, j)) for j, (token, law) in enumerate(zip(draft_tokens, laws, strict=True))
    ]


def block_acceptance(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
    """The probabilities of block verification (Sun et al. 2024). Arguments and errors as for `verify_tokens`.

    Returns:
        joint: p_0..p_k, p_i = min(1, p_{i−1} · p(x_i) / q(x_i)), the probability that a prefix of at least i tokens is accepted.
        acceptance: h_1..h_k, the probability of the test of each prefix.
    """
    _check_shapes(draft_tokens, p, q)
    joint = [1.0]
    for j, token in enumerate(draft_tokens):
        joint.append(min(1.0, _ratio(token, p[j], _draft_law(draft_tokens, p, q, j), j, scale=joint[-1])))
    acceptance = []
    for i in range(1, len(draft_tokens)):
        surplus = float((joint[i] * p[i] - _draft_law(draft_tokens, p, q, i)).clamp_min(0).sum())
        # The two laws agree and the prefix is certain where this is 0 / 0; it then passes.
        acceptance.append(1.0 if joint[i] == 1 else surplus / (surplus + (1 - joint[i])))
    return joint, acceptance + joint[1:][-1:]  # the whole draft has no token behind it: h_k = p_k


Verifier = Callable[[Sequence[int], Tensor, Tensor | None, Chooser], Verdict]

VERIFIERS: Mapping[str, Verifier] = MappingProxyType({"token": verify_tokens, "block": verify_block})


def _check_shapes(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None) -> None:
    k = len(draft_tokens)
    if p.shape[0] != k + 1 or (q is not None and q.shape != (k, p.shape[1])):
        shapes = f"p {tuple(p.shape)} and q {None if q is None else tuple(q.shape)}"
        raise ValueError(f"{k} draft tokens need p of shape ({k + 1}, V) and q of shape ({k}, V) or None, not {shapes}")


def _draft_law(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None, j: int) -> Tensor:
    """The law that token j was drawn from, shape (V,); a point mass for a deterministic draft."""
    if q is not None:
        return q[j]
    point_mass = torch.zeros_like(p[j])
    point_mass[draft_tokens[j]] = 1.0
    return point_mass


def _ratio(token: int, p: Tensor, q: Tensor, position: int, scale: float = 1.0) -> float:
    """scale · p / q of a drafted token."""
    p_x, q_x = float(p[token]), float(q[token])
    if not q_x > 0:
        raise ValueError(
            f"draft token {token} at position {position} has probability {q_x} under the law it was drawn from"
        )
    if not p_x >= 0:
        raise ValueError(f"the target gives draft token {token} at position {position} the probability {p_x}")
    return scale * p_x / q_x


def _overlap(p: Tensor, q: Tensor) -> float:
    return min(1.0, float(overlap(p, q)))  # a sum in float32 may pass 1
