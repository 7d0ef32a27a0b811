"""Promises of the core that the other suites leave open. The mutants of `make mutants` showed which: see notes/mutants.md."""

import itertools
import re
from contextlib import nullcontext

import pytest
import torch
from stand_ins import ScriptedModel, Spy, random_table, tiny_gpt2, tiny_mistral
from test_cache import gpt1, jamba
from transformers import BloomConfig, MusicgenConfig

from specdec.cache import CachedModel, context_length
from specdec.drafters import ModelDrafter
from specdec.errors import InputError, InvariantError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.sampling import SamplingConfig, to_probs
from specdec.stats import AcceptanceStats, Round, bootstrap_interval, ratio_of_sums
from specdec.verify import block_acceptance, overlap, token_acceptance, verify_block, verify_tokens

PROMPT = torch.tensor([[1, 3, 2, 3]])


def scripted(seed=0, vocabulary=6):
    return ScriptedModel(random_table(vocabulary, seed))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# Statistics


def test_pooled_rounds_are_those_of_both_in_order():
    rounds = [Round(3, 3, n, n + 1, (0.5,) * 3) for n in range(3)]
    pooled = AcceptanceStats((rounds[0],)) + AcceptanceStats((rounds[1], rounds[2]))
    assert pooled.rounds == (rounds[0], rounds[1], rounds[2])


def test_intervals_are_by_default_those_of_seed_0_and_2000_resamples():
    """Recorded intervals were made with them, and can be computed anew to the last digit."""
    units = [(float(i % 7), 10.0 + i % 3) for i in range(30)]
    by_default = bootstrap_interval(units, ratio_of_sums)
    assert by_default == bootstrap_interval(units, ratio_of_sums, seed=0, resamples=2000, level=0.95)


# Laws


def test_of_equally_likely_tokens_top_p_keeps_the_first():
    """In every row alike, for which of them stay must not depend on how many positions one forward happened to cover."""
    logits = torch.zeros(3, 40)
    logits[1, 20:] = 1.0
    kept = to_probs(logits, SamplingConfig(1.0, top_p=0.25)) > 0
    assert [row.nonzero().flatten().tolist() for row in kept] == [[*range(10)], [*range(20, 27)], [*range(10)]]


# Verification


class Heads:
    """Passes every test, and draws the likeliest token."""

    def bernoulli(self, probability):
        return True

    def categorical(self, weights):
        return int(weights.argmax())


@pytest.mark.parametrize("verify", [verify_tokens, verify_block])
def test_no_overlap_is_above_1_though_the_sum_is_rounded(verify):
    laws = torch.randn(50, 3, 1000, generator=seeded(0)).softmax(dim=-1)
    assert overlap(laws, laws).max() > 1
    for p in laws:
        overlaps = verify([0, 1], p, p[:2], Heads()).overlaps
        assert max(overlaps) <= 1 and overlaps == pytest.approx((1, 1))


def test_the_acceptance_of_a_deterministic_draft_is_the_targets_probability():
    p = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert token_acceptance([1, 2], p, None) == [0.9, 0.3]


ACCEPTANCES = pytest.mark.parametrize("acceptance", [token_acceptance, block_acceptance])


SHAPES = [
    ((2, 3), (2, 3), r"p \(2, 3\) and q \(2, 3\)"),
    ((3, 3), (1, 3), r"p \(3, 3\) and q \(1, 3\)"),
    ((3, 3), (2, 4), r"p \(3, 3\) and q \(2, 4\)"),
    ((4, 3), None, r"p \(4, 3\) and q None"),
]


@ACCEPTANCES
@pytest.mark.parametrize(("p_shape", "q_shape", "shapes"), SHAPES)
def test_laws_whose_shapes_do_not_fit_are_refused_with_those_that_do(acceptance, p_shape, q_shape, shapes):
    p, q = torch.ones(p_shape) / 3, None if q_shape is None else torch.ones(q_shape) / 3
    needed = r"2 draft tokens need p of shape \(3, V\) and q of shape \(2, V\) or None"
    with pytest.raises(ValueError, match=rf"^{needed}, not {shapes}$"):
        acceptance([0, 1], p, q)


@ACCEPTANCES
def test_a_law_that_excludes_its_own_token_or_is_not_a_number_is_named_by_position(acceptance):
    good, bad = torch.full((3, 2), 0.5), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    with pytest.raises(ValueError, match=r"draft token 1 at position 1 has probability 0\.0 under"):
        acceptance([0, 1], good, bad)
    with pytest.raises(ValueError, match="the target gives draft token 1 at position 1 the probability nan"):
        acceptance([0, 1], torch.tensor([[0.5, 0.5], [0.5, torch.nan], [0.5, 0.5]]), good[:2])


# Plain decoding


@pytest.mark.parametrize(
    "option", [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.4}, {"eos_token_id": [2, 5]}, {"seed": 1}], ids=str
)
def test_plain_decoding_takes_the_options_of_speculative_decoding(option):
    def run(generate, seed=0, **options):
        sampling = {"temperature": 1.0, "generator": seeded(seed)}
        result = generate(scripted(), PROMPT, max_new_tokens=40, **sampling | options)
        return result.new_tokens, result.finish_reason

    plain = run(autoregressive_generate, **option)
    assert plain == run(speculative_generate, drafter=None, k=0, **option)
    assert plain != run(autoregressive_generate)


def test_plain_decoding_streams_and_reports_too():
    class Streamer:
        def put(self, value):
            events.append(("put", value.flatten().tolist()))

        def end(self):
            events.append("end")

    events = []
    result = autoregressive_generate(
        scripted(),
        PROMPT,
        max_new_tokens=2,
        streamer=Streamer(),
        on_prefill=lambda: events.append("prefill"),
        on_round=lambda emitted: events.append(emitted.tokens),
    )
    a, b = result.new_tokens
    assert events == [("put", PROMPT[0].tolist()), "prefill", ("put", [a]), (a,), ("put", [b]), (b,), "end"]


# Speculative decoding


def test_a_drafter_is_asked_for_at_least_one_token():
    for k in (1, 3):
        spy = Spy(ModelDrafter(scripted(1)))
        speculative_generate(scripted(), PROMPT, drafter=spy, k=k, max_new_tokens=20)
        assert all(1 <= limit <= k for _, limit in spy.asked)


@pytest.mark.parametrize("k", [1, 3])
def test_a_drafter_hears_after_every_round_what_still_stands(k):
    class Listener(Spy):
        def rollback(self, length):
            stands.append(length)
            super().rollback(length)

    stands = []
    listener = Listener(ModelDrafter(scripted(1)))
    rounds = speculative_generate(scripted(), PROMPT, drafter=listener, k=k, max_new_tokens=20).stats.rounds
    lengths = itertools.accumulate((r.emitted for r in rounds), initial=PROMPT.shape[1])
    assert stands == [length - 1 for length in lengths][1:]  # all but the last token


def test_of_the_prompt_only_the_last_logits_are_asked_for():
    """All of them would take the vocabulary times the prompt in memory."""

    class Model(ScriptedModel):
        def forward(self, tokens, logits_to_keep=0, **options):
            asked.append((tokens.shape[1], logits_to_keep))
            return super().forward(tokens, logits_to_keep=logits_to_keep, **options)

    asked = []
    drafter = ModelDrafter(Model(random_table(6, 1)))
    speculative_generate(Model(random_table(6, 0)), PROMPT, drafter=drafter, k=2, max_new_tokens=3)
    assert asked[:2] == [(3, 1), (3, 1)]  # of the draft and of the target


def test_a_prompt_of_any_integer_type_gives_int64():
    expected = autoregressive_generate(scripted(), PROMPT, max_new_tokens=10)
    for dtype in (torch.int32, torch.uint8):
        result = autoregressive_generate(scripted(), PROMPT.to(dtype), max_new_tokens=10)
        assert result.sequences.dtype == torch.int64
        assert torch.equal(result.sequences, expected.sequences)


@pytest.mark.parametrize("room", [20, 8])  # with 8 positions the draft stops at the ninth token
@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_that_is_not_asked_any_more_need_not_keep_up_to_pass_the_check(k, room):
    target = scripted()
    drafter = ModelDrafter(ScriptedModel(target.table, context=room))
    for n in range(1, 14):  # some of them leave, after a full acceptance, one token for the target alone
        options = {"max_new_tokens": n, "check_invariants": True}
        result = speculative_generate(target, PROMPT, drafter=drafter, k=k, **options)
        assert result.stats.accepted == result.stats.proposed
        assert result.stats.new_tokens == n


# Caches


def test_the_context_length_of_a_composite_model_is_its_decoders():
    model = scripted()
    parts = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
    model.config = MusicgenConfig(**parts, decoder={"max_position_embeddings": 32})
    assert context_length(model) == 32


def test_a_model_without_positions_has_a_context_of_2_to_the_31_minus_1():
    model = scripted()
    model.config = BloomConfig()
    assert context_length(model) == 2147483647


@pytest.mark.parametrize("fed", [1, 2])
def test_after_a_rollback_to_nothing_a_new_text_can_begin(fed):
    for build in (scripted, tiny_gpt2, tiny_mistral):  # windows that were never fed cannot be cropped
        cached = CachedModel(build())
        cached.rollback(0)  # never fed
        cached.forward(torch.tensor([3, 1])[:fed])
        cached.rollback(0)
        text = torch.tensor([2, 4])
        assert torch.equal(cached.forward(text), CachedModel(build()).forward(text))


def test_tokens_are_fed_and_checked_on_the_models_device():
    class Elsewhere(ScriptedModel):
        device = torch.device("meta")

        def forward(self, tokens, **options):
            devices.add(tokens.device)
            return super().forward(torch.zeros(tokens.shape, dtype=tokens.dtype), **options)

    devices = set()
    cached = CachedModel(Elsewhere(random_table(4, 0)))
    cached.forward(torch.tensor([1, 2]))
    cached.check(torch.tensor([1, 2]))
    assert devices == {torch.device("meta")}


@pytest.mark.parametrize("fed", [[], [2], [2, 0], [2, 0, 3]])
def test_a_check_compares_texts_of_any_length(fed):
    text = torch.tensor(fed, dtype=torch.int64)
    cached = CachedModel(scripted())
    if fed:
        cached.forward(text)
    cached.check(text, tolerance=0)  # the keys are the tokens themselves: not even rounding
    if fed:
        with pytest.raises(InvariantError, match=r"^keys of layer 0 differ by 1 from"):
            cached.check(text + 1)
    with pytest.raises(InvariantError, match=rf"^the cache of {len(fed) + 1} tokens has the lengths \[{len(fed)}\]$"):
        cached.check(torch.tensor([*fed, 1]))


class Shortsighted(ScriptedModel):
    """Fills a cache as it should, and does not read it so."""

    def forward(self, tokens, cache=None, **options):
        shift = 0 if cache is None or cache.get_seq_length() == 0 else 1
        output = super().forward(tokens, cache=cache, **options)
        output.logits = output.logits.roll(shift, -1)
        return output


@pytest.mark.parametrize("context", [4, 100])  # one position is left to try, or many
def test_a_check_notices_a_sound_cache_that_is_not_read_as_it_should_be(context):
    text = torch.tensor([1, 3, 2])
    cached = CachedModel(Shortsighted(random_table(6, 0), context=context))
    cached.forward(text)
    with pytest.raises(InvariantError, match=r"^logits of the next token differ by \d"):
        cached.check(text)


def test_a_full_cache_can_be_checked_though_no_token_follows():
    text = torch.tensor([1, 3, 2])
    cached = CachedModel(tiny_gpt2(context=3))
    cached.forward(text)
    cached.check(text)
    with pytest.raises(InvariantError, match=r"^keys of layer 0 differ by"):
        cached.check(text + 1)


def test_a_cache_may_differ_by_a_thousandth_by_default():
    text = torch.tensor([3, 1, 4, 1, 5])
    message = r"^keys of layer 0 differ by 0\.00\d+ from those of a fresh pass; allowed: 0\.001$"
    for shift, expectation in ((1e-5, nullcontext()), (2e-3, pytest.raises(InvariantError, match=message))):
        cached = CachedModel(tiny_gpt2())
        cached.forward(text)
        layer = cached._cache.layers[0]
        layer.keys = layer.keys + shift
        with expectation:
            cached.check(text)


class Halves(ScriptedModel):
    """Keys and values are (token, token), in bfloat16."""

    def forward(self, tokens, cache=None, **options):
        if cache is not None:
            entries = tokens[:, None, :, None].expand(1, 1, -1, 2).bfloat16()
            cache.update(entries, entries, 0)
        return super().forward(tokens, **options)


NOTHING = (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([NOTHING, NOTHING, NOTHING, (1.0, 0.0)], None),
        ([NOTHING, NOTHING, NOTHING, (1.25, 0.0)], "0.353"),
        ([NOTHING, NOTHING, NOTHING, (0.0, -1.25)], "0.353"),
        ([NOTHING, NOTHING, NOTHING, (1.0, 1.0)], "0.4"),
        ([(0.75, 0.0)] * 4, None),  # each entry counts for itself
    ],
)
def test_in_16_bits_an_entry_may_differ_by_less_than_a_third_of_the_mean_size(changes, error):
    """The text's keys have sizes of 2√2, three times, and 4√2, of which the mean is 2.5√2."""
    text = torch.tensor([2, 2, 2, 4])
    cached = CachedModel(Halves(random_table(6, 0)[:1].expand(6, 6, 6)))  # laws of the last token alone
    cached.forward(text)
    cached._cache.layers[0].keys = cached._cache.layers[0].keys + torch.tensor(changes).bfloat16()
    message = rf"^keys of layer 0 differ by {error}\d* from those of a fresh pass; allowed: 0\.3$"
    with pytest.raises(InvariantError, match=message) if error else nullcontext():
        cached.check(text)


# Refusals


def test_logits_that_are_no_numbers_are_refused_with_a_hint():
    message = "a model's logits hold NaN or infinity; allowed: numbers (float16 may overflow where float32 does not)"
    with pytest.raises(InputError, match=rf"^{re.escape(message)}$"):
        to_probs(torch.tensor([0.0, torch.nan]), SamplingConfig(1.0))


@pytest.mark.parametrize("k", [1, 4])
def test_drafting_without_a_drafter_is_refused(k):
    message = rf"^k is {k} without a drafter; allowed: k = 0 \(plain decoding\), or a drafter$"
    with pytest.raises(InputError, match=message):
        speculative_generate(scripted(), PROMPT, drafter=None, k=k, max_new_tokens=3)


@pytest.mark.parametrize("verify", ["tree", 3, None, []])
def test_an_unknown_rule_is_refused_with_the_known_ones(verify):
    message = rf"^verify is {re.escape(repr(verify))}; allowed: token, block, or a function$"
    with pytest.raises(InputError, match=message):
        speculative_generate(scripted(), PROMPT, drafter=None, k=0, max_new_tokens=3, verify=verify)


def test_a_refused_cache_says_which_models_can_be_used():
    with pytest.raises(InputError, match=r"; allowed: models whose layers are full or sliding-window attention$"):
        CachedModel(jamba())
    with pytest.raises(InputError, match=r"; allowed: models that use transformers' Cache$"):
        CachedModel(gpt1()).forward(torch.tensor([1, 2, 3]))
