"""Losslessness of the verifier, exactly: every branch is followed, and what is emitted has the target's law."""

import itertools
import math
import warnings
from collections import Counter

import pytest
import torch
from laws import exact_law, largest_difference, total_variation

from specdec import verify
from specdec.chance import GeneratorChooser
from specdec.verify import overlap, residual, verify_tokens


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


class Laws:
    """A law of the next token for every text of up to `depth` tokens."""

    def __init__(self, vocabulary, depth, make_law):
        self.vocabulary = vocabulary
        self.texts = {t: make_law() for n in range(depth + 1) for t in itertools.product(range(vocabulary), repeat=n)}

    def after(self, text):
        return self.texts[tuple(text)]

    def along(self, text, count):
        """The laws after the first 0, 1, ... tokens of a text, shape (count, V)."""
        return torch.stack([self.after(text[:n]) for n in range(count + 1)])[:count]

    def of_texts(self, length):
        """The probability of every text of `length` tokens."""
        texts = itertools.product(range(self.vocabulary), repeat=length)
        return {t: math.prod(float(self.after(t[:n])[t[n]]) for n in range(length)) for t in texts}


def random_laws(vocabulary, depth, seed, zeros=False):
    generator = torch.Generator().manual_seed(seed)

    def make_law():
        weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 3
        if zeros:
            kept = torch.rand(vocabulary, generator=generator) < 0.5
            kept[int(torch.randint(vocabulary, (1,), generator=generator))] = True
            weights = weights * kept
        return weights / weights.sum()

    return Laws(vocabulary, depth, make_law)


def same_everywhere(depth, *law):
    return Laws(len(law), depth, lambda: tensor(*law))


def verified(tokens, p, q, chooser):
    verdict = verify_tokens(tokens, p, q, chooser)
    return (*tokens[: verdict.accepted], verdict.token)


def law_of_a_round(p, q, k, *, verify=verified, drawn_from=None):
    """The exact law of k + 1 tokens, of which one round emits the first few and the target alone the rest.

    Args:
        p, q: `Laws`; q None drafts the token k % V at every place, without drawing it.
        drawn_from: the laws that the draft is really drawn from, if they are not q.
    """

    def run(chooser):
        tokens = ()
        for j in range(k):
            drawn = None if q is None else (drawn_from or q).after(tokens)
            tokens += (j % p.vocabulary if drawn is None else chooser.categorical(drawn),)
        emitted = verify(tokens, p.along(tokens, k + 1), None if q is None else q.along(tokens, k), chooser)
        while len(emitted) < k + 1:
            emitted += (chooser.categorical(p.after(emitted)),)
        return emitted[: k + 1]

    return exact_law(run)


def error(p, q, k, **options):
    return largest_difference(law_of_a_round(p, q, k, **options), p.of_texts(k + 1))


# The production verifier


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_round_emits_exactly_the_targets_law(seed, zeros, k):
    p, q = random_laws(3, k, seed, zeros), random_laws(3, k, 100 + seed, zeros)
    assert error(p, q, k) < 1e-12


def test_a_round_emits_exactly_the_targets_law_over_four_tokens():
    assert error(random_laws(4, 2, 5), random_laws(4, 2, 6), 2) < 1e-12


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.3, 0.5, 0.2), (0.3, 0.5, 0.2)),  # equal: nothing is rejected
        ((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5)),  # disjoint: everything is
        ((1.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
        ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        ((0.0, 1.0, 0.0), (0.2, 0.5, 0.3)),  # greedy target, sampling draft
        ((0.2, 0.5, 0.3), (0.0, 1.0, 0.0)),  # and the other way round
        ((0.6, 0.4, 0.0), (0.0, 0.5, 0.5)),
        ((1.0,), (1.0,)),
    ],
)
def test_degenerate_laws(p, q):
    for k in (1, 2, 3):
        assert error(same_everywhere(k, *p), same_everywhere(k, *q), k) < 1e-12


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_without_laws_is_a_point_mass(seed, zeros):
    for k in (1, 2, 3):
        assert error(random_laws(3, k, seed, zeros), None, k) < 1e-12


# Negative controls: the same check catches wrong variants


def with_acceptance(probability_of):
    """A verifier that accepts with another probability than min(1, p / q)."""

    def verify(tokens, p, q, chooser):
        for j, token in enumerate(tokens):
            if not chooser.bernoulli(min(1.0, probability_of(float(p[j][token]), float(q[j][token])))):
                return (*tokens[:j], chooser.categorical(residual(p[j], q[j])))
        return (*tokens, chooser.categorical(p[len(tokens)]))

    return verify


def going_on_after_a_rejection(tokens, p, q, chooser):
    emitted = ()
    for j, token in enumerate(tokens):
        accepted = chooser.bernoulli(min(1.0, float(p[j][token] / q[j][token])))
        emitted += (token if accepted else chooser.categorical(residual(p[j], q[j])),)
    return (*emitted, chooser.categorical(p[len(tokens)]))


P, Q = random_laws(3, 2, 0), random_laws(3, 2, 1)


def test_the_check_passes_where_the_variants_below_are_right():
    assert error(P, Q, 2, verify=with_acceptance(lambda p, q: p / q)) < 1e-12


def test_a_residual_taken_as_p_is_caught(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
    assert error(P, Q, 2) > 0.01


def test_a_ratio_upside_down_is_caught():
    assert error(P, Q, 2, verify=with_acceptance(lambda p, q: q / p)) > 0.01


def test_accepting_at_u_equal_to_the_ratio_is_caught_where_p_is_0():
    """`u <= p / q` accepts an impossible token whenever u = 0, once in 2^24 draws of float32."""
    p, q = same_everywhere(2, 0.6, 0.4, 0.0), same_everywhere(2, 0.2, 0.3, 0.5)
    assert error(p, q, 2, verify=with_acceptance(lambda p, q: max(p / q, 2**-24))) > 1e-8


def test_a_draft_drawn_from_another_law_than_q_is_caught():
    greedy = Laws(3, 2, lambda: tensor(1, 0, 0))
    greedy.texts = {text: torch.eye(3, dtype=torch.float64)[law.argmax()] for text, law in Q.texts.items()}
    assert error(P, Q, 2, drawn_from=greedy) > 0.01
    assert error(P, greedy, 2) < 1e-12  # the same draft with its true laws


def test_going_on_after_a_rejection_is_caught():
    assert error(P, Q, 2, verify=going_on_after_a_rejection) > 0.01


# What a verdict says


def test_the_probability_of_acceptance_is_the_overlap():
    for seed in range(5):
        p, q = random_laws(4, 0, seed).after(()), random_laws(4, 0, 50 + seed, zeros=True).after(())

        def accepted(chooser, p=p, q=q):
            return verify_tokens([chooser.categorical(q)], torch.stack([p, p]), q[None], chooser).accepted

        assert exact_law(accepted).get(1, 0.0) == pytest.approx(float(overlap(p, q)), abs=1e-12)


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


@pytest.mark.parametrize(
    ("p_shape", "q_shape"), [((2, 3), (2, 3)), ((3, 3), (1, 3)), ((3, 3), (2, 4)), ((4, 3), None), ((2, 3), None)]
)
def test_shapes_that_do_not_fit_are_refused(p_shape, q_shape):
    with pytest.raises(ValueError, match="2 draft tokens need p of shape"):
        verify_tokens([0, 1], torch.ones(p_shape) / 3, None if q_shape is None else torch.ones(q_shape) / 3, Coins())


@pytest.mark.parametrize("q_x", [0.0, math.nan])
def test_a_token_that_its_own_law_excludes_is_refused(q_x):
    with pytest.raises(ValueError, match="draft token 1 at position 0"):
        verify_tokens([1], torch.ones(2, 2) / 2, torch.tensor([[1.0, q_x]]), Coins(True))


# Rounding


@pytest.mark.parametrize("name", ["equal", "scaled", "one-hot", "bfloat16 p"])
def test_a_rejection_that_only_rounding_can_cause_still_draws_from_the_target(name):
    p = torch.tensor([0.7, 0.3 - 1e-6, 0.0, 1e-6])
    q = {"equal": p, "scaled": p * (1 + 1e-7), "one-hot": torch.tensor([1.0, 0, 0, 0]), "bfloat16 p": p}[name]
    p = {"one-hot": q, "bfloat16 p": p.bfloat16()}.get(name, p)
    chooser = GeneratorChooser(torch.Generator().manual_seed(0))
    chooser.bernoulli = lambda probability: False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            assert p[verify_tokens([0], torch.stack([p, p]), q[None], chooser).token] > 0


def test_the_residual_is_a_law():
    for seed in range(20):
        p, q = random_laws(5, 0, seed, zeros=True).after(()), random_laws(5, 0, 90 + seed, zeros=True).after(())
        law = residual(p, q)
        assert law.min() >= 0 and float(law.sum()) == pytest.approx(1, abs=1e-12)
        assert not law[p == 0].any()
    torch.testing.assert_close(residual(tensor(0.3, 0.5, 0.2), tensor(0.45, 0.3, 0.25)), tensor(0, 1, 0))


# By counting, as in the original write-up


def test_twenty_thousand_sampled_tokens_follow_the_target():
    p, q = torch.tensor([0.30, 0.50, 0.20]), torch.tensor([0.45, 0.30, 0.25])
    both = torch.stack([p, p])
    chooser = GeneratorChooser(torch.Generator().manual_seed(0))
    counts = Counter(verified([chooser.categorical(q)], both, q[None], chooser)[0] for _ in range(20_000))
    # Noise alone stays below 0.013; a greedy draft verified against its softmax is off by 0.37.
    assert total_variation(counts, {0: 0.30, 1: 0.50, 2: 0.20}) < 0.02
