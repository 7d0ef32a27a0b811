"""Losslessness by sampling, through the whole loop with its real generator: weaker than test_exact_laws.py, but all is real.

Each of 14 tests counts the first two tokens of 2000 texts, jointly, and compares them with the target's law by a G-test at
the level 1e-4. All of them together raise a false alarm with probability below 14 · 1e-4 = 0.14 % (Bonferroni); seeds are
fixed, so that chance was taken once. A defect of total variation distance 0.085 or more is noticed with probability above
0.99, whatever its shape (see `laws.power`). Two more tests are the original write-up's: the primitive by itself at the end of
this file, and greedy equality on the toy pair in test_generate_toy.py.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from laws import (
    adjusted,
    chi_square_limit,
    chi_square_tail,
    frequencies,
    g_statistic,
    law_of_texts,
    law_of_the_loop,
    power,
    total_variation,
)
from stand_ins import ScriptedModel, random_table

from specdec.chance import GeneratorChooser
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.generate import speculative_generate
from specdec.verify import verify_tokens

LEVEL, TESTS, TEXTS, NOTICED = 1e-4, 14, 2000, 0.085
PROMPT = (1, 2, 1, 0, 2, 1)  # prompt lookup finds its ending

TARGET, DRAFT = (random_table(3, seed, dtype=torch.float64) for seed in (0, 1))

CASES = {
    "token, k = 1": {"k": 1},
    "token, k = 2": {"k": 2},
    "token, k = 4": {"k": 4},
    "token, T = 0.6": {"k": 2, "temperature": 0.6},
    "token, T = 2": {"k": 2, "temperature": 2.0},
    "token, top-k": {"k": 2, "top_k": 2},
    "token, top-p": {"k": 2, "temperature": 1.4, "top_p": 0.7},
    "block, k = 1": {"k": 1, "verify": "block"},
    "block, k = 2": {"k": 2, "verify": "block"},
    "block, k = 4": {"k": 4, "verify": "block"},
    "block, top-k": {"k": 2, "verify": "block", "top_k": 2},
    "prompt lookup": {"k": 2, "drafter": PromptLookupDrafter()},
    "confidence stop": {"k": 4, "drafter": ModelDrafter(ScriptedModel(DRAFT), confidence_threshold=0.4)},
    "plain": {"k": 0},
}


class GreedyWithSoftmax(ModelDrafter):
    """A wrong draft: the likeliest token, handed over with the laws of sampling."""

    def propose(self, context, max_tokens, chooser):
        class First:
            def categorical(self, weights):
                return int(weights.argmax())

        return super().propose(context, max_tokens, First())


def counted_pairs(texts=TEXTS, seed=0, k=2, drafter=None, temperature=1.0, **options):
    target, generator = ScriptedModel(TARGET), torch.Generator().manual_seed(seed)
    drafter = drafter or ModelDrafter(ScriptedModel(DRAFT))
    options = {"k": k, "drafter": drafter, "temperature": temperature, "generator": generator, **options}
    prompt = torch.tensor([PROMPT])
    return Counter(
        speculative_generate(target, prompt, max_new_tokens=max(2, k), **options).new_tokens[:2] for _ in range(texts)
    )


def law_of_pairs(temperature=1.0, top_k=None, top_p=None, **others):
    return law_of_texts(TARGET, PROMPT, 2, temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("name", CASES)
def test_f01_pairs_of_tokens_follow_the_targets_joint_law(name):
    g, limit = g_statistic(counted_pairs(**CASES[name]), law_of_pairs(**CASES[name]), LEVEL)
    assert g < limit


def test_f02_the_draft_is_far_from_the_target():
    """Where p = q everything is accepted, and the tests above would test nothing."""
    contexts = [(PROMPT[-2], PROMPT[-1]), *((PROMPT[-1], token) for token in range(3))]  # where the pairs are drawn
    overlaps = [float(torch.minimum(TARGET[at], DRAFT[at]).sum()) for at in contexts]
    assert max(overlaps) < 0.95 and sum(overlaps) / len(overlaps) < 0.8


# How much the tests would notice


def test_the_number_of_tests_is_the_one_in_the_bound():
    assert len(CASES) == TESTS


def test_any_defect_of_the_stated_size_is_noticed():
    freedom = max(len(law_of_pairs(**case)) for case in CASES.values()) - 1
    assert power(NOTICED, TEXTS, freedom, LEVEL) >= 0.99


def wrong_law():
    """The exact law of the pairs with the wrong draft."""
    drafter = GreedyWithSoftmax(ScriptedModel(DRAFT))
    return law_of_the_loop(ScriptedModel(TARGET), drafter, PROMPT, 2, 2, temperature=1.0)


def rejections(law, texts, level, repeats=1000):
    """How often the test rejects the target's law when pairs follow another, or the same, law."""
    outcomes, generator = list(law), np.random.default_rng(0)
    samples = generator.multinomial(texts, list(law.values()), size=repeats)
    right = law_of_pairs()
    tested = (g_statistic(dict(zip(outcomes, row, strict=True)), right, level) for row in samples.tolist())
    return sum(g >= limit for g, limit in tested) / repeats


def test_f02_a_draft_verified_against_another_law_is_noticed():
    counts = counted_pairs(500, drafter=GreedyWithSoftmax(ScriptedModel(DRAFT)))
    g, limit = g_statistic(counts, law_of_pairs(), LEVEL)
    assert g > 2 * limit
    assert total_variation(wrong_law(), law_of_pairs()) > 0.3
    assert rejections(wrong_law(), 500, LEVEL, 200) == 1


def test_the_stated_power_is_a_lower_bound():
    """Mixed with the wrong law so that the distance is small, the target's law is rejected at least as often as promised."""
    right, wrong, texts, level = law_of_pairs(), wrong_law(), 1500, 1e-2
    for distance in (0.03, 0.05):
        share = distance / total_variation(wrong, right)
        mixed = {pair: (1 - share) * p + share * wrong.get(pair, 0.0) for pair, p in right.items()}
        assert total_variation(mixed, right) == pytest.approx(distance)
        assert rejections(mixed, texts, level) >= power(distance, texts, len(right) - 1, level) - 0.02


def test_the_level_is_what_it_says():
    assert rejections(law_of_pairs(), TEXTS, 0.05) == pytest.approx(0.05, abs=0.02)


def test_the_limits_are_those_of_tables():
    tabulated = {(0.05, 1): 3.841, (0.01, 3): 11.345, (0.001, 8): 26.124, (0.0001, 8): 31.828, (0.05, 30): 43.773}
    for (level, freedom), limit in tabulated.items():
        assert chi_square_limit(level, freedom) == pytest.approx(limit, abs=5e-4)
    assert chi_square_tail(15.507, 8, 15.0) == pytest.approx(0.80, abs=0.01)  # 8 degrees, 5 %: power 0.8 at λ = 15.0


def test_adjusting_in_plain_python_is_right():
    assert adjusted([0.5, 0.3, 0.2], temperature=0.5) == pytest.approx({0: 25 / 38, 1: 9 / 38, 2: 4 / 38})
    assert adjusted([0.2, 0.5, 0.3], top_k=2) == pytest.approx({1: 5 / 8, 2: 3 / 8})
    assert adjusted([0.2, 0.5, 0.3], top_p=0.5) == {1: 1.0}
    assert adjusted([0.2, 0.5, 0.3], temperature=0) == {1: 1.0}


# The original write-up's check of the primitive, independent of any model


def test_a01_f01_twenty_thousand_sampled_tokens_follow_the_target():
    p, q = torch.tensor([0.30, 0.50, 0.20]), torch.tensor([0.45, 0.30, 0.25])
    both = torch.stack([p, p])
    chooser = GeneratorChooser(torch.Generator().manual_seed(0))
    counts: Counter = Counter()
    for _ in range(20_000):
        drafted = chooser.categorical(q)
        verdict = verify_tokens([drafted], both, q[None], chooser)
        counts[drafted if verdict.accepted else verdict.token] += 1
    # Noise alone stays below 0.013; a greedy draft verified against its softmax is off by 0.37.
    assert total_variation(frequencies(counts), {0: 0.30, 1: 0.50, 2: 0.20}) < 0.02
