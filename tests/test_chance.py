"""One generator drives every draw, nothing impossible is ever drawn, and nothing global is touched."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from laws import g_statistic

from specdec.chance import GeneratorChooser


def seeded(seed):
    return GeneratorChooser(torch.Generator().manual_seed(seed))


def test_f03_a_coin_of_probability_0_never_falls_and_of_1_always():
    chooser = seeded(0)
    assert not any(chooser.bernoulli(0.0) for _ in range(500))
    assert all(chooser.bernoulli(1.0) for _ in range(500))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53, 1.0])  # 1.0: as if u * total were rounded up
def test_f03_an_index_of_weight_0_is_never_drawn(uniform, monkeypatch):
    chooser = seeded(0)
    monkeypatch.setattr(chooser, "_uniform", lambda: uniform)
    assert not chooser.bernoulli(0.0)
    assert chooser.categorical(torch.tensor([0.0, 0.0, 3.0, 0.0])) == 2
    drawn = chooser.categorical(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
    assert drawn == (1 if uniform < 0.5 else 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_follow_weights_that_need_not_sum_to_1(dtype):
    weights = torch.tensor([1.0, 0.0, 5.0, 2.0], dtype=dtype)
    chooser = seeded(1)
    counts = Counter(chooser.categorical(weights) for _ in range(4000))
    g, limit = g_statistic(counts, {0: 1 / 8, 1: 0.0, 2: 5 / 8, 3: 2 / 8})
    assert g < limit
    coins = Counter(chooser.bernoulli(0.3) for _ in range(4000))
    g, limit = g_statistic(coins, {True: 0.3, False: 0.7})
    assert g < limit


def draws(chooser):
    return [chooser.categorical(torch.ones(1000)) for _ in range(5)] + [chooser.bernoulli(0.5) for _ in range(20)]


def test_the_seed_decides_every_draw():
    assert draws(seeded(3)) == draws(seeded(3))
    assert draws(seeded(3)) != draws(seeded(4))


def test_without_a_generator_every_chooser_draws_anew():
    assert draws(GeneratorChooser()) != draws(GeneratorChooser())


def test_global_random_state_is_neither_read_nor_changed():
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    draws(seeded(0))
    draws(GeneratorChooser())
    assert state() == before
