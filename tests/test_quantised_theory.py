"""What rounding a draft can do to α at most, and how much α a cheaper draft may lose (notes/quantised-drafts.md)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from stand_ins import tiny_llama
from torch import Tensor

from specdec.grid import Grid
from specdec.lowbit import Method, Recipe, lowbit_copy
from specdec.sampling import SamplingConfig, to_probs
from specdec.theory import (
    break_even_alpha,
    equal_speed_alpha,
    expected_tokens_per_round,
    optimal_k,
    predicted_speedup,
    walltime_factor,
)
from specdec.verify import overlap

EXACT = 1e-12
RATES = st.floats(0, 1)
REPEATABLE = settings(deadline=None, derandomize=True)  # other processes may hold the machine up


def total_variation(q: Tensor, other: Tensor) -> Tensor:
    """½ Σ |q − q̂|, written without Σ min, which is what it is to bound."""
    return (q - other).abs().sum(dim=-1) / 2


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def laws(draw: st.DrawFn, count: int) -> list[Tensor]:
    """So many laws over the same few tokens; zeros, and with them one-hot and disjoint laws, are common."""
    size = draw(st.integers(2, 6))
    found = []
    for _ in range(count):
        weights = tensor(
            *draw(st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0]) | RATES, min_size=size, max_size=size))
        )
        assume(float(weights.sum()) > 1e-9)
        found.append(weights / weights.sum())
    return found


# Any temperature: |Δβ| ≤ TV(q, q̂)

ONE_HOT = [tensor(1, 0, 0), tensor(0, 1, 0), tensor(0, 0, 1)]
DISJOINT = [tensor(0.5, 0.5, 0), tensor(0.25, 0.75, 0), tensor(0, 0, 1)]


@REPEATABLE
@given(laws(3))
@example(ONE_HOT)
@example(DISJOINT)
@example(DISJOINT[::-1])
@example([DISJOINT[0], DISJOINT[2], DISJOINT[1]])
def test_acceptance_changes_by_no_more_than_the_draft(three: list[Tensor]) -> None:
    p, q, rounded = three
    change = overlap(p, rounded) - overlap(p, q)
    assert abs(change) <= total_variation(q, rounded) + EXACT


@REPEATABLE
@given(laws(2))
@example(ONE_HOT[:2])
def test_a_self_draft_loses_all_of_the_distance(two: list[Tensor]) -> None:
    """p = q: the bound is attained, whatever rounding does, and nothing is left to gain."""
    p, rounded = two
    assert float(1 - overlap(p, rounded)) == pytest.approx(float(total_variation(p, rounded)), abs=EXACT)


@REPEATABLE
@given(laws(2), RATES)
def test_the_bound_is_attained_either_way_on_the_line_between_draft_and_target(two: list[Tensor], share: float) -> None:
    """A draft that moves straight towards the target gains what it moves; the way back loses as much."""
    p, q = two
    nearer = (1 - share) * q + share * p
    gain = float(overlap(p, nearer) - overlap(p, q))
    assert gain == pytest.approx(float(total_variation(q, nearer)), abs=EXACT)
    assert gain >= -EXACT


def test_the_bound_is_not_always_attained() -> None:
    """Mass that moves among tokens of which the draft has too much is no loss: it was rejected anyway."""
    p, q, rounded = tensor(1, 0, 0), tensor(0.4, 0.6, 0), tensor(0.4, 0, 0.6)
    assert overlap(p, rounded) == overlap(p, q)
    assert total_variation(q, rounded) == pytest.approx(0.6)


def test_rounding_may_raise_acceptance_at_a_context() -> None:
    p, q, rounded = tensor(0.6, 0.3, 0.1), tensor(0.5, 0.3, 0.2), tensor(0.57, 0.29, 0.14)
    assert overlap(p, q) == pytest.approx(0.9)
    assert overlap(p, rounded) == pytest.approx(0.96)


def test_mean_acceptance_changes_by_no_more_than_the_mean_distance() -> None:
    """α over many contexts; and far less where gains and losses cancel."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 500, 20, generator=generator, dtype=torch.float64)
    p, q = (logits[n].softmax(dim=-1) for n in (0, 1))
    rounded = (logits[1] + 0.3 * logits[2]).softmax(dim=-1)
    change = abs(float(overlap(p, rounded).mean() - overlap(p, q).mean()))
    distance = float(total_variation(q, rounded).mean())
    assert change <= distance
    assert change < distance / 5


# How far the draft's law moves


@REPEATABLE
@given(laws(2))
@example(ONE_HOT[:2])
def test_pinsker(two: list[Tensor]) -> None:
    """TV ≤ √(KL / 2), in nats; infinite where the rounded draft leaves out a token, so no bound then."""
    q, rounded = two
    divergence = float(torch.where(q > 0, q * (q / rounded).log(), torch.zeros_like(q)).sum())
    assert float(total_variation(q, rounded)) <= math.sqrt(max(divergence, 0) / 2) + 1e-7


def test_pinsker_is_nearly_attained_by_small_changes_of_a_fair_coin() -> None:
    q, rounded = tensor(0.5, 0.5), tensor(0.501, 0.499)
    divergence = float((q * (q / rounded).log()).sum())
    assert float(total_variation(q, rounded)) == pytest.approx(math.sqrt(divergence / 2), rel=1e-5)


@REPEATABLE
@given(st.integers(0, 10**6), st.floats(0.001, 3), st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_logits_that_are_off_by_little_move_the_law_by_little(seed: int, error: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    off = error * (2 * torch.rand(50, 8, generator=generator, dtype=torch.float64) - 1)
    q, rounded = ((values / temperature).softmax(dim=-1) for values in (logits, logits + off))
    assert float(total_variation(q, rounded).max()) <= math.tanh(error / (2 * temperature)) + EXACT


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_two_tokens_whose_odds_turn_round_attain_the_bound_on_logits(temperature: float) -> None:
    error = 0.2
    logits = tensor(-error / 2, error / 2)  # turned round by +ε and −ε
    q, rounded = ((values / temperature).softmax(dim=-1) for values in (logits, logits + tensor(error, -error)))
    assert float(total_variation(q, rounded)) == pytest.approx(math.tanh(error / (2 * temperature)))


# Greedy


def greedy(logits: Tensor) -> Tensor:
    return to_probs(logits, SamplingConfig(0.0))


@REPEATABLE
@given(st.integers(0, 10**6), st.floats(0, 3))
def test_greedy_alpha_changes_by_no_more_than_the_share_of_flips(seed: int, error: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, draft, off = torch.randn(3, 40, 6, generator=generator)
    rounded = draft + error * off
    p, q, other = greedy(target), greedy(draft), greedy(rounded)
    flips = (draft.argmax(dim=-1) != rounded.argmax(dim=-1)).float()
    change = overlap(p, other) - overlap(p, q)
    assert torch.equal(total_variation(q, other), flips)  # the general bound, position by position
    assert bool((change.abs() <= flips).all())
    assert abs(float(change.sum())) <= float(flips.sum())
    assert torch.equal(1 - overlap(q, other), flips)  # a greedy self-draft loses all of them


def test_a_flip_between_two_wrong_tokens_costs_nothing() -> None:
    p, q, rounded = (greedy(torch.tensor(values)) for values in ([3.0, 1, 0], [0.0, 2, 1], [0.0, 1, 2]))
    assert overlap(p, q) == overlap(p, rounded) == 0
    assert total_variation(q, rounded) == 1


def test_the_best_token_stays_where_it_leads_by_more_than_twice_the_error() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 10, generator=generator, dtype=torch.float64)
    error = 0.2
    off = error * (2 * torch.rand(2000, 10, generator=generator, dtype=torch.float64) - 1)
    best = logits.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * error
    flips = logits.argmax(dim=-1) != (logits + off).argmax(dim=-1)
    assert not bool(flips[clear].any())
    assert bool(flips[~clear].any())


# Break-even


@pytest.mark.parametrize(
    ("alpha", "c", "cheaper_c", "needed"),
    [(0.70, 0.24, 0.12, 0.5455), (0.70, 0.06, 0.03, 0.6455), (0.85, 0.02, 0.01, 0.8309)],
)
def test_how_much_alpha_half_the_cost_may_lose_at_k_4(alpha: float, c: float, cheaper_c: float, needed: float) -> None:
    found = equal_speed_alpha(alpha, 4, c, cheaper_c)
    assert found == pytest.approx(needed, abs=5e-5)
    closed = (1 - needed**5) / (1 - needed) / (4 * cheaper_c + 1), (1 - alpha**5) / (1 - alpha) / (4 * c + 1)
    assert closed[0] == pytest.approx(closed[1], rel=2e-4)


@pytest.mark.parametrize(
    ("alpha", "c", "cheaper_c", "needed", "ks"),
    [
        (0.70, 0.24, 0.12, 0.542, (2, 2)),
        (0.70, 0.06, 0.03, 0.642, (5, 6)),
        (0.85, 0.02, 0.01, 0.826, (14, 15)),
    ],
)
def test_how_much_alpha_half_the_cost_may_lose_where_each_draft_has_its_best_k(
    alpha: float, c: float, cheaper_c: float, needed: float, ks: tuple[int, int]
) -> None:
    """A cheaper draft may also draft more, so it may lose a little more than at a k that both share."""

    def best(rate: float, cost: float) -> float:
        return walltime_factor(rate, optimal_k(rate, cost), cost)

    assert best(needed - 5e-4, cheaper_c) < best(alpha, c) < best(needed + 5e-4, cheaper_c)
    assert (optimal_k(alpha, c), optimal_k(needed, cheaper_c)) == ks
    shared = equal_speed_alpha(alpha, ks[0], c, cheaper_c)
    assert shared is not None and needed <= shared + 5e-4


@REPEATABLE
@given(st.floats(0, 1), st.integers(1, 12), st.floats(0, 1), RATES, st.floats(1, 3))
def test_at_the_equal_speed_alpha_both_predictions_agree(
    alpha: float, k: int, c: float, share: float, v: float
) -> None:
    cheaper = share * c
    found = equal_speed_alpha(alpha, k, c, cheaper, v)
    assert found is not None and found <= alpha + 1e-9  # a cheaper draft never needs more
    own = predicted_speedup(expected_tokens_per_round(alpha, k), k, c, v)
    other = predicted_speedup(expected_tokens_per_round(found, k), k, cheaper, v)
    if found > 0:
        assert other == pytest.approx(own, rel=1e-9)
    else:  # even a draft that is always rejected is as fast
        assert other >= own * (1 - 1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_draft_of_equal_cost_needs_the_same_alpha(alpha: float, k: int) -> None:
    assert equal_speed_alpha(alpha, k, 0.2, 0.2, 1.3) == pytest.approx(alpha, abs=1e-9)


def test_at_k_1_the_formula_is_solved_by_hand() -> None:
    """1 + α' = (1 + α) (c' + v) / (c + v)."""
    assert equal_speed_alpha(0.8, 1, 0.5, 0.2, 1.5) == pytest.approx(1.8 * 1.7 / 2 - 1)
    assert equal_speed_alpha(0.8, 1, 1.0, 0.0, 1.0) == 0  # 1.8 / 2 tokens are needed, and one is always emitted


def test_a_dearer_draft_may_find_no_alpha_that_is_enough() -> None:
    assert equal_speed_alpha(0.9, 4, 0.1, 0.5) is None
    assert equal_speed_alpha(1.0, 4, 0.1, 0.1 + 1e-6) is None


@pytest.mark.parametrize("v", [1.0, 1.6])
def test_the_cheaper_the_draft_the_more_it_may_lose(v: float) -> None:
    found = [equal_speed_alpha(0.7, 4, 0.3, cheaper, v) for cheaper in (0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0)]
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found)


def test_half_the_cost_buys_more_where_the_draft_is_dear_and_verification_is_cheap() -> None:
    by_cost = [equal_speed_alpha(0.7, 4, c, c / 2) for c in (0.02, 0.06, 0.12, 0.24, 0.48)]
    assert by_cost == sorted(by_cost, reverse=True)
    by_verification = [equal_speed_alpha(0.7, 4, 0.24, 0.12, v) for v in (1.0, 1.5, 2.0, 4.0)]
    assert by_verification == sorted(by_verification)


@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_that_just_pays_is_as_fast_as_any_other_that_just_pays(k: int) -> None:
    """Both then have the speed of plain decoding."""
    dear, cheap = break_even_alpha(k, 0.3, 1.2), break_even_alpha(k, 0.1, 1.2)
    assert dear is not None
    assert equal_speed_alpha(dear, k, 0.3, 0.1, 1.2) == pytest.approx(cheap, abs=1e-9)


# A model whose weights lie on a grid already, as the embedded one's do


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_model_that_lies_on_the_grid_stays_there_by_every_method(method: Method) -> None:
    """So a draft loses nothing where the format is the one that its weights came in."""
    texts = [torch.randint(40, (32,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    grid = Grid(4, 8, "min")
    came = lowbit_copy(tiny_llama(), Recipe(grid, head=False)).model
    again = lowbit_copy(came, Recipe(grid, method, head=False), texts).model
    for (name, parameter), other in zip(came.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    coarser = lowbit_copy(came, Recipe(Grid(4, 16), method, head=False), texts).model
    assert not torch.equal(
        came(texts[0][None]).logits, coarser(texts[0][None]).logits
    )  # another grid of 4 bits is not free
