"""The acceptance keys of a cell against counts made by hand, and the seeds of its prompts."""

import json
import zlib

import pytest
import torch
from laws import exact_law
from stand_ins import nearby, tiny_gpt2

from pipeline.acceptance import ComparingVerifier, PromptResult, acceptance_record, gain_record, prompt_generator
from specdec.chance import GeneratorChooser
from specdec.drafters import ModelDrafter
from specdec.generate import speculative_generate
from specdec.stats import AcceptanceStats, Round
from specdec.verify import VERIFIERS

RATIOS = ("draft_acceptance_rate", "alpha", "alpha_overlap", "mean_acceptance_length", "mean_accepted_per_round")
PER_POSITION = ("acceptance_per_position", "conditional_acceptance_per_position")

# Rejected at its second token; ended by an end token, the second of three drafted.
LONG = (Round(3, 3, 1, 2, (0.9, 0.5)), Round(3, 2, 2, 2, (1.0, 0.8)))
# Rejected at once; nothing drafted.
SHORT = (Round(2, 2, 0, 1, (0.2,)), Round(0, 0, 0, 1, ()))
PLAIN = (Round(0, 0, 0, 1, ()), Round(0, 0, 0, 1, ()))


def record_of(*prompts):
    record = acceptance_record([PromptResult(i, "qa", AcceptanceStats(rounds)) for i, rounds in enumerate(prompts)])
    json.dumps(record, allow_nan=False)
    return record


def test_the_counts_and_rates_of_two_prompts():
    record = record_of(LONG, SHORT)
    counts = {key: record[key] for key in ("prompts", "new_tokens", "rounds", "proposed", "accepted", "tested")}
    assert counts == {"prompts": 2, "new_tokens": 6, "rounds": 4, "proposed": 7, "accepted": 3, "tested": 5}
    assert record["draft_acceptance_rate"] == pytest.approx(3 / 7)
    assert record["alpha"] == pytest.approx(3 / 5)  # pooled; the mean of the two prompts' own would be 3/8
    assert record["alpha_overlap"] == pytest.approx(3.4 / 5)
    assert record["mean_acceptance_length"] == 1.5
    assert record["mean_accepted_per_round"] == 0.75


def test_the_iid_length_is_a_mean_over_what_the_rounds_drafted():
    three, two = 1 + 0.6 + 0.36 + 0.216, 1 + 0.6 + 0.36
    assert record_of(LONG, SHORT)["iid_acceptance_length"] == pytest.approx((three + three + two + 1) / 4)


def test_the_rates_per_position():
    record = record_of(LONG, SHORT)
    assert record["proposed_per_position"] == [3, 3, 1]
    assert record["tested_per_position"] == [3, 2, 0]
    assert record["acceptance_per_position"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert record["conditional_acceptance_per_position"] == [pytest.approx(2 / 3), 0.5, None]


def test_the_rounds_are_kept():
    assert record_of(LONG, SHORT)["per_prompt"] == [
        {
            "question_id": 0,
            "category": "qa",
            "per_round_drafted": [3, 3],
            "per_round_proposed": [3, 2],
            "per_round_accepted": [1, 2],
            "per_round_emitted": [2, 2],
        },
        {
            "question_id": 1,
            "category": "qa",
            "per_round_drafted": [2, 0],
            "per_round_proposed": [2, 0],
            "per_round_accepted": [0, 0],
            "per_round_emitted": [1, 1],
        },
    ]


def test_eleven_prompts_have_no_intervals_and_twelve_do():
    for key in RATIOS:
        assert record_of(*[LONG] * 11)[f"{key}_lo"] is record_of(*[LONG] * 11)[f"{key}_hi"] is None
        record = record_of(*[LONG, SHORT] * 6)
        assert record[f"{key}_lo"] < record[key] < record[f"{key}_hi"]
    for key in PER_POSITION:
        assert record_of(*[LONG] * 11)[f"{key}_lo"] == record_of(*[LONG] * 11)[f"{key}_hi"] == [None] * 3


def test_of_equal_prompts_every_interval_is_its_point():
    """So each interval is one of its own rate: equal prompts vary in nothing."""
    record = record_of(*[LONG] * 12)
    for key in RATIOS:
        assert record[f"{key}_lo"] == pytest.approx(record[key]) == record[f"{key}_hi"]
    for key in PER_POSITION:
        assert record[f"{key}_lo"] == pytest.approx(record[key]) == record[f"{key}_hi"]
    assert record["acceptance_per_position"] == [1, 0.5, 0]
    assert record["conditional_acceptance_per_position"] == [1, 0.5, None]


def test_a_position_that_some_prompts_never_reached_has_the_interval_of_the_others():
    record = record_of(*[LONG] * 6, *[SHORT[:1]] * 5, PLAIN)
    for key in PER_POSITION:
        for end in ("lo", "hi"):
            assert len(record[f"{key}_{end}"]) == len(record[key]) == 3
        low, high = record[f"{key}_lo"][0], record[f"{key}_hi"][0]
        assert record[key][0] == pytest.approx(12 / 17)
        assert low < 12 / 17 < high
    assert record["acceptance_per_position_lo"][2] == record["acceptance_per_position_hi"][2] == 0
    assert record["conditional_acceptance_per_position_hi"][1:] == [0.5, None]


def test_a19_what_is_undefined_is_none():
    for record, tau in ((record_of(*[PLAIN] * 12), 1), (record_of(), None)):
        assert record["mean_acceptance_length"] == tau
        for key in ("draft_acceptance_rate", "alpha", "alpha_overlap"):
            assert record[key] is record[f"{key}_lo"] is record[f"{key}_hi"] is None
        assert record["iid_acceptance_length"] is None
        for key in PER_POSITION:
            assert record[key] == record[f"{key}_lo"] == record[f"{key}_hi"] == []


# Seeds


def draws(seed, question_ids):
    return {i: torch.rand(3, generator=prompt_generator(seed, i)).tolist() for i in question_ids}


def test_a04_the_draws_of_a_prompt_depend_neither_on_the_others_nor_on_the_order():
    assert draws(0, [1, 2, "x"]) == draws(0, ["x", 2, 1])
    assert draws(0, [1, 2])[2] == draws(0, [2])[2]


def test_seed_and_prompt_both_change_the_draws():
    pairs = [(0, 1), (1, 0), (1, 1), (1, 11), (11, 1), (0, "a"), (0, "b")]
    assert len({prompt_generator(*pair).initial_seed() for pair in pairs}) == len(pairs)


def test_the_seed_is_the_same_in_every_process_and_global_state_is_left_alone():
    state = torch.get_rng_state()
    assert prompt_generator(3, 7).initial_seed() == zlib.crc32(b"3/7")  # committed results were drawn with these
    assert torch.equal(torch.get_rng_state(), state)


# Token against block verification


def test_the_gain_compares_what_both_rules_would_accept_of_the_same_drafts():
    """By following every draw of both verifiers on drafts that are given."""
    generator = torch.Generator().manual_seed(0)
    drafts = []
    verifier = ComparingVerifier("token")
    for _ in range(20):
        p = torch.rand(4, 3, generator=generator, dtype=torch.float64).softmax(dim=-1)
        q = (5 * torch.rand(3, 3, generator=generator, dtype=torch.float64)).softmax(dim=-1)
        tokens = torch.randint(3, (3,), generator=generator).tolist()
        drafts.append((tokens, p, q))
        verifier(tokens, p, q, GeneratorChooser(generator))
    expected = {
        rule: sum(
            probability * accepted
            for tokens, p, q in drafts
            for accepted, probability in exact_law(
                lambda chooser, tokens=tokens, p=p, q=q, verify=VERIFIERS[rule]: verify(tokens, p, q, chooser).accepted
            ).items()
        )
        for rule in ("token", "block")
    }
    record = gain_record([verifier])
    assert record["expected_emitted_token"] == pytest.approx(20 + expected["token"], abs=1e-12)
    assert record["expected_emitted_block"] == pytest.approx(20 + expected["block"], abs=1e-12)
    assert record["block_gain"] == pytest.approx((20 + expected["block"]) / (20 + expected["token"]))
    assert record["block_gain"] > 1 and record["block_gain_lo"] is record["block_gain_hi"] is None


@pytest.mark.parametrize("rule", ["token", "block"])
def test_comparing_decides_as_the_rule_does(rule):
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.rand(n, 5, generator=generator).softmax(dim=-1) for n in (4, 3))
    for seed in range(30):
        ours, theirs = (
            verify([0, 1, 2], p, q, GeneratorChooser(torch.Generator().manual_seed(seed)))
            for verify in (ComparingVerifier(rule), VERIFIERS[rule])
        )
        assert ours == theirs


def test_greedy_and_deterministic_drafts_gain_nothing():
    p = torch.eye(3, dtype=torch.float64)[[0, 1, 2]]
    verifiers = [ComparingVerifier("block") for _ in range(12)]
    for verifier in verifiers:
        verifier([0, 2], p, None, GeneratorChooser(torch.Generator().manual_seed(0)))
        verifier([0, 1], torch.rand(3, 3).softmax(dim=-1), None, GeneratorChooser(torch.Generator().manual_seed(0)))
    record = gain_record(verifiers)
    assert [record[f"block_gain{end}"] for end in ("", "_lo", "_hi")] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("end", [(), (5,), tuple(range(0, 40, 3))])
def test_greedy_rounds_emit_what_is_expected_of_them(end):
    """A draft may hold an end token, behind which nothing is emitted, or the bonus token may be one."""
    target = tiny_gpt2()
    for seed in range(6):
        prompt = torch.randint(40, (1, 5), generator=torch.Generator().manual_seed(seed))
        verifier = ComparingVerifier("token", end)
        drafter = ModelDrafter(nearby(target, 0.05 * (seed % 2)))
        options = {"k": 6, "max_new_tokens": 30, "eos_token_id": end or None, "verify": verifier}
        result = speculative_generate(target, prompt, drafter=drafter, **options)
        assert verifier.by_token == verifier.by_block == pytest.approx(len(result.new_tokens))


def test_under_block_verification_the_geometric_form_takes_the_overlap():
    results = [PromptResult(0, "qa", AcceptanceStats(LONG))]
    token, block = acceptance_record(results), acceptance_record(results, "block")
    assert token["alpha"] == block["alpha"] == 0.75 and token["alpha_overlap"] == pytest.approx(0.8)
    for record, alpha in ((token, 0.75), (block, 0.8)):
        assert record["iid_acceptance_length"] == pytest.approx(1 + alpha + alpha**2 + alpha**3)
