"""Which k is chosen: by hand, against the best fixed one, through changes of acceptance, and within its limits."""

import itertools
import math
import random

import pytest
import torch
from stand_ins import ScriptedModel, Spy, nearby, random_table, tiny_llama

from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.policy import ROUNDS_BETWEEN_LOOKS, AdaptiveK
from specdec.stats import Round
from specdec.theory import expected_tokens_per_round, optimal_k, predicted_speedup

NO_LIMIT = 10**6


def a_round(drafted, accepted, proposed=None):
    proposed = drafted if proposed is None else proposed
    return Round(drafted, proposed, accepted, accepted + 1, ())


def told(policy, *rounds):
    for drafted, accepted in rounds:
        policy.observe(a_round(drafted, accepted))
    return policy


# By hand


def test_before_anything_is_seen_the_best_k_for_the_expected_acceptance():
    v = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    for alpha, c in itertools.product((0.0, 0.3, 0.6, 0.9, 1.0), (0.0, 0.1, 0.5, 2.0)):
        policy = AdaptiveK(c, v, alpha)
        assert policy.acceptance() == [alpha] * 5
        assert policy.next_k(NO_LIMIT) == optimal_k(alpha, c, v)
    assert AdaptiveK(0.1, v, 0.5).max_k == 5


def test_estimates_by_hand():
    """Two expected tests, one accepted, and no fading: of three rounds at depth 1, 2, 3 accepted 2 of 3, 1 of 2, 0 of 1."""
    policy = told(AdaptiveK(0.1, [1.0] * 5, 0.5, weight=2, memory=1e12), (3, 2), (3, 0), (3, 1))
    common = (3 + 1) / (6 + 2)
    by_depth = [(2 + 2 * common) / (3 + 2), (1 + 2 * common) / (2 + 2), (0 + 2 * common) / (1 + 2), common]
    assert policy.acceptance() == pytest.approx(by_depth)
    factors = [1, 1.6 / 1.1, (1.6 + 0.3) / 1.2, (1.6 + 0.3 + 0.1) / 1.3]
    assert policy.next_k(NO_LIMIT) == factors.index(max(factors)) == 2


def test_older_rounds_weigh_less():
    """By half a round; but all depths together never count as less than one test, of which half is accepted beforehand."""
    policy = told(AdaptiveK(0.1, [1.0, 1.0], 0.5, weight=1, memory=1 / math.log(2)), (1, 1), (1, 0), (1, 1))
    common = (((0.5 + 1) / 2 + 0) / 2 + 1) / 2  # of 2 tests from the first round on
    assert policy.acceptance() == pytest.approx([(0.25 + 0 + 1 + common) / (0.25 + 0.5 + 1 + 1)])


def test_through_rounds_without_a_draft_the_estimate_stays_and_then_yields_the_more():
    def after(rounds):
        policy = told(AdaptiveK(0.3, [1.0, 1.2], 0.9, memory=8), *[(1, 0)] * 40, *[(0, 0)] * rounds)
        (before,) = policy.acceptance()
        return before, told(policy, (1, 1)).acceptance()[0]

    (soon, soon_told), (late, late_told) = after(1), after(1000)
    assert soon < 0.1 and late < 0.1
    assert late_told - late > soon_told - soon + 0.02


def test_what_stands_behind_an_end_token_was_not_tested():
    """Of four drafted tokens the second ended the text: two tests, both passed. A look-up may draft nothing."""
    policy = AdaptiveK(0.1, [1.0] * 5, 0.5, memory=1e12)
    policy.observe(a_round(4, 2, proposed=2))
    policy.observe(Round(0, 0, 0, 1, ()))
    common = (2 + 4) / (2 + 8)
    assert policy.acceptance() == pytest.approx([(1 + 8 * common) / 9] * 2 + [common] * 2)


def test_a_look_is_taken_when_it_has_been_saved_for():
    """k = 0 is best; a look at k = 1 takes 1.515 for 1.1 tokens, 0.415 too much: 2 % of 21 rounds of plain decoding pay for it,
    and of 20 rounds and the look before."""
    policy = AdaptiveK(0.4, [1.0, 1.115], 0.1, weight=1e9)
    chosen = []
    for _ in range(64):
        chosen.append(policy.next_k(NO_LIMIT))
        told(policy, (chosen[-1], 0))
    assert [index for index, k in enumerate(chosen) if k] == [21, 42, 63]
    assert set(chosen) == {0, 1}
    without = AdaptiveK(0.4, [1.0, 1.115], 0.1, weight=1e9, looks=0.0)
    assert all(told(without, (0, 0)).next_k(NO_LIMIT) == 0 for _ in range(200))


def test_a_look_goes_to_the_cheapest_larger_number_and_not_too_often():
    policy = AdaptiveK(0.0, [1.0, 3.0, 1.0, 1.0], 0.0, weight=1e9)  # 2 and 3 drafted tokens cost nothing
    chosen = []
    for _ in range(3 * ROUNDS_BETWEEN_LOOKS + 1):
        chosen.append(policy.next_k(NO_LIMIT))
        told(policy, (chosen[-1], 0))
    assert chosen == [0] + [*[0] * (ROUNDS_BETWEEN_LOOKS - 1), 2] * 3


# Through many rounds


def simulated(policy, alpha, rounds, seed=0):
    """The numbers chosen, where each token is accepted by itself: with α, or α(round, depth)."""
    rng, chosen = random.Random(seed), []
    for index in range(rounds):
        k = policy.next_k(NO_LIMIT)
        passes = (rng.random() < (alpha(index, depth) if callable(alpha) else alpha) for depth in range(k))
        told(policy, (k, sum(itertools.takewhile(bool, passes))))
        chosen.append(k)
    return chosen


def predicted(alpha, k, c, v):
    return predicted_speedup(expected_tokens_per_round(alpha, k), k, c, v[k])


def speed(chosen, alpha, c, v):
    """Expected tokens over the cost, in both of which the rounds add up."""
    return sum(expected_tokens_per_round(alpha, k) for k in chosen) / sum(k * c + v[k] for k in chosen)


FLAT = [1.0] * 9
RISING = [1.0, 1.22, 1.24, 1.25, 1.27, 1.6, 1.7, 1.8, 1.9]
CASES = [
    (0.95, 0.1, FLAT),
    (0.8, 0.3, FLAT),
    (0.5, 0.1, FLAT),
    (0.1, 0.02, FLAT),
    (0.95, 0.3, RISING),
    (0.8, 0.1, RISING),
    (0.7, 0.4, RISING),
    (0.2, 0.3, RISING),
    (0.6, 0.5, [1.0, 1.05, 1.1]),
]


@pytest.mark.parametrize("prior", [0.1, 0.7, 0.99])
@pytest.mark.parametrize(("alpha", "c", "v"), CASES)
def test_it_converges_to_the_best_fixed_k(alpha, c, v, prior):
    best = optimal_k(alpha, c, v)
    for seed in range(3):
        settled = simulated(AdaptiveK(c, v, prior), alpha, 700, seed)[300:]
        assert speed(settled, alpha, c, v) > 0.96 * predicted(alpha, best, c, v)
        # Where two numbers are about as good it may hold either; and near break-even it wavers.
        good = [k for k in range(len(v)) if predicted(alpha, k, c, v) > 0.95 * predicted(alpha, best, c, v)]
        assert sum(k in good for k in settled) > 0.6 * len(settled)


def test_a_longer_memory_settles_on_the_best_one():
    for alpha, c, v in CASES:
        chosen = simulated(AdaptiveK(c, v, 0.5, memory=1e4), alpha, 4000)[2000:]
        assert predicted(alpha, max(chosen, key=chosen.count), c, v) > 0.995 * predicted(
            alpha, optimal_k(alpha, c, v), c, v
        )


def test_acceptance_that_grows_with_the_depth_is_made_use_of():
    """0.5 at the first token and 0.98 behind it: drafting pays most deep down; one α for all depths would say two or three."""
    c, pooled = 0.25, optimal_k(0.6, 0.25, FLAT)
    settled = simulated(AdaptiveK(c, FLAT, 0.5), lambda _, depth: 0.98 if depth else 0.5, 600)[300:]
    assert pooled < 3 and sum(settled) / len(settled) > 5


def test_it_follows_a_change_of_acceptance_both_ways():
    for c, low, high in ((0.1, 0.1, 0.9), (0.3, 0.1, 0.9), (0.3, 0.3, 0.9)):
        v = RISING
        for first, then in ((low, high), (high, low)):
            chosen = simulated(AdaptiveK(c, v, 0.6), lambda index, _, a=first, b=then: a if index < 300 else b, 900)
            for part, alpha in ((chosen[150:300], first), (chosen[600:], then)):
                assert speed(part, alpha, c, v) > 0.95 * predicted(alpha, optimal_k(alpha, c, v), c, v)


def test_0_is_chosen_only_where_nothing_gains_and_it_comes_back():
    alpha = [0.05] * 200 + [0.95] * 400 + [0.05] * 200
    chosen = simulated(AdaptiveK(0.3, RISING, 0.8), lambda index, _: alpha[index], len(alpha))
    assert chosen[0] > 0  # as expected beforehand
    for part in (chosen[100:200], chosen[700:]):
        assert 0 < part.count(0) < len(part) and part.count(0) > 0.9 * len(part)
    assert chosen[400:600].count(0) == 0
    gains = simulated(AdaptiveK(0.1, FLAT, 0.3), 0.6, 500)
    assert 0 not in gains


# Limits


def test_never_more_than_the_limit_nor_than_the_costs_reach():
    policy = AdaptiveK(0.05, FLAT, 0.95)
    for limit in (0, 1, 3, 8, 9, 100):
        for _ in range(40):
            k = policy.next_k(limit)
            assert 0 <= k <= min(limit, 8)
            told(policy, (k, k))
    assert policy.next_k(0) == 0
    assert AdaptiveK(0.05, [1.0], 0.95).next_k(5) == 0  # nothing is known about drafting


def test_a_limit_below_the_best_number_gives_the_best_one_below():
    v = [1.0, 1.0, 2.0, 1.1]
    policy = AdaptiveK(0.1, v, 0.9)
    assert [policy.next_k(limit) for limit in range(5)] == [0, 1, 1, 3, 3]


def test_a_new_text_begins_as_the_first_one_did():
    policy = AdaptiveK(0.1, RISING, 0.7)
    first = simulated(policy, 0.4, 100)
    policy.begin()
    assert simulated(policy, 0.4, 100) == first and len(set(first)) > 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"c": -0.1}, r"c is -0\.1; allowed: a number of at least 0"),
        ({"c": math.nan}, "c is nan; allowed"),
        ({"v": []}, r"v is \[\]; allowed: one number above 0 or more"),
        ({"v": [1.0, 0.0]}, r"v is \[1\.0, 0\.0\]; allowed"),
        ({"v": [1.0, math.inf]}, r"v is \[1\.0, inf\]; allowed"),
        ({"alpha": 1.1}, r"alpha is 1\.1; allowed: a probability from 0 to 1"),
        ({"alpha": math.nan}, "alpha is nan; allowed"),
        ({"weight": 0}, "weight is 0 and memory 32.0; allowed: numbers above 0"),
        ({"memory": 0}, "weight is 8.0 and memory 0; allowed"),
        ({"looks": 1.0}, r"looks is 1\.0; allowed: a share from 0 up to"),
        ({"looks": -0.1}, r"looks is -0\.1; allowed"),
    ],
    ids=str,
)
def test_what_is_no_cost_acceptance_or_share_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        AdaptiveK(**{"c": 0.1, "v": [1.0, 1.1], "alpha": 0.5} | changes)


# In the loop


class Chosen:
    """A policy with the numbers that it was told beforehand; it notes what it is told of."""

    def __init__(self, *numbers):
        self.numbers, self.limits, self.begun = numbers, [], 0

    def begin(self):
        self.begun += 1
        self.left, self.rounds = itertools.cycle(self.numbers), []

    def next_k(self, limit):
        self.limits.append(limit)
        return min(next(self.left), limit)

    def observe(self, round):
        self.rounds.append(round)


PROMPT = torch.tensor([[1, 3, 2, 3]])


def scripted(seed=0, vocabulary=6):
    return ScriptedModel(random_table(vocabulary, seed))


def test_the_loop_asks_before_each_round_and_tells_after_it():
    target, policy = scripted(), Chosen(3, 0, 0, 1, 2)
    spy = Spy(ModelDrafter(scripted()))
    result = speculative_generate(target, PROMPT, drafter=spy, k=policy, max_new_tokens=20, check_invariants=True)
    assert result.new_tokens == autoregressive_generate(target, PROMPT, max_new_tokens=20).new_tokens
    assert (policy.begun, tuple(policy.rounds)) == (1, result.stats.rounds)
    drafted = [r.drafted for r in result.stats.rounds]
    assert drafted[:8] == [3, 0, 0, 1, 2, 3, 0, 0]
    emitted = itertools.accumulate((r.emitted for r in result.stats.rounds), initial=0)
    assert policy.limits == [20 - n - 1 for n in emitted][:-1]
    assert [limit for _, limit in spy.asked] == [k for k in drafted if k]  # not asked for nothing


def test_the_tokens_of_rounds_without_a_draft_are_read_together():
    target, draft = scripted(), scripted()
    options = {"drafter": ModelDrafter(draft), "k": Chosen(1, 0, 0, 0), "max_new_tokens": 9}
    speculative_generate(target, PROMPT, **options)
    prompt, first, after, *_ = draft.fed
    assert (len(prompt.tokens), len(first.tokens), len(after.tokens)) == (3, 1, 5)  # accepted, bonus, and three more


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_the_number_alone_and_a_policy_that_always_says_it_are_the_same(sampling):
    for k in (0, 1, 4):
        results = [
            speculative_generate(
                scripted(),
                PROMPT,
                drafter=ModelDrafter(scripted(1)),
                k=chosen,
                max_new_tokens=30,
                generator=torch.Generator().manual_seed(0),
                **sampling,
            )
            for chosen in (k, Chosen(k))
        ]
        assert (results[0].new_tokens, results[0].stats) == (results[1].new_tokens, results[1].stats)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_policy_that_leaves_its_limits_is_at_fault(number):
    class Wrong(Chosen):
        def next_k(self, limit):
            return number if number < 0 else limit + 1

    with pytest.raises(ValueError, match=r"^Wrong chose -?\d+ draft tokens; allowed: 0 to 9$"):
        speculative_generate(scripted(), PROMPT, drafter=ModelDrafter(scripted()), k=Wrong(), max_new_tokens=10)


def test_a_policy_needs_a_drafter():
    with pytest.raises(InputError, match="k is Chosen without a drafter; allowed: k = 0"):
        speculative_generate(scripted(), PROMPT, drafter=None, k=Chosen(1), max_new_tokens=10)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_adaptive_texts_are_the_targets_and_depend_on_the_seed_alone(rule):
    target = tiny_llama()
    policy = AdaptiveK(0.1, RISING, 0.6, memory=8)
    for draft in (target, nearby(target, 0.05), nearby(target, 0.3)):
        for drafter in (ModelDrafter(draft), ModelDrafter(draft, 0.3), PromptLookupDrafter()):
            options = {"drafter": drafter, "k": policy, "max_new_tokens": 40, "verify": rule}
            greedy = speculative_generate(target, PROMPT, check_invariants=True, **options)
            assert greedy.new_tokens == autoregressive_generate(target, PROMPT, max_new_tokens=40).new_tokens
            sampled = [
                speculative_generate(
                    target, PROMPT, temperature=1.0, generator=torch.Generator().manual_seed(5), **options
                )
                for _ in range(2)
            ]
            assert (sampled[0].new_tokens, sampled[0].stats) == (sampled[1].new_tokens, sampled[1].stats)


def test_a_good_draft_is_asked_for_more_than_a_bad_one():
    target = scripted(vocabulary=12)
    means = []
    for draft in (target, scripted(1, vocabulary=12)):
        policy = AdaptiveK(0.1, FLAT, 0.7)
        options = {"drafter": ModelDrafter(draft), "k": policy, "max_new_tokens": 400}
        stats = speculative_generate(target, PROMPT, **options).stats
        means.append(sum(r.drafted for r in stats.rounds) / len(stats.rounds))
    assert means[0] > 7.5 and means[1] < 1.5
