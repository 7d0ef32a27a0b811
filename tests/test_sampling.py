"""One function makes laws of logits, for greedy and sampled decoding alike."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.errors import InputError
from specdec.sampling import SamplingConfig, to_probs

FILTERS = [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 10_000}, {"top_k": 3, "top_p": 0.5}]


def random_logits(*shape, seed=0, dtype=torch.float32):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("top_p", [None, 0.1, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50, 10_000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_f06_equals_the_warpers_of_transformers_one_after_the_other(temperature, top_k, top_p):
    logits = random_logits(20, 50)
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p is not None:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    wanted = wanted.softmax(dim=-1)
    probs = to_probs(logits, SamplingConfig(temperature, top_k, top_p))
    assert torch.equal(probs > 0, wanted > 0)
    torch.testing.assert_close(probs, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("filters", FILTERS)
def test_a03_temperature_0_is_one_hot_at_the_first_of_the_best(filters):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -5.0, -9.0, -5.0]])
    probs = to_probs(logits, SamplingConfig(0, **filters))
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-8, 1e-4])
def test_a03_a_tiny_temperature_is_finite_and_greedy(temperature, filters):
    logits = 100 * random_logits(50, 30)
    greedy = to_probs(logits, SamplingConfig(0))
    assert torch.equal(to_probs(logits, SamplingConfig(temperature, **filters)), greedy)


def test_a_huge_temperature_is_uniform():
    probs = to_probs(random_logits(8), SamplingConfig(1e300))
    torch.testing.assert_close(probs, torch.full((8,), 1 / 8))


def test_top_k_keeps_what_ties_with_the_last_kept():
    logits = torch.tensor([1.0, 2.0, 3.0, 2.0])
    probs = to_probs(logits, SamplingConfig(1.0, top_k=2))
    assert (probs > 0).tolist() == [False, True, True, True]


def test_a03_top_k_of_the_vocabulary_or_more_changes_nothing():
    logits = random_logits(6)
    free = to_probs(logits, SamplingConfig(1.0))
    for top_k in (6, 7, 10**9):
        assert torch.equal(to_probs(logits, SamplingConfig(1.0, top_k=top_k)), free)


def test_top_p_keeps_the_token_that_crosses_the_limit():
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    probs = to_probs(logits, SamplingConfig(1.0, top_p=0.6))
    torch.testing.assert_close(probs, torch.tensor([0.0, 0.5, 0.0, 0.3]) / 0.8)
    one_token = to_probs(logits, SamplingConfig(1.0, top_p=1e-9))
    assert one_token.tolist() == [0, 1, 0, 0]


def test_top_p_keeps_no_token_more_where_the_mass_is_reached_exactly():
    for top_p, kept in ((0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        assert int((to_probs(torch.zeros(4), SamplingConfig(1.0, top_p=top_p)) > 0).sum()) == kept


def test_f06_top_p_counts_the_mass_that_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    probs = to_probs(logits, SamplingConfig(1.0, top_k=2, top_p=0.5))  # after top-k the first holds 0.57
    assert probs.tolist() == [1, 0, 0, 0]


def test_float64_is_kept_and_half_precision_is_widened():
    logits = random_logits(5, dtype=torch.float64)
    for config in (SamplingConfig(0.0), SamplingConfig(0.7, top_k=4, top_p=0.9)):
        assert to_probs(logits, config).dtype == torch.float64
        assert to_probs(logits.bfloat16(), config).dtype == torch.float32
        assert to_probs(logits.half(), config).dtype == torch.float32
    exact = [math.exp(x / 0.7) for x in logits.tolist()]
    wanted = torch.tensor([x / sum(exact) for x in exact], dtype=torch.float64)
    torch.testing.assert_close(to_probs(logits, SamplingConfig(0.7)), wanted, rtol=1e-14, atol=0)


def test_logits_are_left_as_they_were():
    logits = random_logits(4, 9)
    before = logits.clone()
    to_probs(logits, SamplingConfig(0.5, top_k=3, top_p=0.8))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", v) for v in (-1, -1e-9, math.nan, math.inf, True, "1", None)]
    + [("top_k", v) for v in (0, -3, 2.5, True, "four", math.nan)]
    + [("top_p", v) for v in (0, -0.1, 1.5, math.nan, True, "0.9")],
)
def test_a03_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=rf"{name} is .*allowed: ") as refusal:
        SamplingConfig(**{name: value})
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [math.inf, 0.0, 1.0], [-math.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(row, temperature):
    with pytest.raises(InputError, match="logits hold NaN or infinity"):
        to_probs(torch.tensor([[0.0, 1.0, 2.0], row]), SamplingConfig(temperature))


def test_impossible_tokens_are_none():
    assert to_probs(torch.tensor([-math.inf, 2.0, -math.inf]), SamplingConfig(1.0)).tolist() == [0, 1, 0]
