"""Where randomness enters: every draw of a decoding loop goes through one `Chooser`.

The verifiers ask for "heads with probability p" or "one index by these weights" and know nothing of generators, so a test can
answer with a chooser that follows every branch and sums the probability of each outcome exactly.
"""

from typing import Protocol

import torch
from torch import Tensor


class Chooser(Protocol):
    def bernoulli(self, probability: float) -> bool:
        """True with this probability; never at 0, always at 1 or more."""
        ...

    def categorical(self, weights: Tensor) -> int:
        """An index drawn by non-negative weights, shape (V,), that need not sum to 1; never one of weight 0.

        Raises:
            ValueError: weights that are all 0, or not numbers.
        """
        ...


class GeneratorChooser:
    """Draws from one `torch.Generator` and touches no global state.

    Args:
        generator: None gives a generator seeded by the system, so results then differ from call to call.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        self._generator = generator

    def bernoulli(self, probability: float) -> bool:
        # u lies in [0, 1), so the strict comparison never accepts at probability 0 and always accepts at 1.
        return self._uniform() < probability

    def categorical(self, weights: Tensor) -> int:
        # Inverse transform in float64: `u * total < cumulative` first holds at an index of positive weight.
        cumulative = weights.double().cumsum(dim=-1)
        if not cumulative[-1] > 0:
            raise ValueError(f"weights that sum to {float(cumulative[-1])} are no law")
        target = self._uniform() * cumulative[-1]
        index = int(torch.searchsorted(cumulative, target, right=True))
        if index == len(weights):  # u * total rounded up to total
            index = int(weights.nonzero()[-1])
        return index

    def _uniform(self) -> float:
        device = self._generator.device
        # mps has no float64; 24 random bits are what it can give
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.rand((), generator=self._generator, device=device, dtype=dtype).item()
