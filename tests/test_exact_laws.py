"""Losslessness, exactly: every branch of every draw is followed, and what comes out has the target's law to 1e-12.

The code under test is the production code, driven by a `Chooser` that enumerates. That the same comparison notices wrong variants
is shown in test_negative_controls.py. The last line of a test run says how many laws were compared.
"""

import itertools
import math
from collections import defaultdict

import laws
import pytest
import torch
from laws import (
    Laws,
    accepted_in_a_round,
    assert_exact,
    exact_law,
    largest_difference,
    law_of_a_round,
    law_of_texts,
    law_of_the_loop,
    most_likely,
    random_laws,
    same_everywhere,
)
from stand_ins import ScriptedModel, random_table

from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.policy import AdaptiveK
from specdec.sampling import SamplingConfig, to_probs
from specdec.verify import VERIFIERS, Verdict, verify_tokens

both_rules = pytest.mark.parametrize("rule", VERIFIERS)
WITH_ZEROS = list(itertools.product([False, True], repeat=2))  # in p, in q


# One round


@both_rules
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("vocabulary", [2, 3, 4])
def test_a_round_emits_the_targets_law(vocabulary, k, rule):
    for seed, (in_p, in_q) in itertools.product(range(8), WITH_ZEROS):
        p, q = random_laws(vocabulary, k, seed, in_p), random_laws(vocabulary, k, 100 + seed, in_q)
        assert_exact(law_of_a_round(p, q, k, VERIFIERS[rule]), p.of_texts(k + 1))


DEGENERATE = {
    "equal: nothing is rejected": ((0.3, 0.5, 0.2), (0.3, 0.5, 0.2)),
    "disjoint: everything is": ((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5)),
    "the same token certain": ((1.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    "different tokens certain": ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "greedy target, sampling draft": ((0.0, 1.0, 0.0), (0.2, 0.5, 0.3)),
    "sampling target, greedy draft": ((0.2, 0.5, 0.3), (0.0, 1.0, 0.0)),
    "each excludes a token": ((0.6, 0.4, 0.0), (0.0, 0.5, 0.5)),
    "the draft excludes a token": ((0.3, 0.3, 0.4), (0.5, 0.5, 0.0)),
    "almost equal": ((0.3, 0.5, 0.2), (0.3 + 1e-15, 0.5 - 1e-15, 0.2)),
    "almost impossible": ((1e-300, 1 - 1e-16, 1e-16), (1e-16, 1e-300, 1 - 1e-16)),
    "only one token": ((1.0,), (1.0,)),
}


@both_rules
@pytest.mark.parametrize("name", DEGENERATE)
def test_f02_degenerate_laws(name, rule):
    for k in (1, 2, 3):
        p, q = (same_everywhere(k, *law) for law in DEGENERATE[name])
        assert_exact(law_of_a_round(p, q, k, VERIFIERS[rule]), p.of_texts(k + 1))


@both_rules
@pytest.mark.parametrize("seed", range(20))
def test_degenerate_laws_that_change_along_the_text(seed, rule):
    """Of both kinds in one draft: for instance equal laws behind equal laws, where a block's test would be 0 / 0."""
    pairs = [pair for pair in DEGENERATE.values() if len(pair[0]) == 3]
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor(pairs, dtype=torch.float64)
    both = Laws(3, 3, lambda: choice[int(torch.randint(len(pairs), (), generator=generator))])
    p, q = both.map(lambda pair: pair[0]), both.map(lambda pair: pair[1])
    assert_exact(law_of_a_round(p, q, 3, VERIFIERS[rule]), p.of_texts(4))


SAMPLINGS = [
    SamplingConfig(0.0),
    SamplingConfig(1e-8),
    SamplingConfig(1e-2),
    SamplingConfig(0.6),
    SamplingConfig(1.0),
    SamplingConfig(1.0, top_k=1),
    SamplingConfig(1.0, top_k=2),
    SamplingConfig(1.4, top_p=0.7),
    SamplingConfig(0.8, top_k=3, top_p=0.9),
]


@both_rules
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_f01_any_temperature_and_filter_of_the_target_and_any_of_the_draft(sampling, rule):
    """T = 0, T near 0 and truncation come from the function that makes laws; the draft's settings need not be the target's."""
    logits = [random_laws(4, 2, seed).map(lambda law: 2 * law.log()) for seed in (7, 8)]
    for of_draft in SAMPLINGS:
        p = logits[0].map(lambda row: to_probs(row, sampling))
        q = logits[1].map(lambda row, config=of_draft: to_probs(row, config))
        assert_exact(law_of_a_round(p, q, 2, VERIFIERS[rule]), p.of_texts(3))


@both_rules
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_without_laws_is_a_point_mass(k, rule):
    for seed, (zeros, _) in itertools.product(range(5), WITH_ZEROS):
        p, q = random_laws(3, k, seed, zeros), random_laws(3, k, 100 + seed)
        law = law_of_a_round(p, q, k, VERIFIERS[rule], point_mass=True)
        assert_exact(law, p.of_texts(k + 1))
        assert law == law_of_a_round(p, most_likely(q), k, VERIFIERS[rule])  # the same laws written out


STOPS = {
    "behind a token": lambda q: lambda tokens: tokens[-1:] == (0,),
    "behind an unlikely token": lambda q: lambda tokens: tokens != () and float(q.after(tokens[:-1])[tokens[-1]]) < 0.4,
    "before a flat law": lambda q: lambda tokens: float(q.after(tokens).max()) < 0.6,
    "at another length for every text": lambda q: lambda tokens: len(tokens) >= (tokens[0] if tokens else 1),
}


@both_rules
@pytest.mark.parametrize("name", STOPS)
def test_f10_a_draft_whose_length_depends_on_its_own_tokens(name, rule):
    for seed, (in_p, in_q) in itertools.product(range(5), WITH_ZEROS):
        p, q = random_laws(3, 3, seed, in_p), random_laws(3, 3, 100 + seed, in_q)
        assert_exact(law_of_a_round(p, q, 3, VERIFIERS[rule], stops=STOPS[name](q)), p.of_texts(4))


@both_rules
def test_in_float32_only_rounding_is_left(rule):
    for seed in range(5):
        p, q = (random_laws(3, 2, s).map(lambda law: law.float()) for s in (seed, 100 + seed))
        assert largest_difference(law_of_a_round(p, q, 2, VERIFIERS[rule]), p.of_texts(3)) < 5e-7


# The whole loop: drafting and verifying, caches and rollbacks, over several rounds


def scripted(seed, vocabulary=3, zeros=False):
    return ScriptedModel(random_table(vocabulary, seed, zeros=zeros, dtype=torch.float64))


def assert_the_loop_is_lossless(target, drafter, k, length, prompt=(2, 1), end=None, verify="token", **options):
    sampling = {"temperature": 1.0} | {
        name: options.pop(name) for name in ("temperature", "top_k", "top_p") if name in options
    }
    prompt = [token % len(target.table) for token in prompt]
    law = law_of_the_loop(target, drafter, prompt, k, length, verify=verify, eos_token_id=end, **sampling, **options)
    assert_exact(law, law_of_texts(target.table, prompt, length, end, **sampling))


LOOP_SAMPLINGS = [{}, {"temperature": 0.6}, {"top_k": 2}, {"temperature": 1.4, "top_p": 0.7}]


@both_rules
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("sampling", LOOP_SAMPLINGS, ids=str)
def test_the_loop_emits_the_targets_law(sampling, zeros, rule):
    target, draft = scripted(0, zeros=zeros), scripted(1, zeros=zeros)
    assert_the_loop_is_lossless(target, ModelDrafter(draft), 2, 3, verify=rule, **sampling)


@both_rules
@pytest.mark.parametrize(
    ("vocabulary", "zeros", "k", "length"), [(3, False, 2, 4), (3, True, 2, 5), (2, False, 2, 6), (2, False, 3, 5)]
)
def test_many_rounds_in_a_row(vocabulary, zeros, k, length, rule):
    target, draft = (scripted(seed, vocabulary, zeros) for seed in (0, 1))
    assert_the_loop_is_lossless(target, ModelDrafter(draft), k, length, verify=rule)


@both_rules
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("prompt", [(1,), (1, 0, 1)], ids=len)
def test_a08_f08_rounds_cut_short_by_the_number_of_tokens_asked_for(prompt, length, rule):
    assert_the_loop_is_lossless(scripted(4, 2), ModelDrafter(scripted(5, 2)), 3, length, prompt, verify=rule)


@both_rules
def test_a_draft_that_runs_out_of_context(rule):
    draft = ScriptedModel(scripted(5, 2).table, context=4)
    assert_the_loop_is_lossless(scripted(4, 2), ModelDrafter(draft), 2, 4, verify=rule)


@both_rules
@pytest.mark.parametrize("threshold", [0.2, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 2}], ids=str)
def test_f10_a_draft_that_stops_behind_an_unlikely_token(sampling, threshold, rule):
    drafter = ModelDrafter(scripted(1), confidence_threshold=threshold)
    assert_the_loop_is_lossless(scripted(0), drafter, 3, 3, verify=rule, **sampling)


def test_f10_a_draft_that_stops_over_many_rounds():
    drafter = ModelDrafter(scripted(1, 2), confidence_threshold=0.4)
    assert_the_loop_is_lossless(scripted(0, 2), drafter, 3, 5)


class OneMoreThanAccepted:
    """k follows the last round: one more than it accepted, and 0 behind a round that accepted nothing."""

    def begin(self):
        self.k = 2

    def next_k(self, limit):
        return min(self.k, limit)

    def observe(self, round):
        self.k = round.accepted + 1 if round.accepted or not round.drafted else 0


class Noted:
    """A policy, and what it chose for each place in the text."""

    def __init__(self, policy):
        self.policy, self.begin, self.observe = policy, policy.begin, policy.observe
        self.chosen = defaultdict(set)

    def next_k(self, limit):
        k = self.policy.next_k(limit)
        self.chosen[limit].add(k)
        return k


POLICIES = {
    "one more than accepted": OneMoreThanAccepted,
    # Few expected tests and a short memory: each round moves it.
    "adaptive": lambda: AdaptiveK(0.4, [1.0, 1.05, 1.1], 0.8, weight=0.5, memory=2.0),
}


@both_rules
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("vocabulary", "zeros", "threshold", "length"), [(2, False, 0.0, 6), (2, False, 0.4, 5), (3, True, 0.0, 5)]
)
def test_k_may_depend_on_the_past(vocabulary, zeros, threshold, length, name, rule):
    """Whatever was accepted decides how much is drafted next; the law is the target's all the same."""
    policy = Noted(POLICIES[name]())
    target, draft = (scripted(seed, vocabulary, zeros) for seed in (0, 1))
    options = {"verify": rule, "check_invariants": True}
    assert_the_loop_is_lossless(target, ModelDrafter(draft, threshold), policy, length, **options)
    assert max(len(numbers) for numbers in policy.chosen.values()) > 1  # else it was the place alone that decided


def padded(draft, vocabulary, **options):
    """A drafter whose model has another vocabulary than the target."""
    draft.config.vocab_size = len(draft.table)
    return ModelDrafter(draft, vocabulary=vocabulary, **options)


SIZES = pytest.mark.parametrize(("size", "of_draft"), [(4, 3), (4, 2), (3, 4), (3, 6)])


@both_rules
@SIZES
@pytest.mark.parametrize("sampling", [*LOOP_SAMPLINGS, {"temperature": 0.8, "top_k": 3, "top_p": 0.9}], ids=str)
def test_a09_vocabularies_padded_to_different_sizes(sampling, size, of_draft, rule):
    """The prompt ends with an id that the smaller draft does not have."""
    target, drafter = scripted(0, size), padded(scripted(1, of_draft), size)
    assert_the_loop_is_lossless(target, drafter, 2, 3, (1, size - 1), verify=rule, **sampling)


@both_rules
@SIZES
def test_a09_vocabularies_padded_to_different_sizes_with_impossible_tokens_a_confidence_stop_and_checked_caches(
    size, of_draft, rule
):
    target, drafter = scripted(0, size, True), padded(scripted(1, of_draft, True), size, confidence_threshold=0.4)
    assert_the_loop_is_lossless(target, drafter, 2, 3, (1, size - 1), verify=rule, check_invariants=True)


@both_rules
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("sampling", LOOP_SAMPLINGS, ids=str)
def test_prompt_lookup(sampling, zeros, rule):
    target, prompt = scripted(6, zeros=zeros), (1, 2, 1, 1, 2)
    assert_the_loop_is_lossless(target, PromptLookupDrafter(), 2, 4, prompt, verify=rule, **sampling)


@both_rules
@pytest.mark.parametrize("end", [0, 1, 2])
def test_a07_f08_an_end_token_cuts_the_law_behind_it(end, rule):
    target = scripted(4)
    assert_the_loop_is_lossless(target, ModelDrafter(scripted(5)), 2, 3, (2,), end, verify=rule)
    assert_the_loop_is_lossless(target, PromptLookupDrafter(), 3, 4, (1, 2, 1, 0, 2, 1), end, verify=rule)


@both_rules
def test_f01_a_draft_with_other_settings_than_the_target(rule):
    class Hot(ModelDrafter):
        def begin(self, prompt, sampling):
            super().begin(prompt, SamplingConfig(2.0, top_k=2))

    assert_the_loop_is_lossless(scripted(0), Hot(scripted(1)), 2, 3, temperature=0.7, verify=rule)


@both_rules
def test_a03_greedy_decoding_has_the_law_of_a_single_text(rule):
    for seed, k in itertools.product(range(8), (1, 2, 3)):
        target, draft = scripted(seed), scripted(100 + seed)
        for drafter in (ModelDrafter(draft), ModelDrafter(draft, 0.5), PromptLookupDrafter()):
            assert_the_loop_is_lossless(target, drafter, k, 7, (2, 1, 0, 2, 1), temperature=0, verify=rule)


@both_rules
def test_f07_the_caches_are_sound_on_every_branch(rule):
    options = {"verify": rule, "check_invariants": True}
    assert_the_loop_is_lossless(scripted(0, 2), ModelDrafter(scripted(1, 2)), 2, 4, **options)


# Another lossless rule, for comparison: emit the target's own sample


def match_samples(draft_tokens, p, q, chooser):
    """Draw every token from the target itself, and go on for as long as the draft had said the same."""
    overlaps = ()
    for j, token in enumerate(draft_tokens):
        overlaps += (1.0,)
        sample = chooser.categorical(p[j])
        if sample != token:
            return Verdict(j, sample, False, overlaps)
    return Verdict(len(draft_tokens), chooser.categorical(p[-1]), True, overlaps)


def test_f11_sample_matching_is_lossless_too():
    for seed, (in_p, in_q) in itertools.product(range(5), WITH_ZEROS):
        p, q = random_laws(3, 2, seed, in_p), random_laws(3, 2, 100 + seed, in_q)
        assert_exact(law_of_a_round(p, q, 2, match_samples), p.of_texts(3))
    assert_the_loop_is_lossless(scripted(0), ModelDrafter(scripted(1)), 2, 3, verify=match_samples)


def test_f11_sample_matching_accepts_with_the_sum_of_products_which_is_less():
    for seed in range(20):
        p, q = random_laws(4, 1, seed), random_laws(4, 1, 100 + seed)
        products, minima = ((f(p.after(()), q.after(()))).sum().item() for f in (torch.mul, torch.minimum))
        assert accepted_in_a_round(p, q, 1, match_samples) == pytest.approx(products, abs=1e-12)
        assert accepted_in_a_round(p, q, 1, verify_tokens) == pytest.approx(minima, abs=1e-12)
        assert products < minima
    p = same_everywhere(1, 0.25, 0.25, 0.25, 0.25)  # a perfect draft: always accepted, or once in four times
    assert accepted_in_a_round(p, p, 1, match_samples) == pytest.approx(1 / 4)
    assert accepted_in_a_round(p, p, 1, verify_tokens) == pytest.approx(1)


# The enumeration checks itself


def test_the_enumeration_follows_every_branch_once():
    def run(chooser):
        first = chooser.categorical(torch.tensor([1.0, 0.0, 3.0]))
        return (first, chooser.bernoulli(0.1)) if first else (first,)

    assert exact_law(run) == pytest.approx({(0,): 0.25, (2, True): 0.075, (2, False): 0.675})


@pytest.mark.parametrize("probability", [-0.1, 1.5, math.nan])
def test_no_probability_is_refused(probability):
    with pytest.raises(ValueError, match="are no probabilities"):
        exact_law(lambda chooser: chooser.bernoulli(probability))


@pytest.mark.parametrize("weights", [(0.5, -0.1), (0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_no_law_is_refused(weights):
    with pytest.raises(ValueError, match="are no probabilities"):
        exact_law(lambda chooser: chooser.categorical(torch.tensor(weights)))


def test_code_that_remembers_its_last_run_is_refused():
    calls = itertools.count(1)
    with pytest.raises(ValueError, match="the replay of"):
        exact_law(lambda chooser: chooser.bernoulli(1 / (1 + next(calls))))
    runs = itertools.count()
    with pytest.raises(ValueError, match="ended after 0 steps"):
        exact_law(lambda chooser: chooser.bernoulli(0.5) if next(runs) == 0 else None)


def test_probabilities_that_do_not_sum_to_1_are_refused():
    def run(chooser):
        chooser.probability = 0.9
        return chooser.bernoulli(0.5)

    with pytest.raises(ValueError, match="sum to 0"):
        exact_law(run)


def test_a_deviation_of_2e_12_and_an_impossible_outcome_are_refused(monkeypatch):
    monkeypatch.setattr(laws, "DEVIATIONS", [])
    expected = {0: 0.5, 1: 0.5, 2: 0.0}
    assert_exact({0: 0.5 + 5e-13, 1: 0.5 - 5e-13}, expected)
    for wrong in ({0: 0.5 + 2e-12, 1: 0.5 - 2e-12}, {0: 0.5, 1: 0.5 - 1e-15, 2: 1e-15}, {0: 0.5}):
        with pytest.raises(AssertionError):
            assert_exact(wrong, expected)
