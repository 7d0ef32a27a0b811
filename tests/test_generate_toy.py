"""The loop on the pair that the toy cells measure: greedy text is the target's own, bit for bit, and draws follow the seed."""

import random
import warnings

import pytest
import torch
from stand_ins import disagreeing

from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.models import random_prompt

FILTERS = [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 100_000}]


def prompts(model, count, length=12):
    return [random_prompt(model, length, torch.Generator().manual_seed(seed)) for seed in range(count)]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def greedy_texts(toy_pair):
    target, _ = toy_pair
    return [(prompt, autoregressive_generate(target, prompt, max_new_tokens=40)) for prompt in prompts(target, 3)]


@pytest.mark.parametrize("k", range(1, 9))
def test_speculative_greedy_text_is_the_plain_one(toy_pair, greedy_texts, k):
    target, draft = toy_pair
    drafters = [ModelDrafter(draft), ModelDrafter(target), ModelDrafter(disagreeing(target)), PromptLookupDrafter()]
    for drafter in drafters:
        for prompt, expected in greedy_texts:
            result = speculative_generate(target, prompt, drafter=drafter, k=k, max_new_tokens=40)
            assert torch.equal(result.sequences, expected.sequences)


def test_plain_greedy_text_is_that_of_transformers(toy_pair, greedy_texts):
    target, _ = toy_pair
    for prompt, ours in greedy_texts:
        mask = torch.ones_like(prompt)
        options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(target.generate(prompt, **options), ours.sequences)


@pytest.mark.parametrize("k", [1, 4])
def test_f02_the_draft_is_accepted_sometimes_and_refused_sometimes(toy_pair, k):
    target, draft = toy_pair
    for temperature in (0.2, 1.0):
        options = {"temperature": temperature, "generator": seeded(0), "max_new_tokens": 100}
        stats = speculative_generate(target, prompts(target, 1)[0], drafter=ModelDrafter(draft), k=k, **options).stats
        assert 0 < stats.accepted < stats.proposed
        assert abs(stats.alpha - stats.alpha_overlap) < 0.15


@pytest.mark.parametrize("temperature", [1e-4, 0.05, 1.0, 5.0])
def test_a02_f04_a_target_that_drafts_for_itself_is_accepted_at_any_temperature(toy_pair, temperature):
    """Rounding alone sets one pass over five tokens apart from five passes; nothing becomes NaN, no warning is raised."""
    target, _ = toy_pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"temperature": temperature, "generator": seeded(0), "max_new_tokens": 200}
        stats = speculative_generate(target, prompts(target, 1)[0], drafter=ModelDrafter(target), k=4, **options).stats
    assert stats.new_tokens == 200
    assert stats.alpha >= 0.99
    assert 0.99 <= stats.alpha_overlap <= 1
    assert max(overlap for r in stats.rounds for overlap in r.overlaps) <= 1  # a probability


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-4])
def test_a03_temperature_0_and_almost_0_are_greedy_whatever_the_filter_and_seed(
    toy_pair, greedy_texts, temperature, filters
):
    target, draft = toy_pair
    prompt, greedy = greedy_texts[0]
    for seed in range(3):
        options = {"temperature": temperature, "generator": seeded(seed), "max_new_tokens": 30, **filters}
        speculative = speculative_generate(target, prompt, drafter=ModelDrafter(draft), k=4, **options)
        assert speculative.new_tokens == greedy.new_tokens[:30]
        assert min(r.accepted for r in speculative.stats.rounds) >= 0
        assert autoregressive_generate(target, prompt, **options).new_tokens == greedy.new_tokens[:30]


def sampled(toy_pair, seed, prompt, drafter=None):
    target, draft = toy_pair
    drafter = drafter or ModelDrafter(draft)
    options = {"temperature": 1.0, "generator": seeded(seed), "max_new_tokens": 48}
    result = speculative_generate(target, prompt, drafter=drafter, k=4, **options)
    return result.new_tokens, result.stats


def test_a04_f05_the_seed_alone_decides_text_and_rounds(toy_pair):
    first, second = prompts(toy_pair[0], 2)
    expected = sampled(toy_pair, 0, first)
    torch.rand(3), random.random()
    drafter = ModelDrafter(toy_pair[1])
    sampled(toy_pair, 0, second, drafter)  # another text through the same drafter before
    assert sampled(toy_pair, 0, first, drafter) == expected
    assert len({sampled(toy_pair, seed, first)[0] for seed in range(10)}) >= 9
