"""Who proposes: a second model, or the text itself. A drafter knows nothing of verification."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from specdec.cache import Model, open_cache
from specdec.chance import Chooser
from specdec.errors import InputError, InvariantError
from specdec.models import vocabulary_size
from specdec.sampling import SamplingConfig, to_probs


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the laws that they were drawn from.

    `probs`, shape (len(tokens), V), on the CPU, *is* the tensor that the draws used. A second computation of it, or one without
    the temperature, would make the output wrongly distributed. None means that each token was certain: a point mass.
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

    def check(self, text: Tensor) -> None:
        """For debugging, after the rollback of a round that proposed something: raise InvariantError if what this drafter keeps
        does not fit `text`, shape (n,), which is all but the last committed token."""
        ...


class ModelDrafter:
    """Proposes tokens sampled from a smaller (or quantised) model.

    Invariant: before a proposal the cache holds a prefix of the context, at least one token short of it; after, it holds the
    context and all proposed tokens but the last. A fully accepted round therefore leaves the cache two tokens short, and they are
    fed together at the next round; so are the tokens of rounds without a proposal. Where the draft's own context ends, it
    proposes nothing more.

    Args:
        model: in eval mode.
        confidence_threshold: stop the draft behind a token that the draft model's own softmax, before temperature and filters,
            gives less than this probability. The token is kept: dropping it for its own probability would bias the output. It is
            Hugging Face's `assistant_confidence_threshold`, except that theirs judges the scores behind temperature and filters.
            0 never stops.
        vocabulary: the target's number of token ids, where it differs: of one tokenizer's models some are padded to a larger
            size. Only ids that both have are proposed, and `probs` gets the target's shape. An id that the draft does not have is
            read as its last one; what a draft makes of it cannot bias the output. None: the draft's own.

    Raises:
        InputError: a threshold outside 0 to 1, or a vocabulary that is not an integer of at least 1.
    """

    def __init__(self, model: Model, confidence_threshold: float = 0.0, vocabulary: int | None = None) -> None:
        is_number = isinstance(confidence_threshold, int | float) and not isinstance(confidence_threshold, bool)
        if not (is_number and 0 <= confidence_threshold <= 1):
            raise InputError(f"confidence_threshold is {confidence_threshold!r}; allowed: a number from 0 to 1")
        if vocabulary is not None and (
            not isinstance(vocabulary, int) or isinstance(vocabulary, bool) or vocabulary < 1
        ):
            raise InputError(
                f"vocabulary is {vocabulary!r}; allowed: an integer of at least 1, or None for the draft's own"
            )
        self.model = model
        self.confidence_threshold = confidence_threshold
        self._vocabulary = vocabulary

    def begin(self, prompt: Tensor, sampling: SamplingConfig) -> None:
        self._sampling = sampling
        self._cached = open_cache(self.model)
        prompt = self._readable(prompt)
        if len(prompt) > 1 and self._cached.room >= len(prompt):
            self._cached.forward(prompt[:-1], keep=1)

    def propose(self, context: Tensor, max_tokens: int, chooser: Chooser) -> Draft:
        tokens: list[int] = []
        probs: list[Tensor] = []
        unread = self._readable(context[self._cached.length :])
        for _ in range(min(max_tokens, self._cached.room - len(unread) + 1)):
            logits = self._cached.forward(unread, keep=1)[:, : self._vocabulary]
            q = to_probs(logits[0], self._sampling).cpu()
            if self._vocabulary is not None and len(q) < self._vocabulary:
                q = functional.pad(q, (0, self._vocabulary - len(q)))
            tokens.append(chooser.categorical(q))
            probs.append(q)
            unread = torch.tensor(tokens[-1:])
            if self.confidence_threshold > 0 and self._confidence(logits[0], q, tokens[-1]) < self.confidence_threshold:
                break
        return Draft(tuple(tokens), torch.stack(probs) if probs else None)

    def rollback(self, length: int) -> None:
        # After full acceptance the cache is shorter than what stands.
        self._cached.rollback(min(length, self._cached.length))

    def check(self, text: Tensor) -> None:
        missing = len(text) - self._cached.length
        if missing not in (0, 1):
            raise InvariantError(f"the draft's cache is {missing} tokens short of the target's; allowed: 0, or 1")
        self._cached.check(self._readable(text[: self._cached.length]))

    def _readable(self, tokens: Tensor) -> Tensor:
        """Without ids that only the target has, for which the draft has no embedding."""
        if self._vocabulary is None:
            return tokens
        return tokens.clamp(max=vocabulary_size(self.model) - 1)

    def _confidence(self, logits: Tensor, q: Tensor, token: int) -> float:
        plain = SamplingConfig(temperature=1.0)
        return float((q if self._sampling == plain else to_probs(logits, plain))[token])


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

    def check(self, text: Tensor) -> None:
        pass
