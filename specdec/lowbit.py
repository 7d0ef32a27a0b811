"""A model with weights of few bits: which layers, by which method, and what it costs. For drafts whose α is to be known.

Weights are rounded and widened again ("fake" quantisation): the copy computes what a low-bit kernel would up to its rounding,
at the speed of the original. Calibration goes block by block, and each block is calibrated on what the quantised blocks before
it put out (GPTQ, section 3.3, which the AWQ paper leaves open).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
        grid: bits, group size and kind.
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


@dataclass(frozen=True)
class Rounded:
    """A model whose linear layers were rounded and widened again.

    Args:
        model: the copy.
        weights: of each rounded layer, by its name in the model; empty where they lie on no grid (`cast_copy`).
        cost: everything that was rounded.
        body_cost: the same with the head left as it is, so that its weights are among `other_bytes`.
    """

    model: PreTrainedModel
    weights: dict[str, GridWeight]
    cost: Cost
    body_cost: Cost


@torch.no_grad()
def lowbit_copy(model: PreTrainedModel, recipe: Recipe, calibration: Sequence[Tensor] = ()) -> Rounded:
    """A copy of the model whose linear layers, of every decoder block and if asked for the head, lie on the recipe's grid.

    Args:
        calibration: texts as token ids, each of shape (T,); gptq and awq need some.

    Raises:
        InputError: no calibration data for a method that needs it, a group size that does not divide a layer's columns, a model
            without decoder blocks of a known kind, or one with matrices that would stay as they are.
    """
    if recipe.method != "rtn" and not calibration:
        raise InputError(f"{recipe.method} has no calibration data; allowed: at least one text")
    clone = copy.deepcopy(model)
    blocks = decoder_blocks(clone)
    _check_complete(clone, blocks)
    names = {id(module): name for name, module in clone.named_modules()}
    weights: dict[str, GridWeight] = {}
    calls = _Calls(clone, blocks[0], calibration) if recipe.method != "rtn" else None
    for block in blocks:
        for layer, rounded in _round_block(block, recipe, calls):
            weight_of(layer).copy_(rounded.dequantised())
            weights[names[id(layer)]] = rounded
        if calls is not None and block is not blocks[-1]:
            calls.advance(block)
    head: Any = clone.get_output_embeddings()
    name = names[id(head)]
    if recipe.head:
        weights[name] = round_to_nearest(head.weight, recipe.grid)
        _set_head(head, weights[name].dequantised())
    bits = {n: rounded.grid.bits_per_weight(rounded.levels.shape[1]) for n, rounded in weights.items()}
    return Rounded(clone, weights, _cost(clone, bits), _cost(model, {n: b for n, b in bits.items() if n != name}))


@torch.no_grad()
def cast_copy(model: PreTrainedModel, dtype: torch.dtype) -> Rounded:
    """A copy whose linear layers, the head included, were rounded to 16 bits and widened again.

    Costs count a head that is tied to the embedding once: in 16 bits the two are still equal.

    Raises:
        InputError: another dtype than bfloat16 and float16, weights that it cannot hold, or a model that `lowbit_copy` refuses.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise InputError(f"dtype is {dtype}; allowed: torch.bfloat16, torch.float16")
    clone = copy.deepcopy(model)
    blocks = decoder_blocks(clone)
    _check_complete(clone, blocks)
    head: Any = clone.get_output_embeddings()
    for name, layer in linear_layers(clone).items():
        cast = weight_of(layer).to(dtype)
        if not bool(cast.isfinite().all()):
            raise InputError(f"{name} has weights that {dtype} cannot hold; allowed: torch.bfloat16")
        if layer is head:
            _set_head(head, cast)
        else:
            weight_of(layer).copy_(cast)
    bits = dict.fromkeys(linear_layers(model), 16.0)
    body = {name: 16.0 for name, layer in linear_layers(clone).items() if layer is not head}
    return Rounded(clone, {}, _cost(model, bits), _cost(model, body))


def _set_head(head: nn.Module, weight: Tensor) -> None:
    """Give the head a weight of its own: the embedding that it may be tied to stays."""
    head.weight = nn.Parameter(weight.to(weight_of(head).dtype), requires_grad=False)


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


def _check_complete(model: PreTrainedModel, blocks: list[nn.Module]) -> None:
    """Refuse a model with matrices in a block that no linear layer holds, or a linear layer outside: they would stay as they are.

    Raises:
        InputError: naming the first one.
    """
    inside = {id(layer) for block in blocks for layer in linear_layers(block).values()}
    reached = inside | {id(model.get_output_embeddings())}
    missed = [name for name, layer in linear_layers(model).items() if id(layer) not in reached]
    for block in blocks:
        vectors = {id(layer.weight) for layer in linear_layers(block).values()}
        missed += [name for name, p in block.named_parameters() if p.dim() > 1 and id(p) not in vectors]
    if missed:
        raise InputError(
            f"{type(model).__name__} has weights of an unknown kind ({missed[0]}); allowed: linear layers in decoder blocks, and "
            "a head"
        )


def _round_block(block: nn.Module, recipe: Recipe, calls: _Calls | None) -> Iterator[tuple[nn.Module, GridWeight]]:
    layers = linear_layers(block)
    if recipe.method == "gptq" and calls is not None:
        seen = calls.record(block, layers.values())
        for layer, hessian in _hessians(seen):
            yield layer, gptq(weight_of(layer), hessian, recipe.grid)
        return
    if recipe.method == "awq" and calls is not None:
        _scale_inputs(block, recipe.grid, calls)
    for layer in layers.values():
        yield layer, round_to_nearest(weight_of(layer), recipe.grid)


def _hessians(seen: dict[nn.Module, list[_Call]]) -> Iterator[tuple[nn.Module, Tensor]]:
    """X Xᵀ / n of each layer; those that share their input, as q, k and v do, share it."""
    known: dict[int, Tensor] = {}
    for layer, layer_calls in seen.items():
        first = id(layer_calls[0].inputs)
        if first not in known:
            hessian = Hessian(weight_of(layer).shape[1], weight_of(layer).device)
            for call in layer_calls:
                hessian.add(call.inputs)
            known[first] = hessian.mean()
        yield layer, known[first]


def _scale_inputs(block: nn.Module, grid: Grid, calls: _Calls) -> None:
    """AWQ's scales for each place of the block, folded in.

    Folding changes no output, so what the parts of the block are given is recorded once.

    Raises:
        InputError: it does change the output: the block's norms are of another kind (Gemma's multiply by 1 + weight).
    """
    places = scaled_inputs(block)
    seen = calls.record(block, [block, *(module for place in places for module in (place.layers[0], place.judge))])
    for place in places:
        inputs = torch.cat([call.inputs.reshape(-1, call.inputs.shape[-1]) for call in seen[place.layers[0]]])
        judged = seen[place.judge]
        wanted = [call.output for call in judged]
        scales, _ = search_scales(place, inputs, grid, wanted, partial(_judge, place.judge, judged))
        fold(place, scales)
    before, after = seen[block][0].output, _judge(block, seen[block], 0)
    if not float((after - before).norm()) <= torch.finfo(before.dtype).eps ** 0.5 * float(before.norm()):
        raise InputError(
            f"awq cannot fold scales into {type(block).__name__}; allowed: Llama's or GPT-2's blocks, rtn or gptq"
        )


def _judge(module: nn.Module, calls: list[_Call], text: int) -> Tensor:
    """What the module puts out now for one text."""
    return _first(module(*calls[text].arguments, **calls[text].options))


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

    def record(self, block: nn.Module, modules: Iterable[nn.Module]) -> dict[nn.Module, list[_Call]]:
        """What modules of the block are called with and put out, text by text."""
        seen: dict[nn.Module, list[_Call]] = {module: [] for module in modules}

        def note(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            seen[module].append(_Call(arguments, options, _first(output)))

        handles = [module.register_forward_hook(note, with_kwargs=True) for module in seen]
        try:
            for arguments, options in self._calls:
                block(*arguments, **options)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def advance(self, block: nn.Module) -> None:
        """To the next block, on what this one puts out now."""
        outputs = [_first(block(*arguments, **options)) for arguments, options in self._calls]
        self._calls = [((output, *call[0][1:]), call[1]) for output, call in zip(outputs, self._calls, strict=True)]


@dataclass(frozen=True)
class _Call:
    """One call of a module, and the hidden states that it put out."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor

    @property
    def inputs(self) -> Tensor:
        """Of a linear layer."""
        tensor: Tensor = self.arguments[0]
        return tensor


def _first(output: Any) -> Tensor:
    """A module's hidden states, whether it gives them alone or with more."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _cost(model: PreTrainedModel, bits: dict[str, float]) -> Cost:
    """What a model takes whose layers of these names are stored in so many bits a weight."""
    sizes = {name: weight_of(layer).numel() for name, layer in linear_layers(model).items() if name in bits}
    weights = sum(sizes.values())
    stored = sum(size * bits[name] for name, size in sizes.items())
    everything = sum(parameter.numel() for parameter in model.parameters())
    return Cost(tuple(bits), weights, round(stored / 8), 2 * (everything - weights))
