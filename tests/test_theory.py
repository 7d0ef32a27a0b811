"""The published numbers, the edges, and brute force."""

import pytest
import torch
from laws import exact_law

from specdec.errors import InputError
from specdec.theory import (
    accepted_at_least_by_block,
    accepted_at_least_by_token,
    break_even_alpha,
    expected_emitted,
    expected_tokens_per_round,
    iid_acceptance_length,
    optimal_k,
    predicted_speedup,
    speedups,
    walltime_factor,
)
from specdec.verify import overlap, verify_tokens


@pytest.mark.parametrize(
    ("alpha", "k", "speed"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_table_1_of_leviathan_et_al(alpha, k, speed):
    assert walltime_factor(alpha, k, c=0) == pytest.approx(speed, abs=0.005)
    assert expected_tokens_per_round(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


@pytest.mark.parametrize(
    ("alpha", "k", "c", "speed"),
    [(0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.62, 7, 0.02, 2.3), (0.65, 5, 0.02, 2.4), (0.55, 3, 0.04, 1.8)],
)
def test_expected_speed_ups_of_their_table_4(alpha, k, c, speed):
    assert walltime_factor(alpha, k, c) == pytest.approx(speed, abs=0.05)


def test_edges():
    for k in range(6):
        assert expected_tokens_per_round(0, k) == 1
        assert expected_tokens_per_round(1, k) == k + 1
    for alpha in (0, 0.3, 1):
        assert expected_tokens_per_round(alpha, 0) == 1
        assert expected_tokens_per_round(alpha, 1) == 1 + alpha
        assert walltime_factor(alpha, 0, c=0.5) == 1
    assert expected_tokens_per_round(0.5, 10**4) == pytest.approx(2)


def test_the_prediction_with_measured_costs():
    assert predicted_speedup(3.84, 4, 0.1, 1.5) == pytest.approx(3.84 / 1.9)
    assert predicted_speedup(expected_tokens_per_round(0.7, 3), 3, 0.05, 1) == walltime_factor(0.7, 3, 0.05)
    assert predicted_speedup(1, 0, 0.1, 1) == 1  # plain decoding


@pytest.mark.parametrize("c", [0.02, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_the_optimal_k_by_brute_force(alpha, c):
    def factor(k):  # the closed form
        return (k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)) / (k * c + 1)

    best = max(range(65), key=lambda k: (round(factor(k), 12), -k))
    assert optimal_k(alpha, c) == best
    assert (best > 0) == (alpha > c)  # Corollary 3.9


def test_the_optimal_k_under_measured_verification_costs():
    v = [1.0, 1.1, 1.2, 2.5, 2.6]
    factors = [expected_tokens_per_round(0.8, k) / (k * 0.1 + v[k]) for k in range(5)]
    assert optimal_k(0.8, 0.1, v) == factors.index(max(factors)) == 2
    assert optimal_k(0.8, 0.1, [1.0, 3.0, 4.0]) == 0
    assert optimal_k(0.8, 0.1, [1.0]) == 0
    assert optimal_k(0.9, 0.0, max_k=3) == 3


def test_speed_ups_where_acceptance_depends_on_the_depth():
    v = [1.0, 1.1, 1.2, 2.5, 2.6]
    flat = speedups([0.8] * 4, 0.1, v)
    assert flat == pytest.approx([expected_tokens_per_round(0.8, k) / (k * 0.1 + v[k]) for k in range(5)])
    # 1 + a, 1 + a + ab, ... tokens
    assert speedups([0.5, 0.9], 0.2, [1.0, 1.3, 1.4]) == pytest.approx([1, 1.5 / 1.5, 1.95 / 1.8])
    assert speedups([0.5], 0.2, v) == pytest.approx([1, 1.5 / 1.3])  # the shorter one limits k
    assert speedups([0.5, 0.5], 0.2, [2.0]) == [0.5]


@pytest.mark.parametrize("v", [1.0, 1.3])
@pytest.mark.parametrize("c", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_break_even_is_the_inverse_of_the_prediction(k, c, v):
    alpha = break_even_alpha(k, c, v)
    assert expected_tokens_per_round(alpha, k) == pytest.approx(k * c + v)
    if v == 1 and k == 1:
        assert alpha == pytest.approx(c)


def test_break_even_where_even_full_acceptance_loses():
    assert break_even_alpha(2, 1.0, 1.5) is None
    assert break_even_alpha(2, 1.0) == pytest.approx(1)


def test_the_geometric_length_where_k_varies_is_the_mean_over_rounds():
    assert iid_acceptance_length(0.5, [4, 4, 2, 0]) == pytest.approx((1.9375 * 2 + 1.75 + 1) / 4)
    assert iid_acceptance_length(0.5, []) is None


@pytest.mark.parametrize(("alpha", "k"), [(-0.1, 2), (1.1, 2), (float("nan"), 2), (0.5, -1)])
def test_what_is_no_probability_or_count_is_refused(alpha, k):
    with pytest.raises(InputError, match="allowed"):
        expected_tokens_per_round(alpha, k)


def test_expected_tokens_of_one_draft():
    by_token, by_block = accepted_at_least_by_token([0.5, 1.0, 0.2]), accepted_at_least_by_block([0.5, 1.0, 0.2])
    assert by_token == pytest.approx([0.5, 0.5, 0.1])
    assert by_block == pytest.approx([1, 1, 0.2])  # the longest prefix that passes counts
    assert accepted_at_least_by_block([0.5, 0.0]) == pytest.approx([0.5, 0])
    assert accepted_at_least_by_token([]) == accepted_at_least_by_block([]) == []
    assert expected_emitted(by_token, None) == pytest.approx(2.1)
    assert expected_emitted(by_block, None) == pytest.approx(3.2)
    # The second token ends the text: emitted are 1 token if the first is refused, else both and nothing behind them.
    assert expected_emitted(by_token, 2) == pytest.approx(0.5 * 1 + 0.5 * 2)
    assert expected_emitted([], None) == 1


# What the geometric length assumes, with the verifier that ships


def accepted_tested(p, q, k):
    """Expected numbers of accepted and of tested tokens in a round of which every position has the laws p and q."""

    def run(chooser):
        draft = [chooser.categorical(q) for _ in range(k)]
        return verify_tokens(draft, p.expand(k + 1, -1), q.expand(k, -1), chooser).accepted

    law = exact_law(run)
    return tuple(sum(chance * count(n) for n, chance in law.items()) for count in (int, lambda n: min(n + 1, k)))


P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
ALPHA = 0.6


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_of_constant_overlap_has_the_geometric_length(k):
    accepted, tested = accepted_tested(P, Q, k)
    assert float(overlap(P, Q)) == pytest.approx(ALPHA)
    assert 1 + accepted == pytest.approx(expected_tokens_per_round(ALPHA, k), abs=1e-12)
    assert accepted / tested == pytest.approx(ALPHA, abs=1e-12)


def test_accepted_over_proposed_is_a_mean_of_powers():
    rates = {}
    for k in (1, 2, 3):
        rates[k] = accepted_tested(P, Q, k)[0] / k
        assert rates[k] == pytest.approx(sum(ALPHA**i for i in range(1, k + 1)) / k, abs=1e-12)
        assert 1 + k * rates[k] == pytest.approx(expected_tokens_per_round(ALPHA, k), abs=1e-12)
    assert rates[1] > rates[2] > rates[3]
    assert expected_tokens_per_round(rates[3], 3) < 1 + 3 * rates[3]  # as α it predicts too few tokens


def test_rounds_that_differ_move_the_geometric_length_both_ways():
    """Half of the rounds accept everything, half of them have α = 0.6."""
    k = 3
    easy, hard = accepted_tested(P, P, k), accepted_tested(P, Q, k)
    accepted, tested = ((a + b) / 2 for a, b in zip(easy, hard, strict=True))
    assert expected_tokens_per_round((1 + ALPHA) / 2, k) < 1 + accepted - 0.05
    assert expected_tokens_per_round(accepted / tested, k) > 1 + accepted + 0.05
