"""A differing token is a tie only where the target says so; anything else is a fault."""

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from stand_ins import ScriptedModel, nearby, random_table, tiny_gpt2, tiny_llama
from test_runners import require, wide_llama

from pipeline import greedy_identity
from specdec import identity, llama
from specdec.drafters import ModelDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.identity import (
    DEVICE_ERROR,
    RUNNER_ERROR,
    TIE_GAP,
    IdentityReport,
    check_device,
    check_greedy_identity,
    check_runner,
    emitted_gaps,
)
from specdec.llama import LlamaDecoder
from specdec.quantize import bfloat16_copy, int8_copy
from specdec.runners import KERNELS, runner

PROMPT = torch.tensor([[1, 2]])


def check(plain, speculative, gap=0.3):
    """Against a target whose two best tokens after every text are 2, then 0 with a logit smaller by `gap`."""
    law = torch.tensor([-gap, -5.0, 0.0, -5.0], dtype=torch.float64).softmax(dim=0)
    return check_greedy_identity(ScriptedModel(law.expand(4, 4, 4)), PROMPT, plain, speculative)


def test_equal_texts_match_without_a_forward():
    assert check_greedy_identity(None, PROMPT, [2, 2, 2], (2, 2, 2)) == IdentityReport(True)
    assert not IdentityReport(True).is_tie


@pytest.mark.parametrize(("gap", "is_tie"), [(0.0, True), (TIE_GAP / 2, True), (TIE_GAP * 2, False), (0.3, False)])
def test_a10_f09_the_gap_at_the_first_difference_tells_a_tie_from_a_fault(gap, is_tie):
    for plain, speculative in (([2, 2, 2], [2, 0, 1]), ([2, 0, 2], [2, 2, 2])):
        report = check(plain, speculative, gap)
        assert (report.matches, report.first_divergence) == (False, 1)
        assert report.top2_gap == pytest.approx(gap, abs=1e-6)
        assert report.is_tie == is_tie


def test_two_tokens_that_tie_far_below_the_best_are_a_fault():
    report = check([2, 1], [2, 3])
    assert report.top2_gap == pytest.approx(5)
    assert not report.is_tie


@pytest.mark.parametrize(("plain", "speculative"), [([2, 2], [2, 2, 2]), ([2, 2, 2], [2]), ([2], [])])
def test_a_text_that_stops_early_is_a_fault(plain, speculative):
    report = check(plain, speculative, gap=0)
    assert (report.matches, report.first_divergence) == (False, min(len(plain), len(speculative)))
    assert report.top2_gap == math.inf and not report.is_tie


def test_the_gap_is_read_behind_the_text_that_both_share():
    table = random_table(4, 0)
    report = check_greedy_identity(ScriptedModel(table), PROMPT, [3, 0, 1], [3, 0, 2])
    law = table[3, 0].log()
    assert report.first_divergence == 2
    assert report.top2_gap == pytest.approx(float(law.max() - min(law[1], law[2])), abs=1e-5)


def test_a10_f09_in_float32_nothing_differs_and_in_bfloat16_only_near_ties():
    target, draft = tiny_gpt2(), nearby(tiny_gpt2(), 0.05)
    differences = 0
    for make, gap in ((lambda model: model, 0.0), (bfloat16_copy, 0.1)):
        model, drafter = make(target), ModelDrafter(make(draft))
        for seed in range(5):
            prompt = torch.randint(40, (1, 8), generator=torch.Generator().manual_seed(seed))
            plain = autoregressive_generate(model, prompt, max_new_tokens=64)
            result = speculative_generate(model, prompt, drafter=drafter, k=4, max_new_tokens=64)
            report = check_greedy_identity(model, prompt, plain.new_tokens, result.new_tokens)
            assert report.matches or report.top2_gap < gap
            differences += not report.matches
    assert differences > 0  # else this shows nothing


# Every emitted token, by teacher forcing


def test_the_gaps_of_a_text_are_those_of_its_laws():
    table = random_table(4, 0, dtype=torch.float64)
    gaps = emitted_gaps(ScriptedModel(table), PROMPT, [3, 0, 1])
    for i, (previous, last, token) in enumerate([(1, 2, 3), (2, 3, 0), (3, 0, 1)]):
        law = table[previous, last].log()
        best, second = law.sort(descending=True).values[:2]
        assert float(gaps.below_best[i]) == pytest.approx(float(best - law[token]))
        assert float(gaps.top2[i]) == pytest.approx(float(best - second))


@pytest.mark.parametrize(
    ("dtype", "logit", "ulp"),
    [
        (torch.bfloat16, 20.0, 0.125),
        (torch.bfloat16, -20.0, 0.125),
        (torch.bfloat16, 16.0, 0.125),
        (torch.bfloat16, 15.9, 0.0625),
        (torch.float32, 1.5, 2.0**-23),
        (torch.float16, 0.75, 2.0**-11),
    ],
)
def test_an_ulp_is_the_spacing_of_the_format_at_the_largest_logit(dtype, logit, ulp):
    class Constant(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, tokens, logits_to_keep):
            logits = torch.tensor([logit - 1, logit, logit - 2], dtype=dtype)
            return SimpleNamespace(logits=logits.expand(1, logits_to_keep, 3))

    assert float(emitted_gaps(Constant(), PROMPT, [1]).ulp) == ulp


def test_bfloat16_divergences_are_told_with_their_gaps_in_ulps():
    target, draft = bfloat16_copy(tiny_gpt2()), bfloat16_copy(nearby(tiny_gpt2(), 0.05))
    rows = []
    for seed in range(6):
        prompt = torch.randint(40, (1, 8), generator=torch.Generator().manual_seed(seed))
        plain = autoregressive_generate(target, prompt, max_new_tokens=64).new_tokens
        drafter = ModelDrafter(draft)
        speculative = speculative_generate(target, prompt, drafter=drafter, k=4, max_new_tokens=64).new_tokens
        rows.append(greedy_identity.compare(target, prompt, plain, speculative))
    record = greedy_identity.identity_record(rows)
    assert record["identical_prompts"] + record["near_ties"] == record["prompts"] == 6
    assert record["near_ties"] > 0 and record["faults"] == 0  # else this shows nothing
    assert record["largest_ulps"] <= record["limit_ulps"] and record["largest_emitted_ulps"] <= record["limit_ulps"]
    assert 0 < record["share_within_limit"] < 0.5


def test_a_wrong_token_is_a_fault_and_so_is_a_text_that_stops_early():
    target = bfloat16_copy(tiny_gpt2())
    plain = autoregressive_generate(target, PROMPT, max_new_tokens=8).new_tokens
    wrong = (*plain[:3], (plain[3] + 1) % 40, *plain[4:])
    rows = [greedy_identity.compare(target, PROMPT, plain, text) for text in (plain, wrong, plain[:5])]
    record = greedy_identity.identity_record(rows)
    assert (record["identical_prompts"], record["near_ties"], record["faults"]) == (1, 0, 2)
    assert record["first_divergences"] == [None, 3, 5]
    assert record["divergence_gaps"][2] is None and record["largest_ulps"] > record["limit_ulps"]


# The device check


@pytest.mark.parametrize("copied", [bfloat16_copy, int8_copy])
@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_a_sound_device_passes_with_a_prompt_of_any_length(copied, length):
    model = copied(tiny_gpt2())
    weights = [parameter.clone() for parameter in model.parameters()]
    assert 0 < check_device(model, torch.arange(length)[None] % 40) < DEVICE_ERROR[torch.bfloat16]
    assert all(torch.equal(a, b) and b.dtype == a.dtype for a, b in zip(weights, model.parameters(), strict=True))


def test_a_model_that_has_no_room_in_float32_is_not_moved(monkeypatch):
    model = bfloat16_copy(tiny_gpt2())
    needed = 2 * sum(parameter.nbytes for parameter in model.parameters())
    held = needed // 2  # what the model gives up itself
    monkeypatch.setattr(identity, "free_memory", lambda _: needed - held)
    check_device(model, torch.arange(20)[None])
    monkeypatch.setattr(identity, "free_memory", lambda _: needed - held - 1)
    monkeypatch.setattr(identity, "_float32_on_the_cpu", lambda _: pytest.fail("moved"))
    with pytest.raises(InputError, match=r"GPT2LMHeadModel, to be checked against the CPU, has .* in float32"):
        check_device(model, torch.arange(20)[None])


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_comes_back_from_the_cpu_as_it_was(fails):
    model = bfloat16_copy(tiny_llama(tie_word_embeddings=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError) if fails else nullcontext(), identity._float32_on_the_cpu(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        if fails:
            raise KeyError
    assert model.lm_head.weight is model.model.embed_tokens.weight
    after = model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    assert not any(parameter.is_inference() for parameter in model.parameters())


# The check of a runner


@pytest.mark.parametrize(
    ("length", "kernels"),  # each length is compiled anew, which takes seconds
    [(n, kernels) for kernels in KERNELS for n in ((1, 40) if kernels == "compiled" else (1, 2, 5, 40))],
)
def test_a_sound_runner_passes_with_a_prompt_of_any_length(length, kernels):
    require(kernels)
    prompt = torch.arange(length)[None] % 40
    for model in (wide_llama(), wide_llama(seed=1, tie_word_embeddings=True)):
        error = check_runner(runner(model, kernels), model, prompt)
        assert error == 0 if kernels == "default" else 0 < error < RUNNER_ERROR / 10
        for copied in (bfloat16_copy, int8_copy):
            low = copied(model)
            check_runner(runner(low, kernels, draft=True), low, prompt)
    if kernels == "packed":
        assert check_runner(runner(tiny_gpt2(), kernels), tiny_gpt2(), prompt) < RUNNER_ERROR / 10


def wrong_rows(rows, wrong):
    """Matrices that run wrongly on so many rows and well on others."""

    def linear(layers):
        run = llama.plain_linear(layers)
        return lambda x: wrong(run(x)) if len(x) == rows else run(x)

    return linear


def late(tables):
    """Positions one too large, but for the first pass."""
    return lambda rotary, start, end: tables(rotary, start + (start > 0), end + (start > 0))


FAULTS = {
    "the weights of another model": lambda model: LlamaDecoder(nearby(model, 0.01)),
    "one row": lambda model: LlamaDecoder(model, wrong_rows(1, lambda y: y * 1.001)),
    "two rows": lambda model: LlamaDecoder(model, wrong_rows(2, lambda y: y * 1.001)),
    "five rows": lambda model: LlamaDecoder(model, wrong_rows(5, lambda y: y * 1.001)),
    "not a number": lambda model: LlamaDecoder(model, wrong_rows(1, lambda y: y * float("nan"))),
    "the epsilon of the norms": lambda model: LlamaDecoder(with_epsilon(model, 1e-3)),
}


def with_epsilon(model, epsilon):
    clone = copy.deepcopy(model)
    for module in clone.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = epsilon
    return clone


@pytest.mark.parametrize("fault", FAULTS)
def test_a_runner_that_computes_something_else_is_refused(fault):
    model = tiny_llama()
    with pytest.raises(
        InputError, match=r"of LlamaForCausalLM as a LlamaDecoder differ from transformers' by .*0\.001, or"
    ):
        check_runner(FAULTS[fault](model), model, torch.arange(12)[None])


@pytest.mark.parametrize("copied", [lambda model: model, bfloat16_copy, int8_copy])
def test_positions_that_go_wrong_behind_the_prompt_are_noticed_in_any_format(copied, monkeypatch):
    model = copied(tiny_llama())
    check_runner(LlamaDecoder(model), model, torch.arange(40)[None])
    monkeypatch.setattr(llama._Rotary, "tables", late(llama._Rotary.tables))
    with pytest.raises(InputError, match="differ from transformers' by"):
        check_runner(LlamaDecoder(model), model, torch.arange(40)[None])
    monkeypatch.undo()
    with pytest.raises(InputError, match="differ from transformers' by"):
        check_runner(LlamaDecoder(model, wrong_rows(1, lambda y: y.roll(1, -1))), model, torch.arange(40)[None])
