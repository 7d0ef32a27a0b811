"""GPTQ against direct solutions, and against rounding to the nearest on layers of real shape."""

import itertools

import pytest
import torch
from stand_ins import tiny_gpt2, tiny_llama
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec import gptq as module
from specdec.errors import InputError
from specdec.gptq import Hessian, gptq
from specdec.grid import KINDS, Grid, fit, round_to_nearest


def inputs_of(columns, rows=512, seed=0):
    """Correlated inputs, as layers have them: a few directions carry most."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -2, columns)[:, None]
    return torch.randn(rows, columns, generator=generator) @ mixing


def hessian_of(inputs):
    hessian = Hessian(inputs.shape[-1])
    hessian.add(inputs)
    return hessian.mean()


def output_error(weight, found, inputs):
    return float((inputs @ (weight - found.dequantised()).T).norm())


def test_the_hessian_is_the_mean_of_the_outer_products():
    inputs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(3)
    for part in inputs:
        hessian.add(part)
    rows = inputs.reshape(-1, 3)
    assert torch.allclose(hessian.mean(), sum(torch.outer(row, row) for row in rows) / 10, atol=1e-6)
    with pytest.raises(InputError, match="has seen no input"):
        Hessian(3).mean()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_two_columns_are_solved_directly(act_order, seed, kind):
    """The first column goes to its nearest level; the best the second can do for it is w₂ + (w₁ − ŵ₁) H₁₂ / H₂₂, rounded."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 2, generator=generator)
    hessian = hessian_of(torch.randn(50, 2, generator=generator) @ torch.randn(2, 2, generator=generator))
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(2)
    grid = Grid(3, kind=kind)
    scale, zero = fit(weight, grid)
    first = int(damped[1, 1] > damped[0, 0]) if act_order else 0
    second = 1 - first

    def rounded(column):
        return ((column / scale + zero).round().clamp(0, grid.levels - 1) - zero) * scale

    want = torch.empty_like(weight)
    want[:, first] = rounded(weight[:, first])
    lost = weight[:, first] - want[:, first]
    want[:, second] = rounded(weight[:, second] + lost * damped[0, 1] / damped[second, second])
    assert torch.allclose(gptq(weight, hessian, grid, act_order=act_order).dequantised(), want, atol=1e-5)


def test_independent_inputs_leave_nothing_to_make_up_for():
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for order, kind in itertools.product((False, True), KINDS):
        grid = Grid(4, 16, kind)
        found, nearest = (
            gptq(weight, torch.diag(torch.rand(32) + 0.5), grid, act_order=order),
            round_to_nearest(weight, grid),
        )
        assert torch.equal(found.levels, nearest.levels) and torch.equal(found.dequantised(), nearest.dequantised())
        assert torch.equal(found.groups, nearest.groups)


def test_no_rounding_of_three_weights_is_much_better():
    """Against all 4³ choices of levels, row by row: greedy, but near the best, and never worse than twice it in the mean."""
    generator = torch.Generator().manual_seed(2)
    weight, inputs = torch.randn(20, 3, generator=generator), inputs_of(3, 100, 3)
    hessian, grid = hessian_of(inputs), Grid(2)
    found = gptq(weight, hessian, grid)
    scale, zero = fit(weight, grid)
    choices = torch.tensor(list(itertools.product(range(4), repeat=3)), dtype=torch.float32)
    errors = []
    for row in range(20):
        lost = weight[row] - (choices - zero[row]) * scale[row]
        errors.append(float(torch.einsum("ni,ij,nj->n", lost, hessian, lost).min()))
    lost = weight - found.dequantised()
    ours = torch.einsum("ni,ij,nj->n", lost, hessian, lost)
    assert bool((ours >= torch.tensor(errors) - 1e-5).all())
    nearest = weight - round_to_nearest(weight, grid).dequantised()
    assert float(ours.mean()) < float(torch.einsum("ni,ij,nj->n", nearest, hessian, nearest).mean())


@pytest.mark.parametrize(
    "grid",
    [
        Grid(4),
        Grid(3),
        Grid(4, 32),
        Grid(3, 48),
        Grid(2, 96),
        Grid(4, 32, "min"),
        Grid(3, 48, "sym"),
        Grid(4, kind="sym"),
    ],
    ids=str,
)
@pytest.mark.parametrize("act_order", [False, True])
def test_the_output_is_nearer_than_by_rounding_to_the_nearest(grid, act_order):
    columns = 288
    for seed in range(3):
        inputs = inputs_of(columns, seed=seed)
        weight = torch.randn(16, columns, generator=torch.Generator().manual_seed(seed))
        ours = output_error(weight, gptq(weight, hessian_of(inputs), grid, act_order=act_order), inputs)
        assert ours < 0.8 * output_error(weight, round_to_nearest(weight, grid), inputs)


@pytest.mark.parametrize("grid", [Grid(4), Grid(4, 48)])
def test_blocks_change_the_speed_only(grid, monkeypatch):
    """Also where a group reaches from one block into the next: 128 is no multiple of 48."""
    weight, hessian = torch.randn(8, 288, generator=torch.Generator().manual_seed(0)), hessian_of(inputs_of(288))
    for act_order in (False, True):
        found = gptq(weight, hessian, grid, act_order=act_order)
        for block in (1, 32, 1000):
            monkeypatch.setattr(module, "BLOCK", block)
            other = gptq(weight, hessian, grid, act_order=act_order)
            # Sums in another order: an entry half-way between two levels may fall to the other side.
            assert float((other.levels != found.levels).float().mean()) < 0.01
        monkeypatch.undo()


def test_act_order_helps_where_inputs_differ_in_size():
    """Columns of large inputs are rounded while the others can still make up for them."""
    inputs, weight = inputs_of(96), torch.randn(32, 96, generator=torch.Generator().manual_seed(4))
    inputs = inputs[:, torch.randperm(96, generator=torch.Generator().manual_seed(5))]
    hessian = hessian_of(inputs)
    errors = [output_error(weight, gptq(weight, hessian, Grid(3), act_order=order), inputs) for order in (True, False)]
    assert errors[0] < errors[1]


def test_inputs_that_are_always_zero():
    inputs = inputs_of(32)
    inputs[:, [3, 17]] = 0
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    found = gptq(weight, hessian_of(inputs), Grid(4))
    assert bool(torch.isfinite(found.dequantised()).all()) and bool((found.dequantised()[:, [3, 17]] == 0).all())
    assert output_error(weight, found, inputs) < output_error(weight, round_to_nearest(weight, Grid(4)), inputs)


def test_the_arguments_are_left_alone():
    weight, hessian = torch.randn(4, 32), hessian_of(inputs_of(32))
    before = weight.clone(), hessian.clone()
    gptq(weight, hessian, Grid(4))
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gpt2()], ids=["llama", "gpt2"])
def test_every_layer_of_a_model_is_nearer(model):
    """With the inputs that its layers get from random tokens."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and n != "lm_head"}
    weights = {n: m.weight.detach().T if isinstance(m, Conv1D) else m.weight.detach() for n, m in layers.items()}
    seen = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0].detach()))
    with torch.inference_mode():
        model(torch.randint(40, (8, 64), generator=torch.Generator().manual_seed(0)))
    for name, weight in weights.items():
        inputs = torch.cat(seen[name]).reshape(-1, weight.shape[1])
        ours = output_error(weight, gptq(weight, hessian_of(inputs), Grid(3)), inputs)
        assert ours < output_error(weight, round_to_nearest(weight, Grid(3)), inputs), name


def test_what_does_not_fit_is_refused():
    weight = torch.zeros(4, 32)
    with pytest.raises(InputError, match=r"hessian has shape \(16, 16\); allowed: \(32, 32\)"):
        gptq(weight, torch.eye(16), Grid(4))
    with pytest.raises(InputError, match="damping is 0; allowed: a number above 0"):
        gptq(weight, torch.eye(32), Grid(4), damping=0)
    with pytest.raises(InputError, match="group_size is 5"):
        gptq(weight, torch.eye(32), Grid(4, 5))
