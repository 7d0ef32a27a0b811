"""Weights on a grid of few bits: round to nearest (RTN), and what such a weight costs.

A weight matrix, shape (out, in), is cut into groups of neighbouring input columns. Each row of a group has 2^bits evenly
spaced levels, from its smallest to its largest entry (asymmetric min-max, the grid of the GPTQ paper, arXiv:2210.17323,
section 4). What is computed with is the dequantised weight, so that a model's outputs, not its speed, can be studied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import InputError

SCALE_BITS = 16  # a scale is stored in 16 bits, a zero point in as many as a weight


@dataclass(frozen=True)
class Grid:
    """
    Args:
        bits: per weight, 2 to 8.
        group_size: input columns that share a scale; None is all of a row (per output channel).

    Raises:
        InputError: bits or group_size out of range.
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not 2 <= self.bits <= 8:
            raise InputError(f"bits is {self.bits!r}; allowed: integers from 2 to 8")
        size = self.group_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InputError(f"group_size is {size!r}; allowed: None (per output channel), or an integer of at least 1")

    @property
    def levels(self) -> int:
        return 2**self.bits

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
        """Scales and zero points included."""
        return self.bits + (SCALE_BITS + self.bits) / self.width(columns)


@dataclass(frozen=True)
class GridWeight:
    """A weight on a grid.

    Args:
        levels: which level each entry has, shape (out, in), uint8.
        scales: the distance of two levels, shape (out, groups), float32.
        zeros: the level that means 0, shape (out, groups), uint8.
        groups: the group of each column, shape (in,), int64; GPTQ's order of columns may mix them.
        grid: bits and group size.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    grid: Grid

    def dequantised(self) -> Tensor:
        """The weight that a model computes with, shape (out, in), float32."""
        return (self.levels.float() - self.zeros.float()[:, self.groups]) * self.scales[:, self.groups]


def fit(rows: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of one group, shape (out, width): two float32 tensors of shape (out,).

    Zero is always a level, so that a weight of 0 stays 0.
    """
    low, high = rows.amin(dim=1).clamp(max=0), rows.amax(dim=1).clamp(min=0)
    scale = (high - low) / (grid.levels - 1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
    return scale, (-low / scale).round().clamp(0, grid.levels - 1)


def nearest(column: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """The level nearest to each entry; all of shape (out,), or broadcast against it."""
    return (column / scale + zero).round().clamp(0, grid.levels - 1)


def round_to_nearest(weight: Tensor, grid: Grid) -> GridWeight:
    """RTN: each entry of a weight, shape (out, in), to its nearest level.

    Raises:
        InputError: the group size does not divide the columns.
    """
    weight = weight.detach().float()
    width = grid.width(weight.shape[1])
    fitted = [fit(group, grid) for group in weight.split(width, dim=1)]
    scales, zeros = (torch.stack(values, dim=1) for values in zip(*fitted, strict=True))
    groups = torch.arange(weight.shape[1], device=weight.device) // width
    levels = nearest(weight, scales[:, groups], zeros[:, groups], grid)
    return GridWeight(levels.to(torch.uint8), scales, zeros.to(torch.uint8), groups, grid)
