"""Both caches hold what one pass over the text would have left, after every round; and a check that no fault slips through.

Wrong caches of the draft change nothing in the output: the target verifies whatever it is given. At most acceptance sinks, so
that comparing texts cannot find them, and neither can a statistical test. Therefore the faults below.
"""

import copy
import random

import pytest
import torch
from stand_ins import disagreeing, nearby, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_mistral

from specdec import drafters, generate
from specdec.cache import CachedModel
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InvariantError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.quantize import bfloat16_copy, int8_copy
from specdec.verify import Verdict

WINDOW = 8
MODELS = {
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "mistral, eager": lambda: tiny_mistral(window=WINDOW),
    "mistral, sdpa": lambda: tiny_mistral(window=WINDOW, attention="sdpa"),
    "gemma3, eager": lambda: tiny_gemma3(window=WINDOW),
    "gemma3, sdpa": lambda: tiny_gemma3(window=WINDOW, attention="sdpa"),
}


def prompt_of(length, seed=0):
    return torch.randint(40, (1, length), generator=torch.Generator().manual_seed(seed))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def plain(target, prompt, tokens):
    return autoregressive_generate(target, prompt, max_new_tokens=tokens).new_tokens


def outcome(round_):
    """How much of a round's draft was accepted."""
    if round_.accepted == round_.drafted:
        return "all"
    return "some" if round_.accepted else "nothing"


# The product


# Each of the three outcomes after each.
PATTERN = ["all", "all", "some", "some", "nothing", "nothing", "all", "nothing", "some", "all"]


@pytest.mark.parametrize("name", MODELS)
def test_f07_caches_hold_the_text_after_any_pattern_of_acceptance(name):
    """Verdicts by a pattern and by lot, whatever the models say."""
    target, lot = MODELS[name](), random.Random(name)
    drafter = ModelDrafter(nearby(target, 0.1))
    for k, prompt_length, pattern in ((1, 5, []), (3, 1, PATTERN), (5, 10, [])):
        asked = iter(pattern)

        def verdict(tokens, p, q, chooser, asked=asked):
            some = lot.randint(0, len(tokens)) if len(tokens) < 2 else lot.randint(1, len(tokens) - 1)
            accepted = {"all": len(tokens), "some": some, "nothing": 0}[next(asked, "some")]
            return Verdict(accepted, lot.randrange(40), accepted == len(tokens), ())

        options = {"drafter": drafter, "k": k, "max_new_tokens": 32 if pattern else 10, "check_invariants": True}
        result = speculative_generate(target, prompt_of(prompt_length), verify=verdict, **options)
        assert [outcome(r) for r in result.stats.rounds][: len(pattern)] == pattern


DRAFTS = {
    "itself": lambda target: target,
    "close": lambda target: nearby(target, 0.03),
    "far": lambda target: nearby(target, 0.15),
    "disagreeing": disagreeing,
}


@pytest.mark.parametrize("name", MODELS)
def test_f07_caches_hold_the_text_while_decoding(name):
    target, lot, seen = MODELS[name](), random.Random(name), set()
    for number, (draft, temperature) in enumerate([*zip(DRAFTS, [0.0, 0.7, 0.0, 1.2], strict=True), ("close", 0.0)]):
        threshold = 0.3 if draft == "close" else 0.0
        prompt = prompt_of([1, 6, WINDOW + 3][number % 3], number)
        result = speculative_generate(
            target,
            prompt,
            drafter=ModelDrafter(DRAFTS[draft](target), threshold),
            k=lot.randint(2, 5),
            max_new_tokens=14,
            temperature=temperature,
            verify=["token", "block"][number % 2],
            generator=seeded(number),
            check_invariants=True,
        )
        seen |= {outcome(r) for r in result.stats.rounds if r.drafted > 1}
        assert result.sequences.shape[1] > WINDOW + 5
        if temperature == 0:
            assert result.new_tokens == plain(target, prompt, 14)
    assert seen == {"all", "some", "nothing"}


def test_f07_a_look_up_keeps_nothing_and_the_target_everything():
    target = tiny_llama()
    prompt = torch.tensor([[1, 2, 3, 1, 2, 3, 1]])
    options = {"drafter": PromptLookupDrafter(), "k": 3, "check_invariants": True}
    result = speculative_generate(target, prompt, max_new_tokens=30, **options)
    assert result.stats.proposed > 0
    assert result.new_tokens == plain(target, prompt, 30)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a06_windows_beside_full_attention_hold_when_the_text_outgrows_them(attention):
    target = tiny_gemma3(window=16, attention=attention)
    prompt = prompt_of(10)
    expected = plain(target, prompt, 40)
    theirs = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    assert tuple(theirs[0, 10:].tolist()) == expected
    assert len(set(expected)) > 8
    for draft in (nearby(target, 0.1), tiny_gemma3(1, window=8, attention=attention)):
        result = speculative_generate(target, prompt, drafter=ModelDrafter(draft), k=4, max_new_tokens=40)
        assert result.new_tokens == expected


# Faults of the kind that a person makes, each where it would be made. Most leave the output as it is.


class OneTooFew(CachedModel):
    """A rollback leaves one token too many."""

    def rollback(self, length):
        super().rollback(min(length + 1, self.length))


class OneTooMany(CachedModel):
    """A rollback takes one token too many."""

    def rollback(self, length):
        super().rollback(max(length - 1, 0))


class WrongToken(CachedModel):
    """Behind the prompt another token is fed than the one drawn."""

    def forward(self, tokens, keep=None):
        return super().forward(tokens if self.length == 0 else (tokens + 1) % 40, keep)


class ShiftedPositions(CachedModel):
    """Positions are counted from 1."""

    def __init__(self, model):
        super().__init__(model)

        def shifted(*arguments, **options):
            positions = torch.arange(arguments[0].shape[1]) + self._cache.get_seq_length() + 1
            return model(*arguments, position_ids=positions[None], **options)

        shifted.device = model.device
        self.forward_model = shifted

    def forward(self, tokens, keep=None):
        model, self.model = self.model, self.forward_model
        try:
            return super().forward(tokens, keep)
        finally:
            self.model = model


class CoarseKeys(CachedModel):
    """The keys of one layer go through bfloat16."""

    def forward(self, tokens, keep=None):
        logits = super().forward(tokens, keep)
        layer = self._cache.layers[1]
        layer.keys = layer.keys.bfloat16().float()
        return logits


class SmallerWindow(CachedModel):
    """The cache is made for a window of half the size."""

    def __init__(self, model):
        small = copy.copy(model)
        small.config = copy.deepcopy(model.config)
        small.config.sliding_window //= 2
        super().__init__(small)
        self.model = model


class StaleKeys(CachedModel):
    """After a rejection the entry of the last token that stands is overwritten by that of the rejected one."""

    part = "keys"

    @torch.inference_mode()
    def rollback(self, length):
        stale = [getattr(layer, self.part)[..., length : length + 1, :].clone() for layer in self._cache.layers]
        super().rollback(length)
        for layer, entry in zip(self._cache.layers, stale, strict=True):
            if entry.shape[-2] == 1:
                getattr(layer, self.part)[..., -1:, :] = entry


class StaleValues(StaleKeys):
    part = "values"


class OnlyTheLastToken(CachedModel):
    """Behind the prompt one token is fed at a time: after a full acceptance the last draft token is never fed."""

    def forward(self, tokens, keep=None):
        return super().forward(tokens if self.length == 0 else tokens[-1:], keep)


class WithoutTheFirstToken(CachedModel):
    """The first token of the prompt is forgotten."""

    def forward(self, tokens, keep=None):
        return super().forward(tokens[1:] if self.length == 0 else tokens, keep)


TARGET, DRAFT = (generate, "open_cache"), (drafters, "open_cache")
SILENT, VISIBLE = True, False
# Whose cache is at fault, how, in which model, what the check says, and whether the text is that of plain decoding all the same.
FAULTS = {
    "target rolled back too little": (TARGET, OneTooFew, tiny_gpt2, "lengths", VISIBLE),
    "target rolled back too far": (TARGET, OneTooMany, tiny_gpt2, "lengths", VISIBLE),
    "target's positions off by one": (TARGET, ShiftedPositions, tiny_gpt2, "keys of layer 0", VISIBLE),
    "target's rotary positions off by one": (TARGET, ShiftedPositions, tiny_llama, "keys of layer 0", SILENT),
    "target's keys coarse": (TARGET, CoarseKeys, tiny_llama, "keys of layer 1", SILENT),
    "draft rolled back too little": (DRAFT, OneTooFew, tiny_gpt2, "-1 tokens short", VISIBLE),
    "draft rolled back too far": (DRAFT, OneTooMany, tiny_gpt2, "2 tokens short", SILENT),
    "draft fed other tokens": (DRAFT, WrongToken, tiny_gpt2, "keys of layer 0", SILENT),
    "draft's positions off by one": (DRAFT, ShiftedPositions, tiny_gpt2, "keys of layer 0", SILENT),
    "draft's rotary positions off by one": (DRAFT, ShiftedPositions, tiny_llama, "keys of layer 0", SILENT),
    "draft's keys coarse": (DRAFT, CoarseKeys, tiny_llama, "keys of layer 1", SILENT),
    "draft's values stale": (DRAFT, StaleValues, tiny_llama, "values of layer 0", SILENT),
    "draft's window too small": (DRAFT, SmallerWindow, tiny_mistral, "keys of layer 0: 7 of 8 entries", SILENT),
    "draft keeps a rejected token": (DRAFT, StaleKeys, tiny_llama, "keys of layer 0", SILENT),
    "draft never fed the last draft token": (DRAFT, OnlyTheLastToken, tiny_gpt2, "keys of layer 0", SILENT),
    "draft without the first token": (DRAFT, WithoutTheFirstToken, tiny_gpt2, "keys of layer 0", SILENT),
}


def decode(build, **options):
    target = build()
    drafter = ModelDrafter(nearby(target, 0.03))
    return speculative_generate(target, prompt_of(6), drafter=drafter, k=3, max_new_tokens=30, **options)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama, tiny_mistral])
def test_f07_without_a_fault_the_same_text_passes(build):
    result = decode(build, check_invariants=True)
    assert {"all", "nothing"} <= {outcome(r) for r in result.stats.rounds}
    assert result.new_tokens == plain(build(), prompt_of(6), 30)


@pytest.mark.parametrize("fault", FAULTS)
def test_f07_a_fault_is_caught_by_the_check_and_mostly_by_nothing_else(fault, monkeypatch):
    where, faulty, build, message, silent = FAULTS[fault]
    expected = plain(build(), prompt_of(6), 30)
    monkeypatch.setattr(*where, faulty)
    if silent:
        assert decode(build).new_tokens == expected
    with pytest.raises(InvariantError, match=message):
        decode(build, check_invariants=True)


def test_f07_a_drafter_that_keeps_its_last_text_is_caught(monkeypatch):
    class Forgetful(ModelDrafter):
        def begin(self, prompt, sampling):
            if not hasattr(self, "_cached"):
                super().begin(prompt, sampling)

    target = tiny_gpt2()
    drafter = Forgetful(nearby(target, 0.03))
    options = {"drafter": drafter, "k": 3, "max_new_tokens": 12, "check_invariants": True}
    speculative_generate(target, prompt_of(6), **options)
    longer = prompt_of(30, seed=1)
    unchecked = speculative_generate(target, longer, **options | {"check_invariants": False})
    assert unchecked.new_tokens == plain(target, longer, 12)
    with pytest.raises(InvariantError, match="keys of layer 0"):
        speculative_generate(target, prompt_of(60, seed=2), **options)


def test_f07_the_check_itself_changes_nothing():
    target = tiny_mistral(window=WINDOW)
    options = {"k": 3, "max_new_tokens": 30, "temperature": 1.0}
    results = [
        speculative_generate(
            target,
            prompt_of(6),
            drafter=ModelDrafter(nearby(target, 0.05)),
            generator=seeded(0),
            check_invariants=checked,
            **options,
        )
        for checked in (False, True)
    ]
    assert (results[0].new_tokens, results[0].stats) == (results[1].new_tokens, results[1].stats)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama, tiny_mistral])
@pytest.mark.parametrize("copied", [bfloat16_copy, int8_copy])
def test_rounding_in_16_bits_is_no_fault(build, copied):
    target = build()
    for pair in ((target, copied(target)), (bfloat16_copy(target), copied(nearby(target, 0.05)))):
        result = speculative_generate(
            pair[0],
            torch.tensor([[3, 1, 2]]),
            drafter=ModelDrafter(pair[1]),
            k=3,
            max_new_tokens=40,
            check_invariants=True,
        )
        assert result.stats.accepted > 0


def test_a_fault_in_a_cache_of_16_bits_is_caught():
    """A token that is not the text's, and entries that stand one position off."""
    cached = CachedModel(bfloat16_copy(tiny_llama()))
    cached.forward(torch.tensor([5, 6, 7, 8]))
    cached.check(torch.tensor([5, 6, 7, 8]))
    with pytest.raises(InvariantError, match=r"keys of layer 0 differ by .*allowed: 0\.3"):
        cached.check(torch.tensor([5, 6, 9, 8]))
    keys = cached._cache.layers[1].keys
    cached._cache.layers[1].keys = keys.roll(1, -2)
    with pytest.raises(InvariantError, match="keys of layer 1"):
        cached.check(torch.tensor([5, 6, 7, 8]))


@pytest.mark.parametrize("context", range(8, 20))
def test_a_draft_whose_context_is_full_can_be_checked(context):
    target = tiny_gpt2()
    draft = copy.deepcopy(target)
    draft.config.n_positions = context
    draft.transformer.wpe = torch.nn.Embedding.from_pretrained(target.transformer.wpe.weight[:context])
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    options = {"k": 4, "max_new_tokens": 20}
    checked = speculative_generate(target, prompt, drafter=ModelDrafter(draft), check_invariants=True, **options)
    assert checked.new_tokens == speculative_generate(target, prompt, drafter=ModelDrafter(draft), **options).new_tokens
