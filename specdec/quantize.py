"""Cheaper copies of a model, to draft for it: a bfloat16 cast, and weight-only INT8 with a real kernel.

A self-draft needs no second checkpoint: it agrees with its target almost always and differs from it only in cost and rounding.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


class Int8Linear(nn.Module):
    """y = x Wᵀ + b with W in INT8, symmetric, one scale per output channel (round to nearest).

    On a CPU it runs `aten::_weight_int8pack_mm` with bfloat16 activations, which reads a quarter of the bytes of float32;
    elsewhere the weights are widened on the fly, which is portable and not fast.

    Args:
        weight: shape (out, in), floating point.
        bias: shape (out,) or None.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        # Rounded against the scale as it is stored, so that the error stays within half a step.
        least, most = weight.aminmax(dim=1)
        largest = torch.maximum(-least, most)
        scales = (largest / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        # What stays is allocated before what does not: in the gaps of that it would keep them from being given back.
        levels = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        levels.copy_((weight / scales.float()[:, None]).round_().clamp_(-127, 127))
        self.register_buffer("weight", levels)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """x: shape (..., in), bfloat16; returns shape (..., out)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        # The kernel reads past the end of rows whose length is not a multiple of 16 (torch 2.13).
        if x.device.type == "cpu" and rows.shape[1] % 16 == 0:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        else:
            y = (rows @ self.weight.to(x.dtype).T) * self.scales
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], y.shape[-1])


def bfloat16_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with its parameters in bfloat16.

    Buffers keep their dtype, as when a checkpoint is loaded in bfloat16: rotary frequencies cast to bfloat16 would misplace every
    token far from the start.
    """
    return cast_parameters(_borrowing_copy(model))


def int8_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose linear layers, LM head included, hold INT8 weights; everything else is bfloat16.

    A head that is tied to the embedding is quantised on its own copy: the embedding stays in bfloat16.
    """
    clone = _borrowing_copy(model)
    for parent, name, weight, bias in list(linears(clone)):
        setattr(parent, name, Int8Linear(weight, None if bias is None else bias.detach().clone()))
    return cast_parameters(clone)


def _borrowing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that has the model's own parameters, so that they do not lie in memory twice until they are replaced one by one."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, Tensor | None]]:
    """(parent, attribute, weight (out, in), bias) of every linear layer, GPT-2's transposed Conv1D included."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child.weight, child.bias
            elif isinstance(child, Conv1D):
                yield parent, name, child.weight.T, child.bias


def cast_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """Cast the parameters to bfloat16, in place, and leave the buffers as they are."""
    """Give the model parameters of its own, in bfloat16; those that were tied stay so."""
    cast: dict[int, nn.Parameter] = {}
    places = [(m, name, p) for m in model.modules() for name, p in m.named_parameters(recurse=False)]
    for module, name, old in places:
        if id(old) not in cast:
            cast[id(old)] = nn.Parameter(old.detach().to(torch.bfloat16, copy=True), old.requires_grad)
        setattr(module, name, cast[id(old)])
    return model
