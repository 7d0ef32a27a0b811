"""Low-bit weights that run as such: real kernels for what `lowbit_copy` rounded, to draft with and to time.

A copy from here computes what the rounded and widened model computes, up to the rounding of bfloat16: activations, scales and
zero points have 8 binary digits here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import InputError
from specdec.grid import Grid, GridWeight, round_to_nearest
from specdec.quantize import Int8Linear, cast_parameters, linears

if TYPE_CHECKING:  # who runs a low-bit model need not import what makes one
    from specdec.lowbit import Rounded

GROUP_SIZES = (32, 64, 128, 256)  # that aten::_weight_int4pack_mm_for_cpu knows
ROWS = 16  # it takes a multiple of so many outputs
INT4_GRID = Grid(4, 32, "min")  # of a draft that is to cost little: the smallest groups that the kernels know
CUDA_CAPABILITY = (8, 0)  # from which on aten::_weight_int4pack_mm runs


def has_kernel(grid: Grid) -> bool:
    """Whether weights of this grid run without being widened: 4 bits in groups of GROUP_SIZES, or 8 bits, symmetric, per row."""
    if grid.bits == 4:
        return grid.group_size in GROUP_SIZES
    return grid == Grid(8, None, "sym")


class Int4Linear(nn.Module):
    """y = x Wᵀ + b with W in 4 bits, two to a byte, with a scale and an offset for each row of each group of columns.

    With bfloat16 activations it runs `aten::_weight_int4pack_mm_for_cpu`, or on a GPU `aten::_weight_int4pack_mm`; for both a
    weight is (level − 8) · scale + offset. Where that does not work (other devices and activations, outputs that are no multiple
    of 16) the weights are widened on the fly, which is portable and not fast.

    Args:
        weight: of 4 bits, in groups of GROUP_SIZES.
        bias: shape (out,) or None.

    Raises:
        InputError: the kernel does not know the grid, or the groups are not neighbouring columns in their order.
    """

    nibbles: Tensor  # (out, in / 2), uint8: the level of an even column in the lower half, of the next one in the upper
    scales: Tensor  # (groups, out, 2), bfloat16: scale and offset, as the kernel takes them
    bias: Tensor | None

    def __init__(self, weight: GridWeight, bias: Tensor | None) -> None:
        super().__init__()
        if weight.grid.bits != 4:
            raise InputError(f"bits is {weight.grid.bits}; allowed: 4")
        _check(weight)
        self.width = weight.grid.width(weight.levels.shape[1])
        offsets = (8 - weight.zeros) * weight.scales  # of level 8: in the middle of the range, rounding harms least
        scales = torch.stack([weight.scales.T, offsets.T], dim=-1)
        self.register_buffer("nibbles", (weight.levels[:, ::2] | (weight.levels[:, 1::2] << 4)).contiguous())
        self.register_buffer("scales", scales.to(torch.bfloat16).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.bfloat16))
        # The kernel's own order of the nibbles. It depends on the processor and means nothing elsewhere, so it is no buffer: it
        # is neither moved nor copied nor saved, but made anew from them.
        self._packing: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: shape (..., in), bfloat16; returns shape (..., out)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self._runs_kernel(x):
            product = "_weight_int4pack_mm_for_cpu" if x.device.type == "cpu" else "_weight_int4pack_mm"
            if self._packing is None:
                self._packing = self._packed(x.device)
            y = getattr(torch.ops.aten, product)(rows, self._packing, self.width, self.scales)
        else:
            y = rows @ self.widened().to(x.dtype).T
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], y.shape[-1])

    def widened(self) -> Tensor:
        """The weight that the kernel computes with, shape (out, in), float32."""
        scales, offsets = self.scales.float().repeat_interleave(self.width, dim=0).unbind(dim=-1)
        return (self._levels() - 8.0) * scales.T + offsets.T

    def _levels(self) -> Tensor:
        return torch.stack([self.nibbles & 15, self.nibbles >> 4], dim=-1).flatten(1)

    def _packed(self, device: torch.device) -> Tensor:
        """The levels in the order that the device's kernel reads them in."""
        if device.type == "cpu":
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(self._levels().int(), 1)
        # The GPU's wants the even column in the upper half of a byte, and tiles of 16 columns, 2, 4 or 8 side by side.
        tiles = next(n for n in (8, 4, 2) if 2 * self.nibbles.shape[1] % (16 * n) == 0)
        return torch.ops.aten._convert_weight_to_int4pack((self.nibbles << 4) | (self.nibbles >> 4), tiles)

    def _runs_kernel(self, x: Tensor) -> bool:
        if self.nibbles.shape[0] % ROWS or not x.dtype == self.scales.dtype == torch.bfloat16:
            return False
        if x.device.type == "cuda":
            return torch.cuda.get_device_capability(x.device) >= CUDA_CAPABILITY
        return x.device.type == "cpu"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Int4Linear:
        self._packing = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._packing = None
        super()._load_from_state_dict(*arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packing": None}


@torch.no_grad()
def kernel_copy(rounded: Rounded) -> PreTrainedModel:
    """A copy of the rounded model whose rounded layers hold their levels and run on them; everything else is bfloat16.

    Parameters are cast, buffers keep their dtype (`quantize.bfloat16_copy` says why).

    Raises:
        InputError: a grid without a kernel, or a model that was not rounded to a grid.
    """
    if not rounded.weights:
        raise InputError(
            "the model was rounded to no grid (a cast); allowed: one of lowbit_copy (bfloat16_copy runs in 16 bits)"
        )
    clone = copy.deepcopy(rounded.model)
    for name, weight in rounded.weights.items():
        parent, _, attribute = name.rpartition(".")
        bias: Any = clone.get_submodule(name).bias
        setattr(clone.get_submodule(parent), attribute, _layer(weight, bias))
    return cast_parameters(clone)


@torch.no_grad()
def int4_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy to draft with: linear layers in 4 bits, the LM head in 8, everything else in bfloat16. No calibration.

    The layers are rounded to the nearest level of INT4_GRID. A checkpoint that was stored on that grid, as GGUF's Q4_1, loses
    nothing by it but the rounding of its scales to bfloat16. The head has one scale a row (`Int8Linear`), on a copy of its own
    where it is tied: a wrong order of likely tokens costs acceptance, and 4 bits give many.

    Raises:
        InputError: a layer whose columns are no multiple of the grid's groups.
    """
    clone = copy.deepcopy(model)
    head = clone.get_output_embeddings()
    for parent, name, weight, bias in list(linears(clone)):
        is_head = getattr(parent, name) is head
        setattr(parent, name, Int8Linear(weight, bias) if is_head else Int4Linear(_nearest(weight), bias))
    return cast_parameters(clone)


def _nearest(weight: Tensor) -> GridWeight:
    return round_to_nearest(weight.detach().float(), INT4_GRID)


def stored_bytes(model: nn.Module) -> int:
    """Of parameters and buffers; what is shared counts once, and what a kernel made of them for itself not at all."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


def _layer(weight: GridWeight, bias: Tensor | None) -> nn.Module:
    _check(weight)
    if weight.grid.bits == 4:
        return Int4Linear(weight, bias)
    layer = Int8Linear(weight.dequantised(), bias)
    # Not its own rounding: a row of GPTQ's need not reach to the last level.
    layer.weight = (weight.levels.short() - weight.zeros.short()).to(torch.int8).contiguous()  # as the kernel wants it
    layer.scales = weight.scales[:, 0].to(torch.bfloat16)
    return layer


def _check(weight: GridWeight) -> None:
    grid, columns = weight.grid, weight.levels.shape[1]
    if not has_kernel(grid):
        raise InputError(
            f"{grid} has no kernel; allowed: 4 bits in groups of {', '.join(map(str, GROUP_SIZES))}, or {Grid(8, None, 'sym')}"
        )
    if not torch.equal(weight.groups, torch.arange(columns, device=weight.groups.device) // grid.width(columns)):
        raise InputError("groups are mixed over the columns; allowed: neighbouring columns, group after group")
