"""Counts and rates with numbers worked out by hand, and intervals that cover."""

import random

import pytest

from specdec.stats import AcceptanceStats, Round, bootstrap_interval, ratio, ratio_of_sums
from specdec.theory import expected_tokens_per_round, iid_acceptance_length


def round_of(proposed, accepted, overlap=0.5):
    """A round without an end token: tested are the accepted positions and, if there is one, the rejected one."""
    return Round(proposed, proposed, accepted, accepted + 1, (overlap,) * min(accepted + 1, proposed))


# Coins [yes, no, yes] and [yes, yes, yes], then a last round of two proposals, the first rejected.
TWO = AcceptanceStats((round_of(3, 1), round_of(3, 3)))
THREE = TWO + AcceptanceStats((round_of(2, 0),))


def test_a12_a_coin_behind_a_rejection_does_not_count():
    assert (TWO.accepted, TWO.proposed, TWO.new_tokens) == (4, 6, 6)
    assert TWO.draft_acceptance_rate == pytest.approx(2 / 3)
    assert TWO.tested == 5 and TWO.alpha == 0.8


def test_a12_a_shortened_round_counts_what_it_proposed():
    assert (THREE.accepted, THREE.proposed, THREE.new_tokens) == (4, 8, 7)
    assert THREE.draft_acceptance_rate == 0.5
    assert THREE.tested == 6 and THREE.alpha == pytest.approx(2 / 3)
    assert THREE.target_forwards == 3
    assert THREE.mean_acceptance_length == pytest.approx(7 / 3)
    assert THREE.mean_accepted_per_round == pytest.approx(4 / 3)


def test_positions():
    assert THREE.proposed_per_position == [3, 3, 2]
    assert THREE.tested_per_position == [3, 2, 1]
    assert THREE.accepted_per_position == [2, 1, 1]
    assert THREE.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert THREE.conditional_acceptance_per_position == pytest.approx([2 / 3, 1 / 2, 1])
    assert sum(THREE.proposed_per_position) == THREE.proposed
    assert sum(THREE.tested_per_position) == THREE.tested
    assert sum(THREE.accepted_per_position) == THREE.accepted


def test_the_overlap_is_averaged_over_tested_positions():
    stats = AcceptanceStats((Round(3, 3, 1, 2, (0.5, 0.25)), Round(3, 3, 0, 1, (0.0,))))
    assert stats.overlap == 0.75
    assert stats.alpha_overlap == 0.25


def test_a19_a_rate_over_nothing_is_none_not_0():
    plain = AcceptanceStats((round_of(0, 0), round_of(0, 0)))
    assert plain.mean_acceptance_length == 1 and plain.mean_accepted_per_round == 0
    for stats in (plain, AcceptanceStats()):
        assert stats.alpha is stats.alpha_overlap is stats.draft_acceptance_rate is None
        assert stats.acceptance_per_position == stats.conditional_acceptance_per_position == []
    assert AcceptanceStats().mean_acceptance_length is None
    never_reached = AcceptanceStats((round_of(2, 0),))
    assert never_reached.conditional_acceptance_per_position == [0, None]
    assert ratio(0, 0) is ratio_of_sums([]) is ratio_of_sums([(0, 0)]) is None


# Four rounds in the proportions of independent acceptances at α = 1/2, k = 2: two reject at once, one later, one never.
INDEPENDENT = AcceptanceStats((round_of(2, 0), round_of(2, 0), round_of(2, 1), round_of(2, 2)))


def test_a12_the_geometric_formula_holds_for_alpha_and_not_for_accepted_over_proposed():
    stats = INDEPENDENT
    assert (stats.alpha, stats.draft_acceptance_rate, stats.mean_acceptance_length) == (0.5, 0.375, 1.75)
    assert expected_tokens_per_round(stats.alpha, 2) == stats.mean_acceptance_length
    assert expected_tokens_per_round(stats.draft_acceptance_rate, 2) < 1.6
    assert 1 + 2 * stats.draft_acceptance_rate == stats.mean_acceptance_length  # an identity, whatever the rounds are
    assert iid_acceptance_length(0.5, [2, 2, 2, 2]) == 1.75


# Intervals


def prompts_with_rates(seed, count):
    """(accepted, tested) of prompts whose own rates vary about 0.6."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        tested = generator.randint(20, 60)
        rate = generator.uniform(0.4, 0.8)
        pairs.append((sum(generator.random() < rate for _ in range(tested)), tested))
    return pairs


def test_fewer_than_twelve_units_give_no_interval():
    units = prompts_with_rates(0, 12)
    assert bootstrap_interval(units[:11], ratio_of_sums) == (None, None)
    low, high = bootstrap_interval(units, ratio_of_sums)
    assert low < ratio_of_sums(units) < high


def test_an_undefined_statistic_gives_no_interval():
    assert bootstrap_interval([(0, 0)] * 20, ratio_of_sums) == (None, None)
    low, high = bootstrap_interval([(0, 0)] * 10 + [(1, 2)] * 10, ratio_of_sums)
    assert low == high == 0.5


def test_the_interval_is_deterministic_and_changes_with_the_seed():
    units = prompts_with_rates(1, 20)
    assert bootstrap_interval(units, ratio_of_sums, seed=3) == bootstrap_interval(units, ratio_of_sums, seed=3)
    assert bootstrap_interval(units, ratio_of_sums, seed=3) != bootstrap_interval(units, ratio_of_sums, seed=4)


@pytest.mark.parametrize(("level", "deviations"), [(0.95, 1.960), (0.5, 0.674)])
def test_of_a_simple_proportion_the_interval_is_the_textbook_one(level, deviations):
    units = [(float(i % 10 < 3), 1.0) for i in range(200)]
    error = (0.3 * 0.7 / 200) ** 0.5
    low, high = bootstrap_interval(units, ratio_of_sums, level=level)
    assert (0.3 - low) / error == pytest.approx(deviations, abs=0.2)
    assert (high - 0.3) / error == pytest.approx(deviations, abs=0.2)


def test_the_interval_covers_the_true_rate_about_as_often_as_it_says():
    covered = 0
    for seed in range(150):
        low, high = bootstrap_interval(prompts_with_rates(seed, 24), ratio_of_sums, resamples=300)
        covered += low <= 0.6 <= high
    assert 0.87 <= covered / 150 <= 0.99
