"""The modified rejection step that keeps the output distributed as the target's (Leviathan et al. 2023, Algorithm 1).

Pure functions over probability vectors and a `Chooser`: no models, no caches, no generators. They work in the dtype that they
are given. Throughout, p is the target's law and q the draft's, as in Leviathan et al. (Chen et al. 2023 use the mirror image).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.chance import Chooser


@dataclass(frozen=True)
class Verdict:
    """What one round commits: the first `accepted` draft tokens, then `token`.

    `token` is the bonus token, drawn from the target's law, when every draft token was accepted; else it is the corrected token
    that replaces the first rejected one. `overlaps` holds Σ min(p, q) for every *tested* position (the accepted ones and the
    rejected one), the conditional expectation of each test's outcome.
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


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p − q)), the law of the corrected token (Leviathan et al., §2.3). Shape (V,).

    Where p and q agree to the last bit nothing is left to normalise. Only rounding can cause a rejection there, and p itself is
    then the right law.
    """
    excess = (p - q).clamp_min(0)
    mass = excess.sum()
    return excess / mass if mass > 0 else p


def verify_tokens(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None, chooser: Chooser) -> Verdict:
    """Accept a prefix of the draft, token by token, and draw the token that follows it.

    Args:
        draft_tokens: x_1..x_k, k ≥ 0; none makes this a plain draw from p.
        p: the target's laws after the context, after x_1, ..., after x_k; shape (k + 1, V).
        q: the laws that x_1..x_k were *drawn from*, shape (k, V); None for a deterministic draft, whose laws are point masses.

    Raises:
        ValueError: shapes that do not fit, or a draft token to which its own law gives probability 0.
    """
    k = len(draft_tokens)
    if p.shape[0] != k + 1 or (q is not None and q.shape != (k, p.shape[1])):
        shapes = f"p {tuple(p.shape)} and q {None if q is None else tuple(q.shape)}"
        raise ValueError(f"{k} draft tokens need p of shape ({k + 1}, V) and q of shape ({k}, V) or None, not {shapes}")
    overlaps: list[float] = []
    for j, token in enumerate(draft_tokens):
        p_j = p[j]
        q_j = _point_mass(token, p_j) if q is None else q[j]
        p_x, q_x = float(p_j[token]), float(q_j[token])
        if not q_x > 0:
            raise ValueError(
                f"draft token {token} at position {j} has probability {q_x} under the law it was drawn from"
            )
        overlaps.append(p_x if q is None else min(1.0, float(overlap(p_j, q_j))))  # a sum in float32 may pass 1
        if not chooser.bernoulli(min(1.0, p_x / q_x)):
            return Verdict(j, chooser.categorical(residual(p_j, q_j)), False, tuple(overlaps))
    return Verdict(k, chooser.categorical(p[k]), True, tuple(overlaps))


def _point_mass(token: int, like: Tensor) -> Tensor:
    q = torch.zeros_like(like)
    q[token] = 1.0
    return q
