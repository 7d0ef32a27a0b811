"""Hugging Face's `generate` with the same draft, and our loop on other kernels than transformers'."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from stand_ins import Spy, disagreeing, nearby, tiny_gpt2, tiny_llama

from pipeline import methods, timed
from pipeline.machine import run_with
from pipeline.methods import Setting, TextPrompt, assisted_method, on_kernels, own_method
from pipeline.timed import compare
from specdec import memory
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate
from specdec.llama import LlamaDecoder
from specdec.sampling import SamplingConfig
from specdec.stats import AcceptanceStats

GREEDY = Setting(3, SamplingConfig(), max_new_tokens=10, end_tokens=[], seed=0, runs=2, warmup=1)
SAMPLED = replace(GREEDY, sampling=SamplingConfig(1.0))


def prompt_of(length, seed):
    return TextPrompt(seed, "qa", torch.randint(40, (1, length), generator=torch.Generator().manual_seed(seed)))


PROMPTS = [prompt_of(5, 0), prompt_of(9, 1), prompt_of(2, 2)]


@pytest.fixture(scope="module")
def target():
    return tiny_gpt2()


def plain(model, prompt):
    return autoregressive_generate(model, prompt.input_ids, max_new_tokens=10).new_tokens


def counted(model):
    """Notes how many tokens each forward of the model feeds."""
    fed = []

    def hook(module, arguments, options):
        fed.append((arguments[0] if arguments else options["input_ids"]).shape[1])

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return fed


# generate with the draft


@pytest.mark.parametrize("drafter", [lambda t: ModelDrafter(nearby(t, 0.2)), lambda t: PromptLookupDrafter()])
def test_its_greedy_tokens_are_ours_and_the_first_rounds_come_with_the_prompt(target, drafter):
    method = assisted_method(target, drafter(target), GREEDY)
    for prompt in PROMPTS:
        outcome = method(prompt)
        assert outcome.new_tokens == plain(target, prompt)
        assert outcome.run.new_tokens == 10 and 10 - 4 <= outcome.run.decoded < 10
        assert outcome.stats == AcceptanceStats()


def test_each_round_drafts_k_tokens_whatever_became_of_the_last(target):
    """Hugging Face's own schedule drafts more after a full acceptance, and fewer after a rejection."""
    for draft, rounds in ((nearby(target, 0.0), [4, 4, 2]), (disagreeing(target), [1] * 10)):
        ours, theirs = nearby(target, 0.0), counted(draft)
        verified = counted(ours)
        outcome = assisted_method(ours, ModelDrafter(draft), GREEDY)(PROMPTS[0])
        drafted = [min(3, 10 - sum(rounds[:i]) - 1) for i in range(len(rounds))]
        assert verified == [5 + drafted[0], *(n + 1 for n in drafted[1:])]
        assert len(theirs) == sum(drafted)
        assert outcome.run.decoded == 10 - rounds[0]


@pytest.mark.parametrize("setting", [GREEDY, replace(GREEDY, end_tokens=[39, 0])], ids=["endless", "end tokens"])
def test_the_draft_reads_all_of_the_prompt(setting):
    """transformers takes what stands in a prompt for padding if it is the pad token, and the draft would not see it."""
    target = tiny_llama()
    prompt = TextPrompt(0, "", torch.tensor([[4, 39, 13, 0, 3]]))
    outcome = assisted_method(target, ModelDrafter(nearby(target, 0.0)), replace(setting, k=9))(prompt)
    assert outcome.run.decoded == 0 and len(outcome.new_tokens) > 1  # all accepted in the first round


def test_k_and_the_ngrams_of_our_lookup_are_those_of_theirs():
    asked = {}

    def generate(ids, *, streamer, **options):
        asked.update(options)
        for part in (ids, torch.tensor([1, 2]), torch.tensor([3])):
            streamer.put(part)
        streamer.end()
        return torch.cat([ids[0], torch.tensor([1, 2, 3])])[None]

    model = SimpleNamespace(device=torch.device("cpu"), generate=generate)
    outcome = assisted_method(model, PromptLookupDrafter(5), replace(GREEDY, k=7))(PROMPTS[0])
    assert (asked["prompt_lookup_num_tokens"], asked["max_matching_ngram_size"]) == (7, 5)
    assert "assistant_model" not in asked
    assert (outcome.new_tokens, outcome.run.decoded, outcome.run.new_tokens) == ((1, 2, 3), 1, 3)


def test_the_drafts_own_configuration_is_as_it_was(target, monkeypatch):
    draft = nearby(target, 0.2)
    draft.generation_config.num_assistant_tokens = 17
    seen, before = [], draft.generation_config.to_dict()
    forward = target.generate

    def looked(*arguments, **options):
        config = draft.generation_config
        seen.append(
            (config.num_assistant_tokens, config.num_assistant_tokens_schedule, config.assistant_confidence_threshold)
        )
        return forward(*arguments, **options)

    monkeypatch.setattr(target, "generate", looked)
    assisted_method(target, ModelDrafter(draft), GREEDY)(PROMPTS[0])
    assisted_method(target, ModelDrafter(draft, 0.4), GREEDY)(PROMPTS[0])
    assert seen == [(3, "constant", 0.0), (3, "constant", 0.4)]
    assert draft.generation_config.to_dict() == before
    monkeypatch.setattr(target, "generate", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        assisted_method(target, ModelDrafter(draft), GREEDY)(PROMPTS[0])
    assert draft.generation_config.to_dict() == before


def test_its_draws_are_repeatable_and_leave_the_global_generator_alone(target):
    method = assisted_method(target, ModelDrafter(nearby(target, 0.2)), SAMPLED)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert method(PROMPTS[0]).new_tokens == method(PROMPTS[0]).new_tokens
    assert torch.equal(torch.get_rng_state(), state)


def test_it_stops_at_an_end_token(target):
    text = plain(target, PROMPTS[0])
    setting = replace(GREEDY, end_tokens=[text[4]])
    expected = text[: text.index(text[4]) + 1]
    for drafter in (ModelDrafter(nearby(target, 0.0)), ModelDrafter(disagreeing(target)), PromptLookupDrafter()):
        assert assisted_method(target, drafter, setting)(PROMPTS[0]).new_tokens == expected


def test_a_draft_that_generate_cannot_use_is_not_timed(target):
    wider = tiny_gpt2(vocabulary=48)
    for drafter in (ModelDrafter(wider, vocabulary=40), Spy(PromptLookupDrafter())):
        assert assisted_method(target, drafter, GREEDY) is None
    record = compare(target, ModelDrafter(wider, vocabulary=40), PROMPTS, GREEDY, "test")
    json.dumps(record, allow_nan=False)
    missing = {key for key in record if "hf_assisted" in key}
    assert len(missing) == 9 and all(record[key] is None for key in missing)
    assert record["hf_identical_prompts"] == 3 and "hf_assisted" not in record["samples"][0]["new_tokens"]


def test_it_is_left_out_where_it_is_not_asked_for(target, monkeypatch):
    monkeypatch.setattr(timed, "assisted_method", lambda *_: pytest.fail("timed"))
    record = compare(target, PromptLookupDrafter(), PROMPTS, replace(GREEDY, hf_assisted=False), "test")
    assert record["hf_assisted_tokens_per_second"] is record["hf_assisted_identical_prompts"] is None


def test_another_output_is_recorded_and_stops_nothing(target, monkeypatch):
    """It is not ours: only our own loop's output must be plain decoding's."""
    honest = methods.assisted_method

    def wrong(*arguments):
        method = honest(*arguments)

        def changed(prompt):
            outcome = method(prompt)
            return replace(outcome, new_tokens=outcome.new_tokens[::-1]) if prompt is PROMPTS[1] else outcome

        return changed

    monkeypatch.setattr(timed, "assisted_method", wrong)
    record = compare(target, PromptLookupDrafter(), PROMPTS, GREEDY, "test")
    assert (record["identical"], record["hf_assisted_identical_prompts"]) == ("identical", 2)


def test_its_time_is_told_apart_from_that_of_the_first_round(monkeypatch):
    """On a clock that only forwards move: 1 s for one token and 0.1 s for each further one, a quarter of that for the draft."""
    clock = SimpleNamespace(time=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.time)

    def slow(model, seconds):
        def hook(module, arguments, options, output):
            tokens = arguments[0] if arguments else options["input_ids"]
            clock.time += seconds * (1 + 0.1 * (tokens.shape[1] - 1))

        model.register_forward_hook(hook, with_kwargs=True)
        return model

    target = slow(tiny_gpt2(), 1.0)
    draft = slow(nearby(tiny_gpt2(), 0.0), 0.25)
    run = assisted_method(target, ModelDrafter(draft), GREEDY)(PROMPTS[0]).run
    # The draft reads the prompt's 5 tokens, and with them drafts the first of 3; in later rounds it has 2 to read.
    assert run.prefill == pytest.approx(0.25 * (1.4 + 2) + 1.7)
    assert run.decode == pytest.approx(0.25 * (1.1 + 2) + 1.3 + 0.25 * 1.1 + 1.1)
    assert (run.decoded, run.new_tokens) == (6, 10)


# Our loop on other kernels


@pytest.fixture
def llama():
    return tiny_llama()


@pytest.mark.parametrize("kernels", ["joined", "packed"])
@pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_our_loop_runs_the_kernels_and_generate_runs_transformers(llama, kernels, setting, monkeypatch):
    built = []

    def own(target, drafter, setting):
        built.append((target, drafter))
        return own_method(target, drafter, setting)

    monkeypatch.setattr(timed, "own_method", own)
    drafter = ModelDrafter(nearby(llama, 0.1), 0.2)
    record = compare(llama, drafter, PROMPTS, replace(setting, kernels=kernels), "test")
    for target, ours in built:
        assert isinstance(target, LlamaDecoder)
        assert ours is None or (isinstance(ours.model, LlamaDecoder) and ours.confidence_threshold == 0.2)
    assert not isinstance(drafter.model, LlamaDecoder)
    assert record["identical"] == "identical"
    assert 0 <= record["kernels_logit_error"] < 1e-3 and 0 <= record["draft_kernels_logit_error"] < 1e-3
    equal = 3 if setting is GREEDY else None
    assert record["hf_identical_prompts"] == record["hf_assisted_identical_prompts"] == equal


def test_the_costs_are_those_of_the_kernels(llama, monkeypatch):
    seen = []
    honest = timed.cached_step
    monkeypatch.setattr(timed, "cached_step", lambda model, *rest: seen.append(model) or honest(model, *rest))
    compare(llama, ModelDrafter(nearby(llama, 0.1)), PROMPTS, replace(GREEDY, kernels="joined"), "test")
    assert len(seen) == 5 and all(isinstance(model, LlamaDecoder) for model in seen)


def test_with_the_default_nothing_is_made_of_the_models(llama):
    drafter = ModelDrafter(nearby(llama, 0.1))
    assert on_kernels(drafter, "default").model is drafter.model
    lookup = PromptLookupDrafter()
    assert on_kernels(lookup, "packed") is lookup
    record = compare(llama, drafter, PROMPTS, GREEDY, "test")
    assert record["kernels_logit_error"] == record["draft_kernels_logit_error"] == 0
    assert compare(llama, lookup, PROMPTS, GREEDY, "test")["draft_kernels_logit_error"] is None


@pytest.mark.parametrize("faulty", ["target", "draft"])
def test_kernels_that_compute_something_else_stop_the_comparison(llama, faulty, monkeypatch):
    """Plain and speculative decoding would agree on them."""
    honest = methods.run_with

    def run_with(model, kernels, *, draft=False):
        return honest(nearby(model, 0.05) if draft == (faulty == "draft") else model, kernels, draft=draft)

    monkeypatch.setattr(methods, "run_with", run_with)
    with pytest.raises(InputError, match="the logits of LlamaForCausalLM as a LlamaDecoder differ from transformers'"):
        compare(llama, ModelDrafter(nearby(llama, 0.1)), PROMPTS, replace(GREEDY, kernels="joined"), "test")


def test_kernels_whose_copies_have_no_room_are_refused_before_they_are_made(llama, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    assert run_with(llama, "default") is llama
    with pytest.raises(
        InputError, match=r"LlamaForCausalLM with the kernels packed has .* parameters of 4 bytes, which is"
    ):
        run_with(llama, "packed")


def test_kernels_that_do_not_run_a_model_are_one_sentence(target):
    with pytest.raises(
        InputError, match=r"kernels is 'joined' for a GPT2LMHeadModel in torch.float32 on cpu; allowed: default"
    ):
        compare(target, PromptLookupDrafter(), PROMPTS, replace(GREEDY, kernels="joined"), "test")
