"""What a verdict says, how much either rule accepts, bad input and rounding. The law of what is emitted: test_exact_laws.py."""

import itertools
import math
import warnings

import pytest
import torch
from laws import (
    accepted_in_a_round,
    exact_law,
    largest_difference,
    most_likely,
    random_laws,
    same_everywhere,
    verified_draft,
)

from specdec.chance import GeneratorChooser
from specdec.verify import (
    VERIFIERS,
    block_acceptance,
    overlap,
    residual,
    token_acceptance,
    verify_block,
    verify_tokens,
)

both_rules = pytest.mark.parametrize("verify", VERIFIERS.values(), ids=VERIFIERS)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# What a verdict says


def test_overlap_is_1_minus_total_variation_row_by_row():
    p, q = tensor(0.5, 0.5, 0.0), tensor(0.2, 0.3, 0.5)
    both = overlap(torch.stack([p, p, p]), torch.stack([q, p, p.flip(0)]))
    torch.testing.assert_close(both, tensor(0.5, 1.0, 0.5))


class Coins:
    """Answers the tests as told, and draws the likeliest token."""

    def __init__(self, *answers):
        self.answers = iter(answers)
        self.asked = []

    def bernoulli(self, probability):
        self.asked.append(probability)
        return next(self.answers)

    def categorical(self, weights):
        return int(weights.argmax())


def test_a_rejection_ends_the_round_with_a_corrected_token():
    p = torch.stack([tensor(0.25, 0.75), tensor(0.1, 0.9), tensor(0.5, 0.5), tensor(1, 0)])
    q = torch.stack([tensor(0.5, 0.5), tensor(0.6, 0.4), tensor(0.5, 0.5)])
    coins = Coins(True, False)  # a third question would be an error
    verdict = verify_tokens([0, 0, 1], p, q, coins)
    assert (verdict.accepted, verdict.token, verdict.is_bonus) == (1, 1, False)
    assert coins.asked == pytest.approx([0.5, 1 / 6])
    assert verdict.overlaps == pytest.approx((0.75, 0.5))  # of the tested positions only


def test_full_acceptance_adds_a_bonus_token_of_the_targets_law():
    p = torch.stack([tensor(0.25, 0.75), tensor(0.1, 0.9)])
    verdict = verify_tokens([0], p, tensor(0.5, 0.5)[None], Coins(True))
    assert (verdict.accepted, verdict.token, verdict.is_bonus) == (1, 1, True)
    assert verdict.overlaps == pytest.approx((0.75,))


def test_a_point_mass_is_accepted_with_the_targets_probability():
    coins = Coins(False)
    verdict = verify_tokens([0], torch.stack([tensor(0.7, 0.2, 0.1)] * 2), None, coins)
    assert (*coins.asked,) == verdict.overlaps == pytest.approx((0.7,))
    assert verdict.token == 1  # never the rejected one, likely as it was


def test_no_draft_is_a_plain_draw():
    verdict = verify_tokens([], tensor(0.1, 0.9)[None], None, Coins())
    assert (verdict.accepted, verdict.token, verdict.is_bonus, verdict.overlaps) == (0, 1, True, ())


def test_in_a_block_a_failed_test_ends_nothing():
    p = torch.stack([tensor(0.25, 0.75), tensor(0.75, 0.25), tensor(0.5, 0.5), tensor(1, 0)])
    q = torch.stack([tensor(0.5, 0.5), tensor(0.5, 0.5), tensor(0.25, 0.75)])
    coins = Coins(False, True, False)
    verdict = verify_block([0, 0, 1], p, q, coins)
    # p_1 = 1/2 and p_2 = 3/4; h_1 = 0 / (0 + 1/2) from the surplus max(0, 1/2 · 3/4 - 1/2), h_2 = 1/8 / (1/8 + 1/4).
    assert coins.asked == pytest.approx([0, 1 / 3, 1 / 2])
    assert (verdict.accepted, verdict.token, verdict.is_bonus) == (2, 0, False)
    assert verdict.overlaps == pytest.approx((0.75, 0.75, 0.75))
    bonus = verify_block([0, 0, 1], p, q, Coins(False, False, True))
    assert (bonus.accepted, bonus.token, bonus.is_bonus) == (3, 0, True)
    assert verify_block([0, 0, 1], p, q, Coins(True, False, False)).overlaps == pytest.approx((0.75, 0.75))


# How much is accepted

SEEDS = range(12)


def pairs(k, vocabulary=3):
    """Random laws of target and draft, of all combinations with and without impossible tokens."""
    for seed, in_p, in_q in itertools.product(SEEDS, [False, True], [False, True]):
        yield random_laws(vocabulary, k, seed, in_p), random_laws(vocabulary, k, 100 + seed, in_q)


def law_of_acceptance(p, q, k, verify):
    """The joint law of the draft and of how many of its tokens are accepted."""
    draft = verified_draft(p, q, k, verify)

    def run(chooser):
        tokens, verdict = draft(chooser)
        return tokens, verdict.accepted

    return exact_law(run)


@both_rules
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_first_token_is_accepted_with_the_overlap(k, verify):
    for p, q in pairs(k):
        law = law_of_acceptance(p, q, k, verify)
        accepted = sum(probability for (_, accepted), probability in law.items() if accepted >= 1)
        assert accepted == pytest.approx(float(overlap(p.after(()), q.after(()))), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_verification_accepts_a_prefix_with_its_joint_probability(k):
    """P(at least i accepted | x_1..x_i) = p_i, whatever may follow: this is why drafts may end early."""
    for p, q in pairs(k):
        law = law_of_acceptance(p, q, k, verify_block)
        for (draft, _), i in itertools.product(law, range(1, k + 1)):
            same = {(d, n): probability for (d, n), probability in law.items() if d[:i] == draft[:i]}
            share = sum(probability for (_, n), probability in same.items() if n >= i) / sum(same.values())
            joint, _ = block_acceptance(draft, p.along(draft, k + 1), q.along(draft, k))
            assert share == pytest.approx(joint[i], abs=1e-9)


def accepted_on_average(p, q, k, of_draft):
    """E over the draft of Σ of `of_draft(tokens, p, q)`."""
    drafts = {d: probability for d, probability in q.of_texts(k).items() if probability > 0}
    return sum(probability * sum(of_draft(d, p.along(d, k + 1), q.along(d, k))) for d, probability in drafts.items())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_expected_number_accepted_follows_from_the_probabilities_of_the_draft(k):
    """What the study reports of both rules on the same drafts, without decoding twice."""
    for p, q in pairs(k):
        by_token = accepted_on_average(
            p, q, k, lambda *a: itertools.accumulate(token_acceptance(*a), lambda x, y: x * y)
        )
        assert accepted_in_a_round(p, q, k, verify_tokens) == pytest.approx(by_token, abs=1e-12)
        by_block = accepted_on_average(p, q, k, lambda *a: block_acceptance(*a)[0][1:])
        assert accepted_in_a_round(p, q, k, verify_block) == pytest.approx(by_block, abs=1e-12)


def test_the_expected_number_accepted_in_a_block_by_another_formula():
    """Σ over all texts x_1..x_i of the least, over j, of q(x_1..x_j) · p(x_(j+1)..x_i | x_1..x_j)."""
    for p, q in pairs(3):
        expected = 0.0
        for i in (1, 2, 3):
            for text in itertools.product(range(3), repeat=i):
                ps = [float(p.after(text[:n])[text[n]]) for n in range(i)]
                qs = [float(q.after(text[:n])[text[n]]) for n in range(i)]
                expected += min(math.prod(qs[:j] + ps[j:]) for j in range(i + 1))
        assert accepted_in_a_round(p, q, 3, verify_block) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_verification_never_accepts_less_and_often_more(k):
    gains = [
        accepted_in_a_round(p, q, k, verify_block) - accepted_in_a_round(p, q, k, verify_tokens) for p, q in pairs(k)
    ]
    assert min(gains) > -1e-12
    assert max(gains) < 1e-12 if k == 1 else sum(gain > 1e-3 for gain in gains) > len(gains) / 4


def test_the_example_of_sun_et_al():
    """Block Verification Accelerates Speculative Decoding (2024), §2: 10/9 tokens accepted out of two, and 11/9."""
    p, q = same_everywhere(2, 1 / 3, 2 / 3), same_everywhere(2, 2 / 3, 1 / 3)
    assert accepted_in_a_round(p, q, 2, verify_tokens) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted_in_a_round(p, q, 2, verify_block) == pytest.approx(11 / 9, abs=1e-12)


def test_greedy_laws_and_point_masses_leave_no_surplus_so_both_rules_agree():
    for p, q in pairs(3):
        for laws, point_mass in (
            ((p, q), True),
            ((most_likely(p), q), False),
            ((most_likely(p), most_likely(q)), False),
        ):

            def verdicts(rule, laws=laws, point_mass=point_mass):
                draft = verified_draft(*laws, 3, rule, point_mass=point_mass)

                def run(chooser):
                    tokens, verdict = draft(chooser)
                    return tokens, verdict.accepted, verdict.token

                return exact_law(run)

            assert largest_difference(verdicts(verify_tokens), verdicts(verify_block)) < 1e-12


# Bad input


@pytest.mark.parametrize(
    ("p_shape", "q_shape"), [((2, 3), (2, 3)), ((3, 3), (1, 3)), ((3, 3), (2, 4)), ((4, 3), None), ((2, 3), None)]
)
@both_rules
def test_shapes_that_do_not_fit_are_refused(p_shape, q_shape, verify):
    with pytest.raises(ValueError, match="2 draft tokens need p of shape"):
        verify([0, 1], torch.ones(p_shape) / 3, None if q_shape is None else torch.ones(q_shape) / 3, Coins())


@pytest.mark.parametrize("q_x", [0.0, math.nan])
@both_rules
def test_a_token_that_its_own_law_excludes_is_refused(q_x, verify):
    with pytest.raises(ValueError, match="draft token 1 at position 0 has probability"):
        verify([1], torch.ones(2, 2) / 2, torch.tensor([[1.0, q_x]]), Coins(True))


@both_rules
def test_a_target_law_that_is_not_a_number_is_refused(verify):
    with pytest.raises(ValueError, match="target gives draft token 1 at position 0 the probability nan"):
        verify([1], torch.full((2, 2), math.nan), torch.ones(1, 2) / 2, Coins(True))


# Rounding


@both_rules
@pytest.mark.parametrize("name", ["equal", "scaled", "one-hot", "bfloat16 p"])
def test_a02_f04_a_rejection_that_only_rounding_can_cause_still_draws_from_the_target(name, verify):
    p = torch.tensor([0.7, 0.3 - 1e-6, 0.0, 1e-6])
    q = {"equal": p, "scaled": p * (1 + 1e-7), "one-hot": torch.tensor([1.0, 0, 0, 0]), "bfloat16 p": p}[name]
    p = {"one-hot": q, "bfloat16 p": p.bfloat16()}.get(name, p)
    chooser = GeneratorChooser(torch.Generator().manual_seed(0))
    chooser.bernoulli = lambda probability: False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            assert p[verify([0], torch.stack([p, p]), q[None], chooser).token] > 0


def test_a02_the_residual_is_a_law():
    for seed in range(20):
        p, q = random_laws(5, 0, seed, zeros=True).after(()), random_laws(5, 0, 90 + seed, zeros=True).after(())
        law = residual(p, q)
        assert law.min() >= 0 and float(law.sum()) == pytest.approx(1, abs=1e-12)
        assert not law[p == 0].any()
    torch.testing.assert_close(residual(tensor(0.3, 0.5, 0.2), tensor(0.45, 0.3, 0.25)), tensor(0, 1, 0))
