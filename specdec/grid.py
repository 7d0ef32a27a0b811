"""Weights on a grid of few bits: round to nearest (RTN), and what such a weight costs.

A weight matrix, shape (out, in), is cut into groups of neighbouring input columns. Each row of a group has evenly spaced levels;
where they lie is the grid's kind. What is computed with is the dequantised weight, so that a model's outputs, not its speed, can
be studied. Scales, and the smallest values of "min", are numbers of 16 bits, as they would be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.errors import InputError

Kind = Literal["zero", "min", "sym"]
KINDS: tuple[Kind, ...] = ("zero", "min", "sym")
SCALE_BITS = 16  # a scale is stored in 16 bits, and so is a smallest value; a zero point in as many as a weight
# float16 ends here. Below its smallest normal number a scale loses digits, which is still nearer than that number would be.
SMALLEST_SCALE = 2.0**-24
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Grid:
    """
    Args:
        bits: per weight, 2 to 8.
        group_size: input columns that share a scale; None is all of a row (per output channel).
        kind: where the levels of a group lie.
            "zero": from its smallest to its largest entry, moved so that zero is a level (an integer zero point; the GPTQ paper,
                arXiv:2210.17323, section 4).
            "min": from its smallest to its largest entry; the smallest is stored, and zero need not be a level (GGML's Q4_1).
            "sym": the 2^bits − 1 multiples of the scale around zero that reach to the entry of largest size.

    Raises:
        InputError: bits or group_size out of range, or an unknown kind.
    """

    bits: int
    group_size: int | None = None
    kind: Kind = "zero"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not 2 <= self.bits <= 8:
            raise InputError(f"bits is {self.bits!r}; allowed: integers from 2 to 8")
        size = self.group_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InputError(f"group_size is {size!r}; allowed: None (per output channel), or an integer of at least 1")
        if self.kind not in KINDS:
            raise InputError(f"kind is {self.kind!r}; allowed: {', '.join(KINDS)}")

    @property
    def levels(self) -> int:
        return 2**self.bits - (self.kind == "sym")

    def width(self, columns: int) -> int:
        """Columns of a group in a matrix of so many.

        Raises:
            InputError: the groups do not come out even.
        """
        width = self.group_size or columns
        if columns % width != 0:
            fitting = [size for size in (32, 64, 96, 128, 192, 256) if columns % size == 0]
            raise InputError(
                f"group_size is {width}, which does not divide the {columns} columns of a weight; allowed: None"
                + "".join(f", {size}" for size in fitting)
            )
        return width

    def bits_per_weight(self, columns: int) -> float:
        """Scales, zero points and smallest values included."""
        beside = {"zero": SCALE_BITS + self.bits, "min": 2 * SCALE_BITS, "sym": SCALE_BITS}[self.kind]
        return self.bits + beside / self.width(columns)


@dataclass(frozen=True)
class GridWeight:
    """A weight on a grid.

    Args:
        levels: which level each entry has, shape (out, in), uint8.
        scales: the distance of two levels, shape (out, groups), float32 that a float16 can hold.
        zeros: the level that means 0, shape (out, groups), float32: an integer, but for "min" a fraction and maybe not a level.
        groups: the group of each column, shape (in,), int64.
        grid: bits, group size and kind.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    grid: Grid

    @property
    def minima(self) -> Tensor:
        """The value of level 0, shape (out, groups), float32; for "min" the number of 16 bits that is stored."""
        minima = -self.zeros * self.scales
        # Of the two roundings that the way through a zero point cost, none reaches the eleventh binary digit.
        return _sixteen_bits(minima) if self.grid.kind == "min" else minima

    def dequantised(self) -> Tensor:
        """The weight that a model computes with, shape (out, in), float32: (levels − zeros) · scales."""
        # A level times a scale of 11 binary digits is exact, so only one sum is rounded, and for "zero" and "sym" not even that.
        minima, scales = (values.index_select(1, self.groups) for values in (self.minima, self.scales))
        return torch.addcmul(minima, self.levels.float(), scales)


def fit(rows: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of each group, shape (..., width): two float32 tensors of shape (...).

    With "zero" and "sym", zero is always a level, so that a weight of 0 stays 0.
    """
    low, high = rows.amin(dim=-1), rows.amax(dim=-1)
    if grid.kind == "sym":
        half = grid.levels // 2
        scale = _scale(torch.maximum(high, -low) / half)
        return scale, torch.full_like(scale, half)
    if grid.kind == "zero":
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _scale((high - low) / (grid.levels - 1))
    if grid.kind == "min":
        return scale, -_sixteen_bits(low) / scale
    return scale, (-low / scale).round().clamp(0, grid.levels - 1)


def nearest(column: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """The level nearest to each entry; all of shape (out,), or broadcast against it."""
    return (column / scale).add_(zero).round_().clamp_(0, grid.levels - 1)


def round_to_nearest(weight: Tensor, grid: Grid) -> GridWeight:
    """RTN: each entry of a weight, shape (out, in), to its nearest level.

    Raises:
        InputError: the group size does not divide the columns.
    """
    weight = weight.detach().float()
    width = grid.width(weight.shape[1])
    rows = weight.unflatten(1, (-1, width))
    scales, zeros = fit(rows, grid)
    levels = nearest(rows, scales[..., None], zeros[..., None], grid).flatten(1)
    groups = torch.arange(weight.shape[1], device=weight.device) // width
    return GridWeight(levels.to(torch.uint8), scales, zeros, groups, grid)


def _scale(distance: Tensor) -> Tensor:
    """The distance of two levels as it is stored; never 0, also where all entries are equal."""
    distance = torch.where(distance > 0, distance, torch.ones_like(distance))
    return _sixteen_bits(distance.clamp(min=SMALLEST_SCALE))


def _sixteen_bits(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST, LARGEST).to(torch.float16).float()
