"""A model with its KV cache: what decoding asks of one, and a model of transformers in that form.

The only module that knows transformers' cache API (written for 5.24). What has to be known of it: the keyword is `cache`
(`past_key_values` is deprecated), `crop` takes a *negative* count of tokens to remove, a sliding-window layer can be rolled back
only if `activate_past_recording` was called before the first forward, and recurrent layers cannot be rolled back at all.
"""

import copy
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specdec.errors import InputError, InvariantError

# Exactly these types: the recurrent layers inherit from them, and cannot be rolled back.
_ROLLBACK_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
# In bfloat16 step by step and in one pass, keys and values of a real model differ by 0.05 of their size, logits by 0.16; an
# entry of another token or position by about 1.
RELATIVE_TOLERANCE = 0.3


class Cache(Protocol):
    """A model and what it has been fed of one text; batch size 1.

    Invariant: it holds one entry per token fed and not rolled back, `length` of them.
    """

    length: int

    @property
    def room(self) -> int:
        """How many more tokens fit into the model's context."""
        ...

    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        """Feed tokens, shape (n,), and return the logits after the last `keep` of them (default: all), shape (keep, V)."""
        ...

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens fed."""
        ...

    def check(self, text: Tensor, tolerance: float = 1e-3) -> None:
        """For debugging: raise InvariantError unless this is what one pass over `text`, shape (n,), would have left."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A model that brings its own cache, such as `llama.LlamaDecoder`."""

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype  # of the model's parameters

    def open(self) -> Cache:
        """An empty cache, to feed one text to."""
        ...


Model = PreTrainedModel | Decoder  # what decodes: `runners.runner` makes one of the other


def open_cache(model: Model) -> Cache:
    """An empty cache of the model, to feed one text to.

    Raises:
        InputError: a model of transformers that `CachedModel` refuses.
    """
    return model.open() if isinstance(model, Decoder) else CachedModel(model)


def context_length(model: Model) -> int:
    """The most tokens that the model's positions reach; 2^31 - 1 where its configuration states no limit."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)


class CachedModel:
    """A causal language model and the cache of what it has been fed; batch size 1.

    Invariant: the cache holds one entry per token fed and not rolled back, `length` of them.

    Raises:
        InputError: the model is in training mode (dropout), its cache has layers that cannot be rolled back, or (at the first
            forward) it does not use the cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.training:
            raise InputError(f"{type(model).__name__} is in training mode; allowed: models after .eval()")
        self.model = model
        self._cache = DynamicCache(config=model.config)
        for layer in self._cache.layers:
            if type(layer) not in _ROLLBACK_LAYERS:
                raise InputError(
                    f"{type(model).__name__} keeps a {type(layer).__name__} in its cache, which cannot be rolled back; "
                    "allowed: models whose layers are full or sliding-window attention"
                )
        self._cache.activate_past_recording()
        self.length = 0

    @property
    def room(self) -> int:
        """How many more tokens fit into the model's context."""
        return context_length(self.model) - self.length

    @torch.inference_mode()
    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        """Feed tokens, shape (n,), and return the logits after the last `keep` of them (default: all), shape (keep, V)."""
        keep = len(tokens) if keep is None else keep
        output = self.model(tokens[None].to(self.model.device), cache=self._cache, use_cache=True, logits_to_keep=keep)
        self.length += len(tokens)
        if self._cache.get_seq_length() != self.length:
            raise InputError(
                f"{type(self.model).__name__} does not keep its past in the cache that it is given; "
                "allowed: models that use transformers' Cache"
            )
        return output.logits[0]

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens fed. Call it once a round: it also trims sliding windows to size."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} tokens back to {length}")
        if self.length > 0:  # a cache that was never fed has nothing to crop
            self._cache.crop(length - self.length)
        self.length = length

    @torch.inference_mode()
    def check(self, text: Tensor, tolerance: float = 1e-3) -> None:
        """For debugging: is this cache what one pass over `text`, shape (n,), would have left?

        Compares the length of every layer, every key and value (rotated keys show the position of each token), and the logits
        that one more token gets through a copy of the cache with those of a pass without a cache. Nothing of the cache changes.

        Args:
            tolerance: of each number in float32; in 16 bits, where rounding is coarse, the error of each entry may be
                RELATIVE_TOLERANCE of the size of one.

        Raises:
            InvariantError: naming what differs.
        """
        lengths = {self.length, *(self._cache.get_seq_length(i) for i in range(len(self._cache.layers)))}
        if lengths != {len(text)}:
            raise InvariantError(f"the cache of {len(text)} tokens has the lengths {sorted(lengths)}")
        if len(text) == 0:
            return
        tokens = text[None].to(self.model.device)
        fresh = DynamicCache(config=self.model.config)
        self.model(tokens, cache=fresh, use_cache=True, logits_to_keep=1)
        for index, (layer, expected) in enumerate(zip(self._cache.layers, fresh.layers, strict=True)):
            for name in ("keys", "values"):
                ours, theirs = getattr(layer, name), getattr(expected, name)
                # A window may still hold older entries, but never fewer than the next token sees.
                if ours.shape[-2] < theirs.shape[-2]:
                    raise InvariantError(f"{name} of layer {index}: {ours.shape[-2]} of {theirs.shape[-2]} entries")
                check_close(f"{name} of layer {index}", ours[..., -theirs.shape[-2] :, :], theirs, tolerance)
        if self.room < 1:  # a draft's context may be full
            return
        probe = tokens[:, :1]
        cached = self.model(probe, cache=copy.deepcopy(self._cache), use_cache=True, logits_to_keep=1).logits
        uncached = self.model(torch.cat([tokens, probe], dim=1), logits_to_keep=1).logits
        check_close("logits of the next token", cached, uncached, tolerance)


def check_close(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Compare two tensors of one shape, of which the last dimension is an entry.

    Raises:
        InvariantError: in float32, numbers that differ by more than the tolerance; in 16 bits, an entry that differs by more than
            RELATIVE_TOLERANCE of the size of one.
    """
    # Impossible tokens have logits of -inf on both sides, which are equal though their difference is NaN.
    difference = (ours - theirs).masked_fill(ours == theirs, 0).float()
    if theirs.dtype in (torch.float32, torch.float64):
        error, allowed = float(difference.abs().max()), tolerance
    else:  # rounding in 16 bits is larger than any absolute limit worth having
        error = float(difference.norm(dim=-1).max() / theirs.float().norm(dim=-1).mean())
        allowed = RELATIVE_TOLERANCE
    if not error <= allowed:
        raise InvariantError(f"{name} differ by {error:g} from those of a fresh pass; allowed: {allowed:g}")
