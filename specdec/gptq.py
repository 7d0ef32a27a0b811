"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): round a weight so that the layer's output, not the weight, stays close.

For inputs X, shape (in, n), the error of a row w is (w − ŵ) H (w − ŵ)ᵀ with H = X Xᵀ. Columns are rounded one after another;
what each loses is made up for by the columns that are still free (equation 2, with the Cholesky form of section 3.3, step 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import InputError
from specdec.grid import Grid, GridWeight, fit, nearest

DAMPING = 0.01  # of H's mean diagonal, added to it (section 3.3)
BLOCK = 128  # columns whose updates of the rest are gathered; changes the speed, not the result


class Hessian:
    """Sums X Xᵀ over the inputs of a layer, and counts them.

    Args:
        columns: the layer's input features, in.
    """

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.sum = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.rows = 0

    def add(self, inputs: Tensor) -> None:
        """Inputs of shape (..., in), as the layer gets them."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        self.sum += rows.T @ rows
        self.rows += len(rows)

    def mean(self) -> Tensor:
        """X Xᵀ / n, shape (in, in): its scale does not matter, and stays readable.

        Raises:
            InputError: nothing was added.
        """
        if self.rows == 0:
            raise InputError("GPTQ has seen no input of the layer; allowed: at least one row of calibration data")
        return self.sum / self.rows


def gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, *, act_order: bool = True, damping: float = DAMPING
) -> GridWeight:
    """Quantise a weight, shape (out, in), for inputs with H = `hessian`, shape (in, in).

    Args:
        act_order: begin with the columns of the largest inputs, while all others can still make up for them. Groups keep
            their columns, so scales are those of the uncompensated weight then; else each group is fitted when its turn comes.
        damping: share of H's mean diagonal added to the diagonal.

    Raises:
        InputError: shapes that do not fit, a damping that is not positive, or a group size that does not divide the columns.
    """
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise InputError(
            f"hessian has shape {tuple(hessian.shape)}; allowed: ({columns}, {columns}), as the weight's inputs"
        )
    if not damping > 0:
        raise InputError(f"damping is {damping!r}; allowed: a number above 0")
    weight, hessian = weight.detach().float().clone(), hessian.float().clone()
    width = grid.width(columns)
    dead = hessian.diagonal() == 0  # inputs that are always 0 tell nothing of their weights
    hessian.diagonal()[dead] = 1
    weight[:, dead] = 0
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(columns, device=weight.device)
    groups = torch.arange(columns, device=weight.device) // width
    scales, zeros = fit(weight.unflatten(1, (-1, width)), grid)
    weight, groups = weight[:, order], groups[order]
    factor = _inverse_factor(hessian[order][:, order], damping)
    levels = torch.zeros_like(weight)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.zeros(len(weight), end - start, device=weight.device)
        for j in range(start, end):
            group = int(groups[j])
            if not act_order and j % width == 0:
                scales[:, group], zeros[:, group] = fit(_compensated(weight, errors, factor, start, j, width), grid)
            scale, zero = scales[:, group], zeros[:, group]
            levels[:, j] = nearest(weight[:, j], scale, zero, grid)
            error = (weight[:, j] - (levels[:, j] - zero) * scale) / factor[j, j]
            weight[:, j:end] -= error[:, None] * factor[j, j:end]
            errors[:, j - start] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    back = order.argsort()
    return GridWeight(levels[:, back].to(torch.uint8), scales, zeros, groups[back], grid)


def _compensated(weight: Tensor, errors: Tensor, factor: Tensor, start: int, j: int, width: int) -> Tensor:
    """The columns of the group that begins at j with all that earlier columns did to them; a group may reach beyond a block."""
    end = start + errors.shape[1]
    rows = weight[:, j : j + width].clone()
    if j + width > end:
        rows[:, end - j :] -= errors[:, : j - start] @ factor[start:j, end : j + width]
    return rows


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with H⁻¹ = Uᵀ U: its row j, over U_jj, is how column j's error spreads over the later ones."""
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), device=hessian.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True)
