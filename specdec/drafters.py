"""Who proposes: a second model, or the text itself. A drafter knows nothing of verification."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache import CachedModel
from specdec.chance import Chooser
from specdec.errors import InputError
from specdec.sampling import SamplingConfig, to_probs


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the laws that they were drawn from.

    `probs`, shape (len(tokens), V), *is* the tensor that the draws used. A second computation of it, or one without the
    temperature, would make the output wrongly distributed. None means that each token was certain: a point mass.
    """

    tokens: tuple[int, ...]
    probs: Tensor | None


class Drafter(Protocol):
    def begin(self, prompt: Tensor, sampling: SamplingConfig) -> None:
        """Start a new text: drop everything of the last one and read the prompt, shape (T,), int64, on the CPU."""
        ...

    def propose(self, context: Tensor, max_tokens: int, chooser: Chooser) -> Draft:
        """Propose at most `max_tokens` ≥ 1 tokens to follow the context, shape (n,): the prompt and all committed tokens."""
        ...

    def rollback(self, length: int) -> None:
        """Only the first `length` tokens of the last context and draft still stand."""
        ...


class ModelDrafter:
    """Proposes tokens sampled from a smaller (or quantised) model.

    Invariant: before a proposal the cache holds a prefix of the context, at least one token short of it; after, it holds the
    context and all proposed tokens but the last. A fully accepted round therefore leaves the cache two tokens short, and they are
    fed together at the next round. Where the draft's own context ends, it proposes nothing more.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def begin(self, prompt: Tensor, sampling: SamplingConfig) -> None:
        self._sampling = sampling
        self._cached = CachedModel(self.model)
        if len(prompt) > 1 and self._cached.room >= len(prompt):
            self._cached.forward(prompt[:-1], keep=1)

    def propose(self, context: Tensor, max_tokens: int, chooser: Chooser) -> Draft:
        tokens: list[int] = []
        probs: list[Tensor] = []
        unread = context[self._cached.length :]
        for _ in range(min(max_tokens, self._cached.room - len(unread) + 1)):
            logits = self._cached.forward(unread, keep=1)
            q = to_probs(logits[0], self._sampling).cpu()
            tokens.append(chooser.categorical(q))
            probs.append(q)
            unread = torch.tensor(tokens[-1:])
        return Draft(tuple(tokens), torch.stack(probs) if probs else None)

    def rollback(self, length: int) -> None:
        # After full acceptance the cache is shorter than what stands.
        self._cached.rollback(min(length, self._cached.length))


class PromptLookupDrafter:
    """Proposes what followed the last occurrence of the text's own ending (prompt lookup, Saxena 2023): no model, no cost.

    The longest ending is tried first, from `max_ngram` tokens down to one. Of its earlier occurrences the latest one that is
    followed by `max_tokens` tokens wins, else the one followed by most.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        if not isinstance(max_ngram, int) or isinstance(max_ngram, bool) or max_ngram < 1:
            raise InputError(f"max_ngram is {max_ngram!r}; allowed: an integer of at least 1")
        self.max_ngram = max_ngram

    def begin(self, prompt: Tensor, sampling: SamplingConfig) -> None:
        pass  # stateless: everything is in the context

    def propose(self, context: Tensor, max_tokens: int, chooser: Chooser) -> Draft:
        for n in range(min(self.max_ngram, len(context) - 1), 0, -1):
            windows = context[:-1].unfold(0, n, 1)  # every n-gram that something follows, shape (len(context) - n, n)
            starts = (windows == context[-n:]).all(dim=1).nonzero()[:, 0] + n
            if len(starts) > 0:
                complete = starts[starts + max_tokens <= len(context)]
                start = int(complete[-1] if len(complete) > 0 else starts[0])
                return Draft(tuple(context[start : start + max_tokens].tolist()), None)
        return Draft((), None)

    def rollback(self, length: int) -> None:
        pass
