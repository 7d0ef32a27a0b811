"""A model with weights of few bits: which layers, by which method, and what it costs. For drafts whose α is to be known.

Weights are rounded and widened again ("fake" quantisation): the copy computes what a low-bit kernel would up to its rounding,
at the speed of the original. Calibration goes block by block, and each block is calibrated on what the quantised blocks before
it put out (GPTQ, section 3.3; the AWQ authors' code does the same).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.awq import fold, scaled_inputs, search_scales, weight_of
from specdec.errors import InputError
from specdec.gptq import Hessian, gptq
from specdec.grid import Grid, GridWeight, round_to_nearest

Method = Literal["rtn", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq")


@dataclass(frozen=True)
class Recipe:
    """
    Args:
        grid: bits and group size.
        method: rtn (round to nearest), gptq or awq.
        head: whether the LM head is rounded too; to the nearest by every method, on a copy of its own if it is tied.

    Raises:
        InputError: an unknown method.
    """

    grid: Grid
    method: Method = "rtn"
    head: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method is {self.method!r}; allowed: {', '.join(METHODS)}")


@dataclass(frozen=True)
class Cost:
    """
    Args:
        layers: names of the rounded layers.
        weights: how many weights they have.
        bytes: that they would take when stored: weights, scales and zero points.
        other_bytes: of everything that stays as it is, counted in 16 bits; a tied embedding stays.
    """

    layers: tuple[str, ...]
    weights: int
    bytes: int
    other_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Of the rounded layers."""
        return 8 * self.bytes / self.weights


@torch.no_grad()
def lowbit_copy(
    model: PreTrainedModel, recipe: Recipe, calibration: Sequence[Tensor] = ()
) -> tuple[PreTrainedModel, Cost]:
    """A copy of the model whose linear layers, of every decoder block and if asked for the head, lie on the recipe's grid.

    Args:
        calibration: texts as token ids, each of shape (T,); gptq and awq need some.

    Raises:
        InputError: no calibration data for a method that needs it, a group size that does not divide a layer's columns, or a
            model without decoder blocks of a known kind.
    """
    if recipe.method != "rtn" and not calibration:
        raise InputError(f"{recipe.method} has no calibration data; allowed: at least one text")
    clone = copy.deepcopy(model)
    blocks = decoder_blocks(clone)
    names = {id(module): name for name, module in clone.named_modules()}
    done: dict[str, GridWeight] = {}
    calls = _Calls(clone, blocks[0], calibration) if recipe.method != "rtn" else None
    for block in blocks:
        for layer, rounded in _round_block(block, recipe, calls):
            weight_of(layer).copy_(rounded.dequantised())
            done[names[id(layer)]] = rounded
        if calls is not None:
            calls.advance(block)
    if recipe.head:
        head: Any = clone.get_output_embeddings()
        rounded = round_to_nearest(head.weight, recipe.grid)
        head.weight = nn.Parameter(
            rounded.dequantised().to(head.weight.dtype), requires_grad=False
        )  # not the embedding's
        done[names[id(head)]] = rounded
    return clone, _cost(clone, done)


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks in their order, of the Llama or the GPT-2 kind.

    Raises:
        InputError: none of these.
    """
    base: Any = model.base_model
    blocks = list(getattr(base, "layers", None) or getattr(base, "h", None) or [])
    if not blocks or not all((hasattr(b, "self_attn") and hasattr(b, "mlp")) or hasattr(b, "ln_1") for b in blocks):
        raise InputError(f"{type(model).__name__} has decoder blocks of an unknown kind; allowed: Llama's or GPT-2's")
    return blocks


def linear_layers(block: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def _round_block(block: nn.Module, recipe: Recipe, calls: _Calls | None) -> Iterator[tuple[nn.Module, GridWeight]]:
    layers = linear_layers(block)
    if calls is None:
        for layer in layers.values():
            yield layer, round_to_nearest(weight_of(layer), recipe.grid)
        return
    if recipe.method == "awq":
        for place in scaled_inputs(block):
            inputs = torch.cat([x.reshape(-1, x.shape[-1]) for x in calls.inputs_of(block, place.layers[0])])
            scales, _ = search_scales(place, inputs, recipe.grid, calls.outputs_of(block, place.judge))
            fold(place, scales)
        for layer in layers.values():
            yield layer, round_to_nearest(weight_of(layer), recipe.grid)
        return
    hessians = {name: Hessian(weight_of(layer).shape[1], weight_of(layer).device) for name, layer in layers.items()}
    for name, layer in layers.items():
        for inputs in calls.inputs_of(block, layer):
            hessians[name].add(inputs)
    for name, layer in layers.items():
        yield layer, gptq(weight_of(layer), hessians[name].mean(), recipe.grid)


class _Stop(Exception):
    """The first block's inputs are known; the rest of the pass is not needed."""


class _Calls:
    """What a block is called with, for each calibration text; it starts at the first block and moves on with `advance`."""

    def __init__(self, model: PreTrainedModel, first: nn.Module, texts: Sequence[Tensor]) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def catch(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._calls.append((arguments, options))
            raise _Stop

        handle = first.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            for text in texts:
                with suppress(_Stop):
                    model(text[None].to(model.device), use_cache=False)
        finally:
            handle.remove()

    def run(self, block: nn.Module) -> list[Any]:
        return [block(*arguments, **options) for arguments, options in self._calls]

    def inputs_of(self, block: nn.Module, layer: nn.Module) -> list[Tensor]:
        """What a linear layer of the block is given, one tensor a text."""
        return [arguments[0] for arguments, _ in self._calls_of(block, layer)]

    def outputs_of(self, block: nn.Module, module: nn.Module) -> Callable[[], list[Tensor]]:
        """A function that computes what a part of the block puts out, on what the block gives it now."""
        calls = self._calls_of(block, module)
        return lambda: [_first(module(*arguments, **options)) for arguments, options in calls]

    def _calls_of(self, block: nn.Module, module: nn.Module) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = module.register_forward_pre_hook(lambda _, *call: seen.append(call), with_kwargs=True)
        try:
            self.run(block)
        finally:
            handle.remove()
        return seen

    def advance(self, block: nn.Module) -> None:
        """To the next block, on what this one puts out now."""
        outputs = [_first(output) for output in self.run(block)]
        self._calls = [((output, *call[0][1:]), call[1]) for output, call in zip(outputs, self._calls, strict=True)]


def _first(output: Any) -> Tensor:
    """A module's hidden states, whether it gives them alone or with more."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _cost(model: PreTrainedModel, done: dict[str, GridWeight]) -> Cost:
    weights = sum(rounded.levels.numel() for rounded in done.values())
    bits = sum(r.levels.numel() * r.grid.bits_per_weight(r.levels.shape[1]) for r in done.values())
    everything = sum(parameter.numel() for parameter in model.parameters())
    return Cost(tuple(done), weights, round(bits / 8), 2 * (everything - weights))
