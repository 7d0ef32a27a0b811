"""AWQ (Lin et al. 2023, arXiv:2306.00978): give the weights of large inputs a finer grid by scaling them up first.

A few input channels are much larger than the rest, and the error of their weights counts most. Multiplying these columns by
s > 1, and dividing the channel by s in the layer before, changes no output; but behind rounding the columns' error is 1/s of
what it was. s is a power of the channel's mean size, and the power is searched (section 3.2, equation 5). The search over
clipped ranges that the authors' code adds is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec.errors import InputError
from specdec.grid import Grid, round_to_nearest

POWERS = 20  # tried, from 0 (which changes nothing) up to, but without, 1
EVERY = 4  # of so many texts one judges all powers
FINALISTS = 3  # powers that all texts judge


@dataclass(frozen=True)
class ScaledInputs:
    """Linear layers that share their input, and who produces it.

    Args:
        source: a norm, or a linear layer nothing but whose output's channels the layers read.
        rows: the part of the source's output channels that they read.
        layers: nn.Linear or GPT-2's Conv1D.
        judge: the module by whose output the scales are chosen.
    """

    source: nn.Module
    rows: slice
    layers: tuple[nn.Module, ...]
    judge: nn.Module


def scaled_inputs(block: nn.Module) -> list[ScaledInputs]:
    """Where in a decoder block of the Llama or the GPT-2 kind scales can be folded.

    Two layers of a block cannot have them: o_proj where several heads share their values (the shapes forbid it), and GPT-2's
    last one, whose inputs have gone through a GELU.

    Raises:
        InputError: the block's parts have other names, as where q, k and v are one layer of Llama's kind.
    """
    try:
        return _scaled_inputs(block)
    except AttributeError as error:
        raise InputError(
            f"awq does not know the parts of {type(block).__name__} ({error}); allowed: Llama's or GPT-2's"
        ) from None


def _scaled_inputs(block: nn.Module) -> list[ScaledInputs]:
    part: Any = block
    everything = slice(None)
    if hasattr(part, "self_attn"):
        attention, mlp = part.self_attn, part.mlp
        found = [
            ScaledInputs(
                part.input_layernorm, everything, (attention.q_proj, attention.k_proj, attention.v_proj), attention
            ),
            ScaledInputs(part.post_attention_layernorm, everything, (mlp.gate_proj, mlp.up_proj), mlp),
            ScaledInputs(mlp.up_proj, everything, (mlp.down_proj,), mlp.down_proj),
        ]
        if attention.v_proj.weight.shape[0] == attention.o_proj.weight.shape[1]:
            found.insert(1, ScaledInputs(attention.v_proj, everything, (attention.o_proj,), attention.o_proj))
        return found
    width = part.attn.c_proj.weight.shape[0]
    return [
        ScaledInputs(part.ln_1, everything, (part.attn.c_attn,), part.attn),
        ScaledInputs(part.attn.c_attn, slice(2 * width, 3 * width), (part.attn.c_proj,), part.attn.c_proj),
        ScaledInputs(part.ln_2, everything, (part.mlp.c_fc,), part.mlp),
    ]


def weight_of(layer: nn.Module) -> Tensor:
    """The weight as (out, in), a view: GPT-2's Conv1D keeps its transpose."""
    weight: Tensor = layer.weight.data  # type: ignore[assignment]
    return weight.T if isinstance(layer, Conv1D) else weight


def fold(place: ScaledInputs, scales: Tensor) -> None:
    """Multiply the layers' input columns by `scales`, shape (in,), and divide the channels where they come from: no output
    changes but by rounding in floating point."""
    source: Any = place.source
    if isinstance(source, nn.Linear | Conv1D):
        weight_of(source)[place.rows] /= scales[:, None]
    else:  # a norm's weight is its last factor
        source.weight.data[place.rows] /= scales
    if getattr(source, "bias", None) is not None:
        source.bias.data[place.rows] /= scales
    for layer in place.layers:
        weight_of(layer).mul_(scales)


@torch.no_grad()
def search_scales(
    place: ScaledInputs, inputs: Tensor, grid: Grid, wanted: Sequence[Tensor], judge: Callable[[int], Tensor]
) -> tuple[Tensor, float]:
    """The scales that leave the judged output nearest to that of the weights as they are, and their power.

    All powers are judged by every fourth text, and the best few of them by all texts: errors of neighbouring powers differ by
    little, but they differ on all texts alike.

    Args:
        inputs: of the layers, shape (..., in).
        wanted: the judged output with the weights as they are, one tensor a text.
        judge: computes it for the text of that index, with the weights that the layers have at the moment.
    """
    size = inputs.detach().float().abs().reshape(-1, inputs.shape[-1]).mean(dim=0)
    originals = [weight_of(layer).clone() for layer in place.layers]

    def error(power: float, texts: range) -> float:
        scales = _scales(size, power)
        for layer, original in zip(place.layers, originals, strict=True):
            weight_of(layer).copy_(round_to_nearest(original * scales, grid).dequantised() / scales)
        return sum(float((judge(text).float() - wanted[text].float()).square().sum()) for text in texts)

    everything = range(len(wanted))
    powers = sorted((step / POWERS for step in range(POWERS)), key=lambda power: error(power, everything[::EVERY]))
    best = min(sorted(powers[:FINALISTS]), key=lambda power: error(power, everything))
    for layer, original in zip(place.layers, originals, strict=True):
        weight_of(layer).copy_(original)
    return _scales(size, best), best


def _scales(size: Tensor, power: float) -> Tensor:
    scales = size.pow(power).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()
