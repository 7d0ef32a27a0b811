"""Every drafter keeps the same promises; then each one's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import ScriptedModel, Spy, nearby, random_table, tiny_gpt2, tiny_llama, tiny_mistral

from specdec import drafters
from specdec.chance import GeneratorChooser
from specdec.drafters import Draft, ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.llama import LlamaDecoder, packed_linear
from specdec.sampling import SamplingConfig, to_probs

DRAFTERS = {
    "gpt2": lambda: ModelDrafter(tiny_gpt2()),
    "llama": lambda: ModelDrafter(tiny_llama()),
    "sliding window": lambda: ModelDrafter(tiny_mistral(window=8)),
    "scripted": lambda: ModelDrafter(ScriptedModel(random_table(40, 0))),
    "decoder": lambda: ModelDrafter(LlamaDecoder(tiny_llama())),
    "packed decoder": lambda: ModelDrafter(LlamaDecoder(tiny_llama(), packed_linear)),
    "short context": lambda: ModelDrafter(tiny_gpt2(context=20)),
    "decoder, short context": lambda: ModelDrafter(LlamaDecoder(tiny_llama(max_position_embeddings=20))),
    "smaller vocabulary": lambda: ModelDrafter(tiny_llama(vocab_size=32), vocabulary=40),
    "larger vocabulary": lambda: ModelDrafter(tiny_llama(vocab_size=48), vocabulary=40),
    "decoder, smaller vocabulary": lambda: ModelDrafter(LlamaDecoder(tiny_llama(vocab_size=32)), vocabulary=40),
    "lookup": lambda: PromptLookupDrafter(),
    "lookup of one token": lambda: PromptLookupDrafter(max_ngram=1),
}
SAMPLINGS = [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(0.7, top_k=5, top_p=0.9)]
GREEDY = SAMPLINGS[0]


def seeded(seed):
    return GeneratorChooser(torch.Generator().manual_seed(seed))


def begun(drafter, context, sampling=GREEDY):
    drafter.begin(context, sampling)
    return drafter


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_conformance(name, sampling):
    """Through many rounds, with full, partial and no acceptance: what is proposed fits, and is what a fresh start proposes."""
    drafter, fresh = DRAFTERS[name](), DRAFTERS[name]()
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(4, (6,), generator=generator)  # few different tokens, for the lookup to find some
    drafter.begin(context, sampling)
    for round_ in range(15):
        max_tokens = round_ % 4 + 1
        draft = drafter.propose(context, max_tokens, seeded(round_))
        assert len(draft.tokens) <= max_tokens
        assert all(isinstance(token, int) and 0 <= token < 40 for token in draft.tokens)
        if draft.probs is not None:
            assert draft.probs.shape == (len(draft.tokens), 40)
            torch.testing.assert_close(draft.probs.sum(dim=-1), torch.ones(len(draft.tokens)))
            assert all(row[token] > 0 for row, token in zip(draft.probs, draft.tokens, strict=True))
        expected = begun(fresh, context, sampling).propose(context, max_tokens, seeded(round_))
        assert draft.tokens == expected.tokens
        if draft.probs is not None:
            torch.testing.assert_close(draft.probs, expected.probs, rtol=0, atol=1e-5)
        accepted = [len(draft.tokens), 0, len(draft.tokens) // 2][round_ % 3]
        committed = [*draft.tokens[:accepted], int(torch.randint(4, (), generator=generator))]
        context = torch.cat([context, torch.tensor(committed)])
        drafter.rollback(len(context) - 1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_new_text_starts_from_nothing(name):
    drafter = DRAFTERS[name]()
    first, second = torch.tensor([1, 2, 3, 1, 2, 3, 1]), torch.tensor([2])
    begun(drafter, first).propose(first, 4, seeded(0))
    draft = begun(drafter, second).propose(second, 4, seeded(0))
    expected = begun(DRAFTERS[name](), second).propose(second, 4, seeded(0))
    assert draft.tokens == expected.tokens


# A model


class Recorder:
    """Notes the laws that it is asked to draw from."""

    def __init__(self):
        self.laws = []
        self.chooser = seeded(0)

    def categorical(self, weights):
        self.laws.append(weights)
        return self.chooser.categorical(weights)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_a01_f01_probs_are_the_laws_that_were_drawn_from(sampling):
    model, context, recorder = tiny_gpt2(), torch.tensor([3, 1, 2]), Recorder()
    draft = begun(ModelDrafter(model), context, sampling).propose(context, 4, recorder)
    assert torch.equal(draft.probs, torch.stack(recorder.laws))
    text = torch.cat([context, torch.tensor(draft.tokens)])
    with torch.inference_mode():
        laws = to_probs(model(text[None]).logits[0, 2:-1], sampling)
    torch.testing.assert_close(draft.probs, laws, rtol=0, atol=1e-5)
    assert torch.equal(draft.probs == 0, laws == 0)  # nothing outside the filter


def test_a05_f07_a_full_acceptance_leaves_two_tokens_to_be_fed_and_anything_else_one():
    model = ScriptedModel(random_table(4, 0))
    context = torch.tensor([1, 2, 3])
    drafter = begun(ModelDrafter(model), context)
    assert [fed.tokens for fed in model.fed] == [(1, 2)]
    a, b, c = drafter.propose(context, 3, seeded(0)).tokens
    assert [fed.tokens for fed in model.fed[1:]] == [(3,), (a,), (b,)]
    drafter.rollback(6)  # all three stand, and a bonus token 0 follows
    model.fed.clear()
    context = torch.tensor([1, 2, 3, a, b, c, 0])
    d, _ = drafter.propose(context, 2, seeded(0)).tokens
    assert (model.fed[0].cached, model.fed[0].tokens) == ((1, 2, 3, a, b), (c, 0))
    drafter.rollback(8)  # d stands, then a corrected token 3
    model.fed.clear()
    drafter.propose(torch.tensor([1, 2, 3, a, b, c, 0, d, 3]), 1, seeded(0))
    assert (model.fed[0].cached, model.fed[0].tokens) == ((1, 2, 3, a, b, c, 0, d), (3,))


@pytest.mark.parametrize(("length", "proposed"), [(6, 3), (7, 2), (8, 1), (9, 0), (12, 0)])
def test_where_its_context_ends_a_model_proposes_no_more(length, proposed):
    """Eight positions: the last token proposed need not be fed."""
    context = torch.arange(length) % 4
    for begin_with in (1, length):
        drafter = begun(ModelDrafter(tiny_gpt2(context=8)), context[:begin_with])
        assert len(drafter.propose(context, 3, seeded(0)).tokens) == proposed
        drafter.rollback(length)


@pytest.mark.parametrize(("sampling", "softmaxes"), [(SamplingConfig(1.0), 1), (SamplingConfig(0.7), 2), (GREEDY, 2)])
def test_the_confidence_is_the_models_own_softmax_and_computed_once(monkeypatch, sampling, softmaxes):
    model, context, calls = tiny_gpt2(), torch.tensor([3, 1, 2]), []
    monkeypatch.setattr(drafters, "to_probs", lambda *arguments: calls.append(arguments) or to_probs(*arguments))
    with torch.inference_mode():
        own = model(context[None]).logits[0, -1].softmax(dim=-1)
    (token,) = begun(ModelDrafter(model, 1.0), context, sampling).propose(context, 3, seeded(0)).tokens
    assert len(calls) == softmaxes
    for threshold, proposed in ((float(own[token]) - 1e-4, 2), (float(own[token]) + 1e-4, 1)):
        drafter = begun(ModelDrafter(model, threshold), context, sampling)
        assert len(drafter.propose(context, 2, seeded(0)).tokens) == proposed


# A model whose vocabulary is padded to another size than the target's


def resized(model, vocabulary):
    """The same Llama with the last ids cut off, or with random new ones."""
    other = tiny_llama(9, vocab_size=vocabulary)
    for name, weight in other.state_dict().items():
        source = model.state_dict()[name]
        rows = min(len(weight), len(source))
        weight[:rows] = source[:rows]
    return other


@pytest.mark.parametrize(("size", "of_draft"), [(40, 48), (48, 40)])
@pytest.mark.parametrize("verify", ["token", "block"])
def test_a09_a_draft_with_a_padded_vocabulary_decodes_greedily_what_the_target_does(size, of_draft, verify):
    target = tiny_llama(vocab_size=size)
    spy = Spy(ModelDrafter(resized(nearby(target, 0.1), of_draft), vocabulary=size))
    prompt = torch.tensor([[5, 3, size - 1, 7]])
    options = {"drafter": spy, "k": 3, "max_new_tokens": 60, "verify": verify, "check_invariants": True}
    result = speculative_generate(target, prompt, **options)
    assert result.new_tokens == autoregressive_generate(target, prompt, max_new_tokens=60).new_tokens
    assert result.stats.accepted > 10
    assert all(token < 40 for draft in spy.drafts for token in draft.tokens)
    assert all(draft.probs.shape[1] == size for draft in spy.drafts)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a09_ids_that_only_the_target_has_are_read_as_the_drafts_last_one(temperature):
    target, draft = tiny_llama(vocab_size=48), tiny_llama(1, vocab_size=40)
    with torch.no_grad():
        target.lm_head.weight[40:] += target.lm_head.weight[40:].sign() * 2  # often far from the others
    drafter = ModelDrafter(draft, vocabulary=48)
    options = {"max_new_tokens": 60, "temperature": temperature, "generator": torch.Generator().manual_seed(0)}
    result = speculative_generate(
        target, torch.tensor([[47, 3, 41]]), drafter=drafter, k=3, check_invariants=True, **options
    )
    assert sum(token >= 40 for token in result.new_tokens) > 10
    read = torch.tensor([1, 39, 2])  # for 1, 45, 2
    laws = [
        begun(ModelDrafter(draft, vocabulary=48), text).propose(text, 1, seeded(0)).probs
        for text in (read, torch.tensor([1, 45, 2]))
    ]
    assert torch.equal(*laws)


def test_without_a_vocabulary_laws_have_the_shape_of_the_drafts_own():
    context = torch.tensor([1, 2])
    assert begun(ModelDrafter(tiny_gpt2()), context).propose(context, 1, seeded(0)).probs.shape == (1, 40)


@pytest.mark.parametrize("vocabulary", [0, -1, 2.0, True, "40"])
def test_a_vocabulary_that_is_no_size_is_refused(vocabulary):
    with pytest.raises(InputError, match=f"vocabulary is {vocabulary!r}; allowed: an integer"):
        ModelDrafter(tiny_gpt2(), vocabulary=vocabulary)


# The ends of the contexts, where learned positions end


@pytest.mark.parametrize("prompt_length", [1, 8, 15, 16, 17, 30])
@pytest.mark.parametrize("k", [1, 4])
def test_context_a_draft_with_a_shorter_context_than_the_target_stops_proposing_there(k, prompt_length):
    target = tiny_gpt2(context=64)
    draft = nearby(target, 0.05)
    draft.transformer.wpe.weight.data = draft.transformer.wpe.weight.data[:16]  # position 16 is an IndexError
    draft.config.n_positions = 16
    spy = Spy(ModelDrafter(draft))
    prompt = torch.arange(prompt_length)[None] % 7
    options = {"max_new_tokens": 64 - prompt_length}
    result = speculative_generate(target, prompt, drafter=spy, k=k, check_invariants=True, **options)
    assert result.new_tokens == autoregressive_generate(target, prompt, **options).new_tokens
    for (context, _), proposal in zip(spy.asked, spy.drafts, strict=True):
        assert len(proposal.tokens) <= max(0, 17 - len(context))  # the last token proposed need not be fed
    assert (result.stats.proposed > 0) == (prompt_length < 17)


@pytest.mark.parametrize("of_draft", [8, 24, 64])
@pytest.mark.parametrize("prompt_length", [1, 9, 23])
@pytest.mark.parametrize("k", [1, 4])
def test_context_of_the_target_can_be_filled_exactly_and_one_token_more_is_refused(k, prompt_length, of_draft):
    target, drafter = tiny_gpt2(context=24), ModelDrafter(tiny_gpt2(context=of_draft))
    prompt = torch.arange(prompt_length)[None] % 7
    room = 24 - prompt_length
    result = speculative_generate(target, prompt, drafter=drafter, k=k, max_new_tokens=room, check_invariants=True)
    assert result.sequences.shape == (1, 24)
    assert result.new_tokens == autoregressive_generate(target, prompt, max_new_tokens=room).new_tokens
    message = f"prompt of {prompt_length} tokens and max_new_tokens={room + 1} exceed the target's context; allowed: 24"
    with pytest.raises(InputError, match=message):
        speculative_generate(target, prompt, drafter=drafter, k=k, max_new_tokens=room + 1)
    with pytest.raises(InputError, match=message):
        autoregressive_generate(target, prompt, max_new_tokens=room + 1)


# Prompt lookup


def lookup(context, max_tokens, max_ngram=3):
    return PromptLookupDrafter(max_ngram).propose(torch.tensor(context), max_tokens, seeded(0))


def test_the_longest_ending_is_tried_first():
    # "7 8" occurs once and is followed by 1; "8" alone occurs later and is followed by 2.
    assert lookup([7, 8, 1, 8, 2, 7, 8], 1).tokens == (1,)
    assert lookup([7, 8, 1, 8, 2, 7, 8], 1, max_ngram=1).tokens == (2,)


def test_of_equal_endings_the_latest_complete_one_wins():
    text = [5, 1, 2, 0, 5, 3, 4, 0, 5, 6, 5]
    assert lookup(text, 1).tokens == (6,)
    assert lookup(text, 2).tokens == (6, 5)
    assert lookup(text, 3).tokens == (3, 4, 0)  # after the last one only two tokens follow


def test_where_none_is_complete_the_one_followed_by_most_wins():
    assert lookup([5, 1, 5, 2, 5], 9).tokens == (1, 5, 2, 5)


def test_nothing_repeated_nothing_proposed():
    assert lookup([1, 2, 3, 4], 3) == Draft((), None)
    assert lookup([1], 3) == Draft((), None)


def by_brute_force(context, max_tokens, max_ngram):
    for n in range(max_ngram, 0, -1):
        starts = [i + n for i in range(len(context) - n) if context[i : i + n] == context[-n:]]
        if starts:
            complete = [start for start in starts if start + max_tokens <= len(context)]
            start = max(complete) if complete else min(starts)
            return tuple(context[start : start + max_tokens])
    return ()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(1, 6), st.integers(1, 4))
def test_equals_a_search_by_brute_force(context, max_tokens, max_ngram):
    draft = lookup(context, max_tokens, max_ngram)
    assert draft == Draft(by_brute_force(context, max_tokens, max_ngram), None)


@pytest.mark.parametrize("max_ngram", [0, -1])
def test_an_empty_ngram_is_refused(max_ngram):
    with pytest.raises(InputError, match=f"max_ngram is {max_ngram}; allowed"):
        PromptLookupDrafter(max_ngram)
