"""Rounding to the nearest of few levels, against values worked out by hand."""

import pytest
import torch

from specdec.errors import InputError
from specdec.grid import KINDS, Grid, fit, round_to_nearest


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


def test_the_smallest_value_by_hand():
    """2 bits from the smallest value on: 10, 11, 12, 13. Zero is no level; it would be number -10."""
    weight = torch.tensor([[10.0, 13.0, 11.4, 12.6], [-3.0, 3.0, 0.0, -1.2]])
    found = round_to_nearest(weight, Grid(2, kind="min"))
    assert found.scales.tolist() == [[1.0], [2.0]] and found.minima.tolist() == [[10.0], [-3.0]]
    assert found.zeros.tolist() == [[-10.0], [1.5]]
    assert found.levels.tolist() == [[0, 3, 1, 3], [0, 3, 2, 1]]
    assert found.dequantised().tolist() == [[10.0, 13.0, 11.0, 13.0], [-3.0, 3.0, 1.0, -1.0]]


def test_symmetric_levels_by_hand():
    """3 bits: -3..3 times the scale, stored as 0..6."""
    weight = torch.tensor([[-3.0, 0.4, 2.0, 0.6], [0.8, 6.0, -2.8, 0.0]])
    found = round_to_nearest(weight, Grid(3, kind="sym"))
    assert found.scales.tolist() == [[1.0], [2.0]] and found.zeros.tolist() == [[3.0], [3.0]]
    assert found.levels.tolist() == [[0, 3, 5, 4], [3, 6, 2, 3]]
    assert found.dequantised().tolist() == [[-3.0, 0.0, 2.0, 1.0], [0.0, 6.0, -2.0, 0.0]]


def test_a_scale_is_rounded_to_16_bits_before_levels_are_taken():
    """255 levels over 0..1 are 1/255 apart, 0.003921568…; the nearest float16 is 2056 · 2^-19 = 0.0039215087890625."""
    weight = torch.linspace(0, 1, 256)[None]
    found = round_to_nearest(weight, Grid(8))
    assert found.scales.item() == 2056 / 2**19
    assert torch.equal(found.dequantised(), torch.arange(256.0)[None] * (2056 / 2**19))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [1e-38, 1e-9, 3e-8, 1e-6, 1e-3, 1.0, 6e4])
def test_what_is_stored_fits_16_bits(kind, bits, size):
    weight = size * torch.randn(8, 64, generator=torch.Generator().manual_seed(bits)).clamp(-1, 1)
    found = round_to_nearest(weight, Grid(bits, 32, kind))
    for stored in [found.scales] + ([found.minima] if kind == "min" else []):
        assert torch.equal(stored.half().float(), stored) and bool(stored.isfinite().all())
    assert bool((found.scales > 0).all())
    if kind != "min":
        assert torch.equal(found.zeros, found.zeros.round()) and float(found.zeros.max()) < 2**bits
    error = (found.dequantised() - weight).abs()
    # Below 2^-14 a scale is a multiple of 2^-24, and the last level is off by up to 2^bits halves of it.
    assert float(error.max()) <= 2**-10 * size + float(found.scales.max()) + 2 ** (bits - 25)
    plain = (found.levels - found.zeros[:, found.groups]) * found.scales[:, found.groups]
    torch.testing.assert_close(found.dequantised(), plain, rtol=0, atol=1e-6 * size + 1e-38)


@pytest.mark.parametrize("kind", KINDS)
def test_what_16_bits_cannot_hold_is_brought_to_their_ends(kind):
    found = round_to_nearest(torch.tensor([[-1e30, 1e30], [0.0, 0.0], [1e-30, -1e-30]]), Grid(2, kind=kind))
    assert found.scales[0] == 65504 and found.scales[2] == 2**-24
    assert bool(found.dequantised().isfinite().all()) and float(found.dequantised()[1:].abs().max()) <= 2**-24


def q4_1_blocks(blocks, generator, *, offset=1.0):
    """Weights as GGML's Q4_1 holds them: d·q + m with d and m of 16 bits, both ends of the range in use, 32 to a block."""
    d = (torch.rand(blocks, 1, generator=generator) * 0.02 + 1e-4).half().float()
    m = (torch.randn(blocks, 1, generator=generator) * offset * d * 15).half().float()
    q = torch.randint(16, (blocks, 32), generator=generator)
    for block in q:
        first, second = torch.randperm(32, generator=generator)[:2]
        block[first], block[second] = 0, 15
    return d, m, q, d * q + m


@pytest.mark.parametrize("offset", [0.0, 0.5, 1.0, 30.0])
def test_a_weight_of_q4_1_blocks_comes_back_exactly(offset):
    d, m, q, values = q4_1_blocks(24 * 5, torch.Generator().manual_seed(3), offset=offset)
    weight = values.reshape(24, 160)
    found = round_to_nearest(weight, Grid(4, 32, "min"))
    assert torch.equal(found.levels, q.reshape(24, 160).to(torch.uint8))
    assert torch.equal(found.scales, d.reshape(24, 5)) and torch.equal(found.minima, m.reshape(24, 5))
    assert torch.equal(found.dequantised(), weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [None, 32])
def test_a_weight_on_a_grid_stays_where_it_is(kind, bits, group_size):
    grid = Grid(bits, group_size, kind)
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(bits))
    once = round_to_nearest(weight, grid)
    if kind == "zero":  # its ends may lie outside the levels, which then span less
        return
    twice = round_to_nearest(once.dequantised(), grid)
    assert torch.equal(once.levels, twice.levels) and torch.equal(once.dequantised(), twice.dequantised())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group_size", [None, 16, 32])
@pytest.mark.parametrize("kind", ["zero", "sym"])
def test_no_entry_is_farther_than_half_a_step_and_zero_stays_zero(bits, group_size, kind):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(bits))
    weight[3] = 0
    weight[:, 5] = 0
    found = round_to_nearest(weight, Grid(bits, group_size, kind))
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


@pytest.mark.parametrize("bits", range(2, 9))
def test_no_entry_is_farther_than_half_a_step_from_levels_that_reach_all_of_them(bits):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(bits))
    for kind in ("min", "sym"):
        found = round_to_nearest(weight, Grid(bits, 16, kind))
        # Scale and minimum are rounded by up to one part in 2048; the last of 2^bits levels feels most of it.
        slack = 0.501 + (2**bits + 16) / 2**11
        assert bool(((found.dequantised() - weight).abs() <= slack * found.scales[:, found.groups]).all())


def test_one_sign_only():
    for sign in (1, -1):
        weight = sign * torch.tensor([[1.0, 2.0, 3.0]])
        scale, zero = fit(weight, Grid(2))
        assert scale.tolist() == [1.0] and zero.tolist() == [0.0 if sign == 1 else 3.0]


@pytest.mark.parametrize(
    ("grid", "bits"),
    [
        (Grid(4), 4 + 20 / 576),
        (Grid(4, 32), 4 + 20 / 32),
        (Grid(3, 64), 3 + 19 / 64),
        (Grid(8, 192), 8 + 24 / 192),
        (Grid(4, 32, "min"), 5),
        (Grid(2, None, "min"), 2 + 32 / 576),
        (Grid(4, 32, "sym"), 4.5),
        (Grid(8, None, "sym"), 8 + 16 / 576),
    ],
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


@pytest.mark.parametrize("kind", ["max", None, 0])
def test_kinds_that_are_none(kind):
    with pytest.raises(InputError, match=r"kind is .*; allowed: zero, min, sym$"):
        Grid(4, kind=kind)
