"""The loop: greedy text, exact lengths, end tokens, caches, and the protocol around it."""

import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
from stand_ins import (
    ScriptedModel,
    Spy,
    disagreeing,
    nearby,
    random_table,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
)
from transformers import MambaConfig, MambaForCausalLM, TextStreamer

from specdec import generate
from specdec.drafters import Draft, ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.quantize import bfloat16_copy, int8_copy
from specdec.sampling import to_probs

PROMPT = torch.tensor([[1, 3, 2, 3]])


def prompt_of(length, vocabulary=40, seed=0):
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def scripted(seed=0, vocabulary=6, **options):
    return ScriptedModel(random_table(vocabulary, seed), **options)


def rotated(model):
    """A draft whose best token is never the model's."""
    return ScriptedModel(model.table.roll(1, -1))


def by_transformers(model, prompt, max_new_tokens):
    mask = torch.ones_like(prompt)  # else token 0, the padding, is left out where it stands in the prompt
    return model.generate(prompt, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)


def speculate(target, draft, k, max_new_tokens, prompt=PROMPT, **options):
    drafter = ModelDrafter(draft) if isinstance(draft, torch.nn.Module) else draft
    return speculative_generate(target, prompt, drafter=drafter, k=k, max_new_tokens=max_new_tokens, **options)


def plain(target, max_new_tokens, prompt=PROMPT, **options):
    return autoregressive_generate(target, prompt, max_new_tokens=max_new_tokens, **options)


# Greedy text


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama, tiny_mistral])
def test_plain_greedy_decoding_is_that_of_transformers(build):
    model = build()
    for seed in range(3):
        prompt = prompt_of(5 + seed, seed=seed)
        assert torch.equal(plain(model, 40, prompt).sequences, by_transformers(model, prompt, 40))


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_speculative_greedy_text_is_the_plain_one_whatever_is_drafted(build, k):
    model, prompt = build(), prompt_of(6)
    expected = plain(model, 50, prompt)
    copies = (model, nearby(model, 0.05), disagreeing(model), int8_copy(model), bfloat16_copy(model))
    for drafter in (*copies, PromptLookupDrafter()):
        assert speculate(model, drafter, k, 50, prompt).new_tokens == expected.new_tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a06_a_sliding_window_holds_when_the_text_outgrows_it(attention):
    target = tiny_mistral(window=16, attention=attention)
    prompt = prompt_of(10)
    expected = plain(target, 64, prompt)
    assert torch.equal(expected.sequences, by_transformers(target, prompt, 64))
    for draft in (target, nearby(target, 0.05), tiny_mistral(1, window=8, attention=attention)):
        assert speculate(target, draft, 4, 64, prompt).new_tokens == expected.new_tokens


def test_a06_a_recurrent_target_is_refused_before_anything_is_streamed():
    model = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    streamer = Recorder()
    with pytest.raises(InputError, match="MambaForCausalLM keeps a LinearAttentionLayer"):
        speculate(model, tiny_gpt2(), 2, 5, streamer=streamer)
    assert streamer.values == []


def test_f08_a_prompt_of_one_token():
    model = tiny_gpt2()
    prompt = torch.tensor([[7]])
    theirs = by_transformers(model, prompt, 12)
    assert torch.equal(plain(model, 12, prompt).sequences, theirs)
    assert torch.equal(speculate(model, nearby(model, 0.05), 3, 12, prompt).sequences, theirs)


# How many tokens


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_a08_f08_exactly_as_many_tokens_as_asked_for(k):
    longest = plain(scripted(), 12).new_tokens
    for n in range(13):
        for make_draft in (ScriptedModel, lambda table: rotated(scripted())):
            target, draft = scripted(), make_draft(scripted().table)
            spy = Spy(ModelDrafter(draft))
            result = speculate(target, spy, k, n)
            assert result.new_tokens == longest[:n]
            assert result.sequences.tolist() == [[*PROMPT[0].tolist(), *longest[:n]]]
            assert result.sequences.dtype == torch.int64
            assert result.finish_reason == "length"
            assert result.stats.new_tokens == n
            # Never more proposals than can still be emitted, one place being the target's.
            assert all(limit == min(k, 4 + n - len(context) - 1) for context, limit in spy.asked)
            if n == 0:
                assert target.fed == draft.fed == []
            else:  # the prompt but for its last token, then an anchor and the draft in each round
                assert sum(len(fed.tokens) for fed in target.fed) == 3 + sum(1 + r.drafted for r in result.stats.rounds)


def test_the_text_may_fill_the_targets_context_but_not_exceed_it():
    target = tiny_gpt2(context=20)
    expected = by_transformers(target, PROMPT, 16)
    assert torch.equal(speculate(target, tiny_gpt2(), 8, 16).sequences, expected)
    with pytest.raises(InputError, match=r"prompt of 4 tokens and max_new_tokens=17 .*allowed: 20 tokens"):
        speculate(target, tiny_gpt2(), 8, 17)


def test_a_draft_with_a_shorter_context_proposes_nothing_beyond_it():
    target = scripted()
    result = speculate(target, ScriptedModel(target.table, context=10), 3, 20)
    assert result.new_tokens == plain(target, 20).new_tokens
    # Text lengths 4, 8, 11, 12, ...; with ten positions the draft proposes up to the eleventh token.
    assert [r.drafted for r in result.stats.rounds] == [3, 3] + [0] * (len(result.stats.rounds) - 2)
    too_long = speculate(target, ScriptedModel(target.table, context=2), 3, 20)
    assert (too_long.new_tokens, too_long.stats.proposed) == (result.new_tokens, 0)


# End tokens


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_a07_f08_the_text_ends_at_its_first_end_token_wherever_it_falls(k):
    target = tiny_gpt2()
    text = plain(target, 24).new_tokens
    for j in range(16):
        first = text.index(text[j])
        for draft in (target, nearby(target, 0.05)):
            result = speculate(target, draft, k, 24, eos_token_id=text[j])
            assert result.new_tokens == text[: first + 1]
            assert result.sequences[0].tolist() == [*PROMPT[0].tolist(), *text[: first + 1]]
            assert result.finish_reason == "eos"
            assert result.stats.new_tokens == first + 1


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a07_of_several_end_tokens_the_first_counts(k):
    target = scripted()
    text = plain(target, 24).new_tokens
    for a, b in itertools.combinations(sorted(set(text)), 2):
        for end_tokens in ([a, b], (b, a), {a, b}):
            result = speculate(target, target, k, 24, eos_token_id=end_tokens)
            assert result.new_tokens == text[: min(text.index(a), text.index(b)) + 1]


def test_a07_an_end_token_in_the_prompt_stops_nothing():
    target = scripted(vocabulary=8)
    text = plain(target, 20).new_tokens
    unused = next(token for token in range(8) if token not in text)
    prompt = torch.cat([torch.tensor([[unused]]), PROMPT], dim=1)
    result = speculate(target, target, 4, 20, prompt, eos_token_id=unused)
    assert result.new_tokens == text
    assert result.finish_reason == "length"


def test_f08_an_end_token_that_is_the_last_token_asked_for_is_an_end():
    target = scripted(vocabulary=12)
    text = plain(target, 24).new_tokens
    last = next(i for i in range(4, 24) if text[i] not in text[:i])
    assert speculate(target, target, 3, last + 1, eos_token_id=text[last]).finish_reason == "eos"
    assert speculate(target, target, 3, last, eos_token_id=text[last]).finish_reason == "length"


def test_a07_a12_what_stands_behind_an_accepted_end_token_is_not_counted():
    target = scripted()
    text = plain(target, 24).new_tokens
    end = next(token for token in text if text.index(token) % 5 == 1)  # second in its round of five
    seen = []
    result = speculate(target, target, 4, 24, eos_token_id=end, on_round=seen.append)
    *full, cut = result.stats.rounds
    assert all((r.drafted, r.proposed, r.accepted, r.emitted, r.tested) == (4, 4, 4, 5, 4) for r in full)
    assert (cut.drafted, cut.proposed, cut.accepted, cut.emitted, cut.tested) == (4, 2, 2, 2, 2)
    assert result.stats.draft_acceptance_rate == result.stats.alpha == 1
    assert seen[-1].kinds == ("accepted", "accepted")


# Caches and drafts


def committed_before_each_round(result, prompt=PROMPT):
    text, texts = tuple(prompt[0].tolist()), []
    new_tokens = iter(result.new_tokens)
    for r in result.stats.rounds:
        texts.append(text)
        text += tuple(itertools.islice(new_tokens, r.emitted))
    return texts


DRAFTS = {
    "itself": scripted,
    "disagreeing": lambda: rotated(scripted()),
    "between": lambda: ScriptedModel((random_table(6, 0) + random_table(6, 1)) / 2),
}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", DRAFTS)
def test_a05_f07_before_every_round_the_caches_hold_what_the_invariant_says(name, k):
    """The target's all but the last token; the draft's the same, or one less after a full acceptance."""
    target, draft = scripted(), DRAFTS[name]()
    spy = Spy(ModelDrafter(draft))
    result = speculate(target, spy, k, 30, temperature=1.0, generator=torch.Generator().manual_seed(0))
    texts = committed_before_each_round(result)

    prefill, *forwards = target.fed
    assert prefill.tokens == texts[0][:-1]
    for fed, text, r in zip(forwards, texts, result.stats.rounds, strict=True):
        assert fed.cached == text[:-1]
        assert fed.tokens[0] == text[-1] and len(fed.tokens) == r.drafted + 1

    prefill, *forwards = draft.fed
    assert prefill.tokens == texts[0][:-1]
    calls, fully_accepted = iter(forwards), False
    for (context, _), drafted, text, r in zip(spy.asked, spy.drafts, texts, result.stats.rounds, strict=False):
        assert context == text
        first, *others = itertools.islice(calls, len(drafted.tokens))
        assert first.cached == text[: -2 if fully_accepted else -1]
        assert first.cached + first.tokens == text
        assert [fed.tokens for fed in others] == [(token,) for token in drafted.tokens[:-1]]
        fully_accepted = r.accepted == r.drafted


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}], ids=str)
def test_a05_f07_cached_proposals_are_those_of_a_model_without_a_cache(sampling):
    target = tiny_gpt2()
    draft = nearby(target, 0.05)
    spy = Spy(ModelDrafter(draft))
    result = speculate(target, spy, 4, 80, generator=torch.Generator().manual_seed(0), **sampling)
    assert 0 < result.stats.accepted < result.stats.proposed
    assert {r.accepted for r in result.stats.rounds} >= {0, 4}
    config = generate.SamplingConfig(**sampling)
    for (context, _), drafted in zip(spy.asked, spy.drafts, strict=True):
        text = torch.tensor([[*context, *drafted.tokens]])
        with torch.inference_mode():
            laws = to_probs(draft(text).logits[0, len(context) - 1 : -1], config)
        torch.testing.assert_close(drafted.probs, laws, rtol=0, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama, tiny_mistral])
def test_a05_f07_a_model_that_drafts_for_itself_is_always_accepted(build, k):
    model = build()
    stats = speculate(model, model, k, 120).stats
    *full, last = stats.rounds
    assert all((r.drafted, r.accepted) == (k, k) for r in full)
    assert last.accepted == last.drafted
    assert stats.acceptance_per_position == [1.0] * k
    assert stats.alpha == 1
    assert stats.alpha_overlap == pytest.approx(1)


@pytest.mark.parametrize("k", range(1, 9))
def test_a13_f13_every_round_but_the_last_ones_drafts_exactly_k(k):
    target = scripted()
    for draft in (target, scripted(1), rotated(target)):
        stats = speculate(target, draft, k, 60).stats
        emitted = 0
        for r in stats.rounds:
            assert r.drafted == min(k, 60 - emitted - 1)
            emitted += r.emitted


class Untouchable:
    def __getattr__(self, name):
        raise AssertionError(f"{name} was used")


def test_a13_k_0_is_plain_decoding_and_touches_no_drafter():
    target = scripted()
    for sampling in ({}, {"temperature": 1.0}):
        results = [
            run(generator=torch.Generator().manual_seed(5), **sampling)
            for run in (
                lambda **o: plain(target, 15, **o),
                lambda **o: speculate(target, Untouchable(), 0, 15, **o),
                lambda **o: speculate(target, None, 0, 15, **o),
            )
        ]
        assert results[0].new_tokens == results[1].new_tokens == results[2].new_tokens
        for result in results:
            assert result.stats.target_forwards == result.stats.new_tokens == 15
            assert result.stats.proposed == 0
            assert result.stats.mean_acceptance_length == 1
            assert result.stats.alpha is result.stats.draft_acceptance_rate is None


def test_f08_a_drafter_may_propose_less_or_nothing():
    class Moody:
        def begin(self, prompt, sampling): ...

        def propose(self, context, max_tokens, chooser):
            return Draft((0,) * (len(context) % (max_tokens + 1)), None)

        def rollback(self, length): ...

    target = scripted()
    assert speculate(target, Moody(), 4, 30).new_tokens == plain(target, 30).new_tokens


# Seeds


def sampled(seed=None, prompt=PROMPT, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    target = scripted(vocabulary=12)
    return speculate(target, scripted(1, 12), 4, 64, prompt, temperature=1.0, generator=generator, **options)


def test_a04_f05_the_seed_alone_decides_the_text_and_the_rounds():
    first = sampled(0)
    torch.rand(5), random.random(), np.random.rand()
    again = sampled(0)
    assert (first.new_tokens, first.stats) == (again.new_tokens, again.stats)
    assert len({sampled(seed).new_tokens for seed in range(10)}) >= 9
    assert sampled().new_tokens != sampled().new_tokens  # without a generator


def test_a04_the_order_of_prompts_does_not_matter():
    prompts = [prompt_of(5, 12, seed) for seed in range(3)]
    forwards = [sampled(7, prompt).new_tokens for prompt in prompts]
    backwards = [sampled(7, prompt).new_tokens for prompt in reversed(prompts)]
    assert forwards == backwards[::-1]


def test_a04_f05_global_random_state_stays_as_it_was():
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    sampled(0)
    sampled()
    plain(scripted(), 10, temperature=1.0)
    assert state() == before


# Streamer and callbacks


class Recorder:
    def __init__(self):
        self.values = []
        self.ended = 0

    def put(self, value):
        assert not self.ended
        self.values.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("n", [0, 1, 13])
def test_a_streamer_gets_the_prompt_then_the_tokens_of_each_round_then_the_end(k, n):
    streamer, target = Recorder(), scripted()
    result = speculate(target, scripted(1), k, n, streamer=streamer)
    prompt, *rounds = streamer.values
    assert torch.equal(prompt, PROMPT)
    assert all(value.dim() == 1 and value.dtype == torch.int64 for value in rounds)
    assert [len(value) for value in rounds] == [r.emitted for r in result.stats.rounds]
    assert torch.cat([prompt[0], *rounds]).tolist() == result.sequences[0].tolist()
    assert streamer.ended == 1


def test_a07_a_streamer_sees_nothing_behind_the_end_token():
    target = scripted()
    text = plain(target, 24).new_tokens
    streamer = Recorder()
    speculate(target, target, 8, 24, eos_token_id=text[3], streamer=streamer)
    assert torch.cat(streamer.values[1:]).tolist() == list(text[: text.index(text[3]) + 1])


def test_the_streamer_of_transformers_prints_the_text(capsys):
    class Tokenizer:
        def decode(self, tokens, **options):
            return "".join(f"<{token}> " for token in tokens)

    target = scripted()
    for skip_prompt in (True, False):
        result = speculate(target, scripted(1), 3, 20, streamer=TextStreamer(Tokenizer(), skip_prompt=skip_prompt))
        printed = [int(token) for token in re.findall(r"<(\d+)>", capsys.readouterr().out)]
        assert printed == (list(result.new_tokens) if skip_prompt else result.sequences[0].tolist())


def test_on_round_tells_the_kind_of_every_token():
    target = scripted()
    for draft in (target, rotated(target), scripted(1), PromptLookupDrafter()):
        seen = []
        options = {"temperature": 1.0, "generator": torch.Generator().manual_seed(0), "on_round": seen.append}
        result = speculate(target, draft, 3, 30, **options)
        assert tuple(token for emitted in seen for token in emitted.tokens) == result.new_tokens
        assert tuple(emitted.record for emitted in seen) == result.stats.rounds
        for emitted in seen:
            r = emitted.record
            last = "bonus" if r.accepted == r.drafted else "corrected"
            assert emitted.kinds == ("accepted",) * r.accepted + (last,)
            assert len(emitted.tokens) == r.emitted


def test_on_prefill_comes_once_when_both_caches_hold_the_prompt():
    target, draft = scripted(), scripted(1)
    fed = []
    options = {"on_prefill": lambda: fed.append([[call.tokens for call in model.fed] for model in (target, draft)])}
    speculate(target, draft, 3, 10, **options)
    assert fed == [[[(1, 3, 2)], [(1, 3, 2)]]]


def test_every_round_is_one_target_forward():
    target = scripted()
    stats = speculate(target, scripted(1), 3, 30).stats
    assert len(target.fed) == 1 + stats.target_forwards == 1 + len(stats.rounds)
    assert stats.mean_acceptance_length == 30 / len(stats.rounds)


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": -1}, "k is -1; allowed: an integer of at least 0, or a KPolicy"),
        ({"k": 2.5}, r"k is 2\.5; allowed"),
        ({"k": True}, "k is True; allowed"),
        ({"k": "four"}, "k is 'four'; allowed"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; allowed"),
        ({"max_new_tokens": 3.0}, r"max_new_tokens is 3\.0; allowed"),
        ({"max_new_tokens": 4093}, "exceed the target's context; allowed: 4096"),
        ({"prompt": torch.ones(2, 4, dtype=torch.int64)}, r"input_ids has shape \(2, 4\); allowed"),
        ({"prompt": torch.ones(1, 0, dtype=torch.int64)}, r"input_ids has shape \(1, 0\); allowed"),
        ({"prompt": torch.ones(4, dtype=torch.int64)}, r"input_ids has shape \(4,\); allowed"),
        ({"draft": None}, "k is 2 without a drafter; allowed"),
        ({"temperature": math.nan}, "temperature is nan; allowed"),
        ({"temperature": -1}, "temperature is -1; allowed"),
        ({"top_k": 0}, "top_k is 0; allowed"),
        ({"top_p": 1.5}, r"top_p is 1\.5; allowed"),
    ],
    ids=str,
)
def test_a03_a13_bad_arguments_are_refused_before_any_forward(changes, message):
    target, draft, streamer = scripted(), scripted(1), Recorder()
    arguments = {"draft": draft, "k": 2, "max_new_tokens": 5, "streamer": streamer} | changes
    with pytest.raises(InputError, match=message):
        speculate(target, **arguments)
    assert target.fed == draft.fed == streamer.values == []


@pytest.mark.parametrize("in_training", ["target", "draft"])
def test_a_model_in_training_mode_is_refused(in_training):
    models = {"target": tiny_gpt2(), "draft": tiny_gpt2()}
    models[in_training].train()
    with pytest.raises(InputError, match="GPT2LMHeadModel is in training mode"):
        speculate(models["target"], models["draft"], 2, 5)
