"""From logits to the law that tokens are drawn from.

One function, `to_probs`, serves target, draft and plain decoding alike ("standardised sampling", Leviathan et al. 2023, §2.2):
all theory and all verification is about the adjusted laws p and q, so they must be adjusted in exactly one place.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import InputError


@dataclass(frozen=True)
class SamplingConfig:
    """How logits become a law: temperature first, then top-k, then top-p, the order of Hugging Face's logits processors.

    Args:
        temperature: at least 0; 0 is greedy: a one-hot law at the lowest-index argmax.
        top_k: keep the k most likely tokens (ties with the k-th are kept too); None, or more than the vocabulary, keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; in (0, 1]; None keeps all.

    Raises:
        InputError: a value outside these ranges, NaN included.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(
                f"temperature is {self.temperature!r}; allowed: a finite number of at least 0 (0 means greedy)"
            )
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise InputError(f"top_k is {self.top_k!r}; allowed: an integer of at least 1, or None for no limit")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise InputError(f"top_p is {self.top_p!r}; allowed: a number above 0 and at most 1, or None for no limit")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def to_probs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """The law that `config` makes of `logits`.

    Args:
        logits: shape (..., V), any floating dtype.

    Returns:
        Probabilities of the same shape, in float32 or, where the logits are float64, in float64.

    Raises:
        InputError: logits that are NaN or +inf, or a row without a possible token.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    largest = logits.amax(dim=-1, keepdim=True)
    if not bool(largest.isfinite().all()):  # NaN anywhere in a row makes it the row's largest
        raise InputError(
            "a model's logits hold NaN or infinity; allowed: numbers (float16 may overflow where float32 does not)"
        )
    if config.is_greedy:
        best = logits.argmax(dim=-1, keepdim=True)  # torch documents the first index among equals
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    # Subtracting the maximum first keeps the largest scaled logit at exactly 0, so that a temperature of 1e-8 overflows to -inf
    # (probability 0) and never to inf - inf = NaN; the floor keeps a temperature that underflows to 0 from giving 0/0.
    scaled = logits - largest
    scaled = scaled / max(config.temperature, torch.finfo(logits.dtype).tiny)
    if config.top_k is not None and config.top_k < scaled.shape[-1]:
        kth = scaled.topk(config.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    probs = scaled.softmax(dim=-1)
    if config.top_p is not None and config.top_p < 1:
        probs = _keep_nucleus(probs, config.top_p)
    return probs


def _keep_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero everything outside the smallest most-likely set that reaches `top_p`, and renormalise. Shape (..., V)."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass of all tokens ranked higher: the first token always stays
    kept = ordered.masked_fill(before >= top_p, 0.0)
    nucleus = torch.zeros_like(probs).scatter_(-1, order, kept)
    return nucleus / nucleus.sum(dim=-1, keepdim=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
