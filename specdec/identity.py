"""Is speculative greedy output the plain greedy output, and if not, is it a tie or a fault?

One pass over k + 1 tokens and k + 1 passes over one token run different kernels, which differ in the last bits. Where the two
best logits lie closer than that, either token is greedy. Any larger gap is a fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

TIE_GAP = 5e-4  # in logits, float32; ten times the difference seen between kernels


@dataclass(frozen=True)
class IdentityReport:
    """
    Args:
        matches: the token sequences are equal.
        first_divergence: index of the first differing new token, None if they match.
        top2_gap: the largest logit there minus the smaller logit of the two tokens, by one uncached pass; None if they match.
    """

    matches: bool
    first_divergence: int | None = None
    top2_gap: float | None = None

    @property
    def is_tie(self) -> bool:
        return self.top2_gap is not None and self.top2_gap < TIE_GAP


def check_greedy_identity(
    target: PreTrainedModel, input_ids: Tensor, plain: Sequence[int], speculative: Sequence[int]
) -> IdentityReport:
    """Compare the new tokens of plain and speculative greedy decoding of one prompt, shape (1, T)."""
    if tuple(plain) == tuple(speculative):
        return IdentityReport(True)
    shared = min(len(plain), len(speculative))
    first = next((i for i in range(shared) if plain[i] != speculative[i]), shared)
    if first == shared:  # one is the beginning of the other: a fault in stopping, never a tie
        return IdentityReport(False, first, float("inf"))
    context = torch.cat([input_ids[0].cpu(), torch.tensor(plain[:first], dtype=torch.int64)])
    with torch.inference_mode():
        logits = target(context[None].to(target.device), logits_to_keep=1).logits[0, -1].float()
    gap = float(logits.max() - torch.minimum(logits[plain[first]], logits[speculative[first]]))
    return IdentityReport(False, first, gap)
