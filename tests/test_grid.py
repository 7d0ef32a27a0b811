"""Rounding to the nearest of few levels, against values worked out by hand."""

import pytest
import torch

from specdec.errors import InputError
from specdec.grid import Grid, fit, round_to_nearest


def test_by_hand():
    """2 bits, levels 0..3. Row 1 spans -1..2: a step is 1, zero is level 1. Row 2 spans 0..3, for 0 is always within."""
    weight = torch.tensor([[-1.0, 0.4, 2.0, 0.6], [3.0, 1.6, 1.4, 0.2]])
    found = round_to_nearest(weight, Grid(2))
    assert found.scales.tolist() == [[1.0], [1.0]] and found.zeros.tolist() == [[1], [0]]
    assert found.levels.tolist() == [[0, 1, 3, 2], [3, 2, 1, 0]]
    assert found.dequantised().tolist() == [[-1.0, 0.0, 2.0, 1.0], [3.0, 2.0, 1.0, 0.0]]


def test_groups_by_hand():
    """Each pair of columns has its own scale."""
    weight = torch.tensor([[0.0, 3.0, -30.0, 0.0]])
    found = round_to_nearest(weight, Grid(2, group_size=2))
    assert found.scales.tolist() == [[1.0, 10.0]] and found.zeros.tolist() == [[0, 3]]
    assert found.groups.tolist() == [0, 0, 1, 1]
    assert torch.equal(found.dequantised(), weight)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group_size", [None, 16, 32])
def test_no_entry_is_farther_than_half_a_step_and_zero_stays_zero(bits, group_size):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(bits))
    weight[3] = 0
    weight[:, 5] = 0
    found = round_to_nearest(weight, Grid(bits, group_size))
    assert int(found.levels.max()) <= 2**bits - 1
    step = found.scales[:, found.groups]
    # The zero point is rounded, so the ends of a row may lie another half step outside the levels.
    assert bool(((found.dequantised() - weight).abs() <= 1.0001 * step).all())
    assert float(((found.dequantised() - weight).abs() / step).median()) < 0.5
    assert bool((found.dequantised()[weight == 0] == 0).all())


def test_more_bits_and_smaller_groups_are_nearer():
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    errors = [float((round_to_nearest(weight, Grid(bits)).dequantised() - weight).norm()) for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02 * errors[0]
    errors = [float((round_to_nearest(weight, Grid(4, size)).dequantised() - weight).norm()) for size in (None, 48, 16)]
    assert errors == sorted(errors, reverse=True)


def test_one_sign_only():
    for sign in (1, -1):
        weight = sign * torch.tensor([[1.0, 2.0, 3.0]])
        scale, zero = fit(weight, Grid(2))
        assert scale.tolist() == [1.0] and zero.tolist() == [0.0 if sign == 1 else 3.0]


@pytest.mark.parametrize(
    ("grid", "bits"),
    [(Grid(4), 4 + 20 / 576), (Grid(4, 32), 4 + 20 / 32), (Grid(3, 64), 3 + 19 / 64), (Grid(8, 192), 8 + 24 / 192)],
)
def test_bits_per_weight_count_scales_and_zero_points(grid, bits):
    assert grid.bits_per_weight(576) == bits


def test_groups_that_do_not_come_out_even_are_refused_with_those_that_would():
    """576, the width of SmolLM2-135M, is 4.5 times 128."""
    with pytest.raises(InputError, match=r"group_size is 128, .* 576 columns .*; allowed: None, 32, 64, 96, 192$"):
        round_to_nearest(torch.zeros(4, 576), Grid(4, 128))
    with pytest.raises(InputError, match=r"allowed: None$"):
        Grid(4, 2).bits_per_weight(7)


@pytest.mark.parametrize("bits", [1, 9, 4.0, True, None, "4"])
def test_bits_out_of_range(bits):
    with pytest.raises(InputError, match=r"bits is .*; allowed: integers from 2 to 8"):
        Grid(bits)


@pytest.mark.parametrize("group_size", [0, -1, 32.0, True, "32"])
def test_group_sizes_that_are_none(group_size):
    with pytest.raises(InputError, match=r"group_size is .*; allowed: None"):
        Grid(4, group_size)
