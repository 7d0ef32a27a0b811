"""One comparison on tiny models: what is timed, in which order, and that faulty output stops it.

Where times matter, a clock stands in that only forwards move.
"""

import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from stand_ins import ScriptedModel, Spy, disagreeing, nearby, random_table, tiny_gpt2

from pipeline import methods, timed
from pipeline.acceptance import prompt_generator
from pipeline.figures import METHODS
from pipeline.methods import Outcome, Setting, TextPrompt
from pipeline.timed import compare, cost_clock, identity_record
from specdec.drafters import Draft, ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.identity import TIE_GAP
from specdec.quantize import bfloat16_copy
from specdec.sampling import SamplingConfig
from specdec.stats import AcceptanceStats
from specdec.timing import TimedRun

KEYS = """
alpha alpha_hi alpha_lo alpha_overlap alpha_overlap_hi alpha_overlap_lo draft_acceptance_rate mean_acceptance_length
mean_acceptance_length_hi mean_acceptance_length_lo mean_accepted_per_round iid_acceptance_length
acceptance_per_position conditional_acceptance_per_position proposed_per_position tested_per_position per_prompt
prompts new_tokens rounds proposed accepted tested ar_tokens_per_second spec_tokens_per_second hf_tokens_per_second
ar_end_to_end_tokens_per_second spec_end_to_end_tokens_per_second hf_end_to_end_tokens_per_second speedup speedup_lo
speedup_hi speedup_end_to_end speedup_end_to_end_lo speedup_end_to_end_hi speedup_over_fastest speedup_over_fastest_lo
speedup_over_fastest_hi fastest_baseline hf_assisted_tokens_per_second hf_assisted_end_to_end_tokens_per_second
speedup_over_hf_assisted speedup_over_hf_assisted_lo speedup_over_hf_assisted_hi kernels_logit_error
draft_kernels_logit_error hf_identical_prompts hf_assisted_identical_prompts ar_over_hf ar_over_hf_lo ar_over_hf_hi
noise_floor noise_floor_lo noise_floor_hi cost_coefficient verify_cost_ratio target_seconds_1 target_seconds_k1
draft_seconds_1 predicted_speedup ideal_speedup iid_factor verify_cost_factor overhead_factor identical ties
identical_prompts samples
"""

GREEDY = Setting(3, SamplingConfig(), max_new_tokens=10, end_tokens=[], seed=0, runs=2, warmup=1)
SAMPLED = replace(GREEDY, sampling=SamplingConfig(1.0))


def prompt_of(length, seed):
    return torch.randint(40, (1, length), generator=torch.Generator().manual_seed(seed))


PROMPTS = [
    TextPrompt(7, "qa", prompt_of(5, 0)),
    TextPrompt("b", "rag", prompt_of(9, 1)),
    TextPrompt(9, "qa", prompt_of(2, 2)),
]


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    monkeypatch.setattr(timed, "COST_RUNS", 2)


@pytest.fixture(scope="module")
def target():
    return tiny_gpt2()


@pytest.fixture(scope="module")
def drafter(target):
    return ModelDrafter(nearby(target, 0.2))


def measured(target, drafter, setting=GREEDY, prompts=PROMPTS):
    record = compare(target, drafter, prompts, setting, "test")
    json.dumps(record, allow_nan=False)
    return record


def outcome_of(method, prompt):
    return method(prompt).new_tokens


def plain(target, prompt, tokens=10):
    return autoregressive_generate(target, prompt.input_ids, max_new_tokens=tokens).new_tokens


class Silent:
    """A drafter that never proposes."""

    def begin(self, prompt, sampling):
        pass

    def propose(self, context, max_tokens, chooser):
        return Draft((), None)

    def rollback(self, length):
        pass


# The record


@pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_record_has_every_key_and_is_strict_json(target, drafter, setting):
    record = measured(target, drafter, setting)
    assert set(KEYS.split()) <= record.keys()
    assert (record["identical"], record["identical_prompts"], record["ties"]) == ("identical", 3, 0)
    assert (record["prompts"], record["new_tokens"], record["unrepeatable_runs"]) == (3, 30, 0)
    assert 0 < record["alpha"] < 1
    assert record["first_divergences"] == record["divergence_gaps"] == [None] * 3
    equal = 3 if setting is GREEDY else None
    assert record["hf_identical_prompts"] == record["hf_assisted_identical_prompts"] == equal


def test_a11_a_sample_keeps_every_run(target, drafter):
    samples = measured(target, drafter, replace(GREEDY, runs=3))["samples"]
    assert [(s["question_id"], s["category"], s["prompt_tokens"]) for s in samples] == [
        (7, "qa", 5),
        ("b", "rag", 9),
        (9, "qa", 2),
    ]
    for sample in samples:
        assert sample["new_tokens"] == dict.fromkeys(METHODS, 10)
        for kind in ("prefill_seconds", "decode_seconds"):
            assert {name: len(values) for name, values in sample[kind].items()} == dict.fromkeys(METHODS, 3)


def test_the_acceptance_is_that_of_the_loop(target, drafter):
    record = measured(target, drafter)
    for prompt, raw in zip(PROMPTS, record["per_prompt"], strict=True):
        result = speculative_generate(target, prompt.input_ids, drafter=drafter, k=3, max_new_tokens=10)
        assert raw["question_id"] == prompt.question_id
        assert raw["per_round_accepted"] == [r.accepted for r in result.stats.rounds]


@pytest.mark.parametrize("drafter", [Silent(), PromptLookupDrafter()], ids=["silent", "lookup"])
def test_a_drafter_without_a_model_is_compared_too(target, drafter):
    record = measured(target, drafter)
    assert record["identical"] == "identical"
    # Hugging Face has a prompt lookup, and no drafter that is silent.
    assert record["hf_assisted_identical_prompts"] == (None if isinstance(drafter, Silent) else 3)
    if isinstance(drafter, Silent):
        assert record["hf_assisted_tokens_per_second"] is record["speedup_over_hf_assisted"] is None
        assert (record["proposed"], record["alpha"], record["mean_acceptance_length"]) == (0, None, 1)
        assert record["verify_cost_ratio"] == record["iid_factor"] == 1


def test_one_new_token_is_enough(target, drafter):
    record = measured(target, drafter, replace(GREEDY, max_new_tokens=1))
    assert (record["new_tokens"], record["proposed"], record["identical"]) == (3, 0, "identical")
    assert record["ar_over_hf"] is None  # Hugging Face's came with the prompt's pass


def test_all_methods_stop_at_an_end_token(target, drafter):
    texts = [plain(target, prompt) for prompt in PROMPTS]
    end = texts[0][4]
    record = measured(target, drafter, replace(GREEDY, end_tokens=[end]))
    expected = [text.index(end) + 1 if end in text else 10 for text in texts]
    assert expected[0] <= 5
    assert [s["new_tokens"] for s in record["samples"]] == [dict.fromkeys(METHODS, n) for n in expected]
    assert record["hf_identical_prompts"] == record["hf_assisted_identical_prompts"] == 3


# The order of the runs


@dataclass
class Recorder:
    """Wraps the methods that `compare` makes: notes each call, and numbers the run's times after it."""

    calls: list
    outcomes: list

    def wrap(self, name, method):
        def recorded(prompt):
            outcome = method(prompt)
            self.calls.append((name, prompt.question_id))
            outcome = replace(outcome, run=replace(outcome.run, decode=float(len(self.calls)), prefill=0.5))
            self.outcomes.append(outcome)
            return outcome

        return recorded


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder([], [])
    own, theirs, assisted = timed.own_method, timed.hugging_face_method, timed.assisted_method
    monkeypatch.setattr(
        timed,
        "own_method",
        lambda target, drafter, setting: recorder.wrap(
            "ar" if drafter is None else "spec", own(target, drafter, setting)
        ),
    )
    monkeypatch.setattr(
        timed, "hugging_face_method", lambda target, setting: recorder.wrap("hf", theirs(target, setting))
    )
    monkeypatch.setattr(timed, "assisted_method", lambda *arguments: recorder.wrap("hf_assisted", assisted(*arguments)))
    return recorder


def test_a11_f12_runs_alternate_after_a_warm_up_that_does_not_count(target, drafter, recorder):
    record = measured(target, drafter, replace(GREEDY, runs=3, warmup=2))
    there, back = ["ar", "spec", "hf", "hf_assisted"], ["hf_assisted", "hf", "spec", "ar"]
    warm_up, timed_calls = recorder.calls[:8], recorder.calls[8:]
    assert Counter(warm_up) == {(name, 7): 2 for name in there}
    assert timed_calls == [(name, p.question_id) for p in PROMPTS for name in [*there, *back, *there]]
    for i, sample in enumerate(record["samples"]):
        start = 8 + 12 * i
        assert sample["decode_seconds"] == {
            "ar": [start + 1, start + 8, start + 9],
            "spec": [start + 2, start + 7, start + 10],
            "hf": [start + 3, start + 6, start + 11],
            "hf_assisted": [start + 4, start + 5, start + 12],
        }
        assert sample["prefill_seconds"]["spec"] == [0.5] * 3


def test_sampled_runs_are_decoded_once_more_greedily_to_check_them(target, drafter, recorder):
    record = measured(target, drafter, SAMPLED)
    assert record["identical"] == "identical"
    start, end = 4, 4 + 3 * 2 * 4
    extra = recorder.calls[end:]
    assert Counter(extra) == {(name, p.question_id): 1 for p in PROMPTS for name in ("ar", "spec")}
    texts = {}
    for call, outcome in zip(recorder.calls[start:end], recorder.outcomes[start:end], strict=True):
        assert texts.setdefault(call, outcome.new_tokens) == outcome.new_tokens
    assert any(texts["ar", p.question_id] != texts["spec", p.question_id] for p in PROMPTS)
    for call, outcome in zip(recorder.calls[end:], recorder.outcomes[end:], strict=True):
        prompt = next(p for p in PROMPTS if p.question_id == call[1])
        assert outcome.new_tokens == plain(target, prompt)


def test_greedy_runs_need_no_extra_pass(target, drafter, recorder):
    measured(target, drafter)
    assert len(recorder.calls) == 4 + 3 * 2 * 4


def test_runs_that_differ_from_the_first_are_counted(target, drafter, recorder, monkeypatch):
    honest = recorder.wrap

    def forgetful(name, method):
        method = honest(name, method)
        calls = itertools.count()

        def changed(prompt):  # the warm-up is call 0; prompts have calls 1 to 3, 4 to 6, 7 to 9
            call, outcome = next(calls), method(prompt)
            wrong = name == "spec" and call in (2, 3, 9)
            return replace(outcome, new_tokens=outcome.new_tokens[::-1]) if wrong else outcome

        return changed

    monkeypatch.setattr(recorder, "wrap", forgetful)
    record = measured(target, drafter, replace(GREEDY, runs=3))
    assert record["unrepeatable_runs"] == 3
    assert record["identical"] == "identical"  # by the first runs


# Is the output right?


def corrupted(monkeypatch, choose, only_greedy=False):
    """Speculative decoding that gets the first new token wrong: `choose(token)` in its place."""

    def wrong(target, input_ids, **options):
        result = speculative_generate(target, input_ids, **options)
        if only_greedy and options["temperature"] > 0:
            return result
        return replace(result, new_tokens=(choose(result.new_tokens[0]), *result.new_tokens[1:]))

    monkeypatch.setattr(methods, "speculative_generate", wrong)


def gap_of(target, prompt, token):
    with torch.inference_mode():
        logits = target(prompt.input_ids).logits[0, -1].float()
    return float(logits.max() - logits[token])


@pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a10_wrong_greedy_output_stops_a_float32_comparison(target, drafter, setting, monkeypatch):
    corrupted(monkeypatch, lambda token: (token + 1) % 40, only_greedy=True)
    assert gap_of(target, PROMPTS[0], (plain(target, PROMPTS[0])[0] + 1) % 40) > TIE_GAP
    with pytest.raises(InputError, match=r"prompt 7 differs from plain decoding at new token 0 with a logit gap of \d"):
        measured(target, drafter, setting)


def test_a10_f09_in_bfloat16_wrong_output_is_recorded(target, drafter, monkeypatch):
    target = bfloat16_copy(target)
    wrong = (plain(target, PROMPTS[1])[0] + 1) % 40
    corrupted(monkeypatch, lambda token: wrong if token == (wrong - 1) % 40 else token)
    prompts = PROMPTS[:2]
    assert plain(target, PROMPTS[0])[0] != (wrong - 1) % 40
    record = measured(target, drafter, prompts=prompts)
    assert record["identical"] == f"{record['identical_prompts']} of 2 prompts identical"
    assert record["first_divergences"][1] == 0
    assert record["divergence_gaps"][1] == pytest.approx(gap_of(target, PROMPTS[1], wrong), abs=0.05)


def twins(target, prompt):
    """The model with one token made the equal of its first greedy token, and both."""
    clone = nearby(target, 0.0)
    first = plain(target, prompt)[0]
    other = next(token for token in range(40) if token not in (first, *prompt.input_ids[0].tolist()))
    with torch.no_grad():
        clone.lm_head.weight[other] = clone.lm_head.weight[first]
    assert gap_of(clone, prompt, first) < TIE_GAP > gap_of(clone, prompt, other)
    return clone, {first: other, other: first}


def test_a10_f09_a_tie_is_no_fault(target, monkeypatch):
    clone, swap = twins(target, PROMPTS[0])
    corrupted(monkeypatch, lambda token: swap[token])
    record = measured(clone, ModelDrafter(clone), prompts=PROMPTS[:1])
    assert record["identical"] == "identical but for 1 tie"
    assert (record["identical_prompts"], record["ties"], record["first_divergences"]) == (0, 1, [0])
    assert 0 <= record["divergence_gaps"][0] < TIE_GAP


def outcomes(ar, spec, hf):
    run = TimedRun(0.0, 0.0, 0, 0)
    texts = {"ar": ar, "spec": spec, "hf": hf}
    return {name: [Outcome(tuple(text), AcceptanceStats(), run)] for name, text in texts.items()}


def test_the_verdict_counts_prompts(target):
    clone, swap = twins(target, PROMPTS[0])
    first, other = swap
    right, tied, wrong = [first, 1], [other, 1], [(first + 1) % 40, 1]
    same = [PROMPTS[0]] * 3

    def verdict(*texts, model=clone):
        record = identity_record(model, model, None, same, [outcomes(*t) for t in texts], GREEDY)
        return record["identical"], record["identical_prompts"], record["ties"], record["hf_identical_prompts"]

    equal = (right, right, right)
    assert verdict(equal, equal, (right, right, wrong)) == ("identical", 3, 0, 2)
    assert verdict(equal, (right, tied, right), equal) == ("identical but for 1 tie", 2, 1, 3)
    assert verdict((right, tied, tied), (tied, right, tied), equal) == ("identical but for 2 ties", 1, 2, 2)
    with pytest.raises(InputError, match="prompt 7"):
        verdict(equal, (right, tied, right), (right, wrong, right))
    with pytest.raises(InputError, match="at new token 1"):  # stopped early
        verdict(equal, equal, (right, right[:1], right))
    half = bfloat16_copy(clone)
    assert verdict(equal, equal, (right, wrong, right), model=half) == ("2 of 3 prompts identical", 2, 0, 3)


# The methods


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.5, top_k=3), SamplingConfig(1.5, top_p=0.6)])
def test_our_methods_draw_by_the_setting_with_the_generator_of_the_prompt(target, drafter, sampling):
    setting = replace(GREEDY, sampling=sampling, seed=4)
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    for prompt in PROMPTS:
        drawn = {"max_new_tokens": 10, **options}
        result = autoregressive_generate(
            target, prompt.input_ids, generator=prompt_generator(4, prompt.question_id), **drawn
        )
        assert outcome_of(timed.own_method(target, None, setting), prompt) == result.new_tokens
        result = speculative_generate(
            target, prompt.input_ids, drafter=drafter, k=3, generator=prompt_generator(4, prompt.question_id), **drawn
        )
        outcome = timed.own_method(target, drafter, setting)(prompt)
        assert (outcome.new_tokens, outcome.stats) == (result.new_tokens, result.stats)


def test_their_sampling_leaves_out_no_token_unasked():
    """transformers keeps the 50 likeliest tokens where it is not told otherwise."""
    target = tiny_gpt2(vocabulary=400)
    texts = [
        outcome_of(timed.hugging_face_method(target, replace(GREEDY, sampling=sampling)), PROMPTS[0])
        for sampling in (SamplingConfig(20.0), SamplingConfig(20.0, top_k=400), SamplingConfig(20.0, top_k=50))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_f12_their_greedy_tokens_are_ours_and_the_first_comes_with_the_prompt(target):
    method = timed.hugging_face_method(target, GREEDY)
    for prompt in PROMPTS:
        outcome = method(prompt)
        assert outcome.new_tokens == plain(target, prompt)
        assert (outcome.run.decoded, outcome.run.new_tokens) == (9, 10)
        assert outcome.stats == AcceptanceStats()


@pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_global_random_state_is_as_it_was(target, setting):
    method = timed.hugging_face_method(target, setting)
    texts = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        texts.add(outcome_of(method, PROMPTS[0]))
        assert torch.equal(torch.get_rng_state(), state)
    assert len(texts) == 1
    other = timed.hugging_face_method(target, replace(setting, seed=5))
    assert (outcome_of(other, PROMPTS[0]) in texts) == (setting is GREEDY)


def test_f12_their_sampling_follows_the_setting_and_not_the_models_own(target):
    greedy = plain(target, PROMPTS[0])
    for sampling in (SamplingConfig(1.0, top_k=1), SamplingConfig(1.0, top_p=1e-6), SamplingConfig(1e-4)):
        assert outcome_of(timed.hugging_face_method(target, replace(GREEDY, sampling=sampling)), PROMPTS[0]) == greedy
    for own in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}, {"do_sample": False}):
        model = nearby(target, 0.0)
        model.generation_config.update(**own)
        assert outcome_of(timed.hugging_face_method(model, SAMPLED), PROMPTS[0]) != greedy


def test_without_end_tokens_the_models_own_do_not_stop_them(target):
    model = nearby(target, 0.0)
    model.generation_config.eos_token_id = plain(target, PROMPTS[0])[2]
    assert outcome_of(timed.hugging_face_method(model, GREEDY), PROMPTS[0]) == plain(target, PROMPTS[0])


# Times, on a clock that only forwards move: 1 s for one token and 0.1 s for each further one, a quarter of that for the draft.


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(time=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.time)

    def tick(seconds):
        def hook(model, args, kwargs, output):
            tokens = args[0] if args else kwargs["input_ids"]
            clock.time += seconds * (1 + 0.1 * (tokens.shape[1] - 1))

        return hook

    clock.slow = lambda model, seconds: model.register_forward_hook(tick(seconds), with_kwargs=True) and model
    return clock


def test_prefill_and_decoding_are_told_apart(clock):
    target = clock.slow(nearby(tiny_gpt2(), 0.0), 1.0)
    plain_run = timed.own_method(target, None, GREEDY)(PROMPTS[0]).run
    assert plain_run == TimedRun(pytest.approx(1.3), pytest.approx(10), 10, 10)  # all but the prompt's last token
    run = timed.hugging_face_method(target, GREEDY)(PROMPTS[0]).run
    assert run == TimedRun(pytest.approx(1.4), pytest.approx(9), 9, 10)


@pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_f12_where_only_forwards_cost_time_the_prediction_is_exact(clock, setting):
    target, draft = nearby(tiny_gpt2(), 0.0), nearby(tiny_gpt2(), 0.2)
    for model, seconds in ((target, 1.0), (draft, 0.25)):
        clock.slow(model, seconds)
    # Two tokens that the draft has not read cost it 0.1 more than the prediction knows: none where it is always rejected.
    record = measured(target, ModelDrafter(disagreeing(draft)) if setting is GREEDY else ModelDrafter(draft), setting)
    drafted = [n for raw in record["per_prompt"] for n in raw["per_round_drafted"]]
    assert len(set(drafted)) > 1  # the last rounds are shorter
    assert record["ar_tokens_per_second"] == pytest.approx(1)
    assert record["hf_tokens_per_second"] == pytest.approx(1)
    assert record["target_seconds_1"] == pytest.approx(1)
    assert record["target_seconds_k1"] == pytest.approx(1.3)
    assert record["draft_seconds_1"] == record["cost_coefficient"] == pytest.approx(0.25)
    assert record["verify_cost_ratio"] == pytest.approx(1 + 0.1 * sum(drafted) / len(drafted))
    assert record["noise_floor"] == pytest.approx(1)
    assert record["overhead_factor"] == pytest.approx(1, abs=1e-6 if setting is GREEDY else 0.02)
    assert record["predicted_speedup"] == pytest.approx(record["speedup"], rel=1e-6 if setting is GREEDY else 0.02)


def test_a19_a_clock_that_stands_still_stops_nothing(target, drafter, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    record = measured(target, drafter)
    assert record["speedup"] is record["predicted_speedup"] is record["ar_tokens_per_second"] is None


# Costs


def scripted(seed, context=64):
    return ScriptedModel(random_table(5, seed), context=context)


def text(*tokens):
    return TextPrompt(0, "", torch.tensor([tokens]))


def measure_costs(target, drafter, prompts, most_rows):
    costs = cost_clock(target, drafter, prompts, most_rows)
    costs.sample(2)
    seconds = costs.medians()
    return seconds.pop("draft"), {int(n): value for n, value in seconds.items()}


def test_costs_are_sampled_between_the_timed_runs(target, drafter, recorder, monkeypatch):
    """A machine that slows down half-way slows the costs down with the runs that they are set beside."""
    samples = []
    monkeypatch.setattr(timed.StepClock, "sample", lambda self, runs: samples.append((len(recorder.calls), runs)))
    monkeypatch.setattr(timed.StepClock, "medians", lambda self: {"1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0, "draft": 1.0})
    compare(target, drafter, PROMPTS, GREEDY, "test")
    after_warm_up, per_prompt = 4, 4 * GREEDY.runs
    assert samples == [(after_warm_up + per_prompt * n, timed.COST_RUNS) for n in (1, 2, 3)]


def test_more_rows_than_the_prompt_has_tokens(clock):
    target, draft = clock.slow(scripted(0), 1.0), clock.slow(scripted(1), 0.5)
    draft_seconds, target_seconds = measure_costs(target, ModelDrafter(draft), [text(1, 2)], 6)
    assert draft_seconds == pytest.approx(0.5)
    assert target_seconds == {n: pytest.approx(1 + 0.1 * (n - 1)) for n in range(1, 7)}
    assert {len(fed.tokens) for fed in target.fed if fed.cached == (1, 2)} == {1, 2, 3, 4, 5, 6}


def test_costs_are_read_behind_the_prompt_of_median_length():
    target, draft = scripted(0), scripted(1)
    measure_costs(target, ModelDrafter(draft), [text(4, 4, 4, 4), text(1), text(3, 2, 1)], 2)
    assert {fed.cached for fed in target.fed} == {fed.cached for fed in draft.fed} == {(), (3, 2, 1)}


def test_a_draft_with_a_shorter_context_is_measured_behind_the_end_of_the_prompt(clock):
    target, draft = scripted(0), clock.slow(scripted(1, context=4), 0.5)
    draft_seconds, _ = measure_costs(target, ModelDrafter(draft), [text(1, 2, 3, 4, 0, 1)], 4)
    assert draft_seconds == pytest.approx(0.5)
    assert {fed.cached for fed in draft.fed} == {(), (4, 0, 1)}
    assert {fed.cached for fed in target.fed} == {(), (1, 2, 3, 4, 0, 1)}


@pytest.mark.parametrize(("rows", "asked"), [(5, 4), (1, 1)])
def test_a_look_up_has_the_time_of_one_proposal(clock, rows, asked):
    class Slow(PromptLookupDrafter):
        def propose(self, context, max_tokens, chooser):
            clock.time += 3
            return super().propose(context, max_tokens, chooser)

    spy = Spy(Slow())
    draft_seconds, _ = measure_costs(scripted(0), spy, [text(1, 2, 1)], rows)
    assert draft_seconds == 3
    assert set(spy.asked) == {((1, 2, 1), asked)}
