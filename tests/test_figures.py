"""Speed-ups and the prediction against numbers worked out by hand from made-up runs."""

import json

import pytest

from pipeline.figures import METHODS, prediction_record, speed_record
from specdec.timing import TimedRun

SPEEDUPS = (
    "speedup",
    "speedup_end_to_end",
    "speedup_over_fastest",
    "speedup_over_hf_assisted",
    "speedup_over_hf_assisted_end_to_end",
    "ar_over_hf",
    "ar_over_hf_end_to_end",
    "noise_floor",
)


def runs(tokens, decodes, prefills, first=0):
    """`first`: tokens that came with the prompt's own pass."""
    return [TimedRun(p, d, tokens - first, tokens) for p, d in zip(prefills, decodes, strict=True)]


# Medians: plain 12 s and, prompt included, 14; speculative 6 and 8; Hugging Face 5 and 35; with the draft 8 and 9.
ONE = {
    "ar": runs(6, [10, 12, 30, 14, 11], [9, 0, 0, 0, 0]),
    "spec": runs(9, [6, 8, 4, 5, 100], [2] * 5),
    "hf": runs(6, [5, 5, 7, 5, 9], [30] * 5, first=1),
    "hf_assisted": runs(6, [8, 8, 8, 7, 9], [1] * 5, first=3),
}
# Medians: 4 and 5; 1 and 3; 3 and 33; 2 and 6.
TWO = {
    "ar": runs(2, [3, 5, 4, 4, 4], [1] * 5),
    "spec": runs(2, [1, 1, 1, 1, 1], [2] * 5),
    "hf": runs(2, [3, 3, 3, 3, 3], [30] * 5, first=1),
    "hf_assisted": runs(2, [2] * 5, [4] * 5, first=2),
}


def speeds(*prompts):
    record = speed_record(prompts)
    json.dumps(record, allow_nan=False)
    return record


def test_tokens_per_second_are_sums_of_tokens_over_sums_of_medians():
    record = speeds(ONE, TWO)
    assert record["ar_tokens_per_second"] == pytest.approx(8 / 16)
    assert record["spec_tokens_per_second"] == pytest.approx(11 / 7)
    assert record["hf_tokens_per_second"] == pytest.approx(6 / 8)  # its decode time paid for 5 + 1 tokens
    assert record["hf_assisted_tokens_per_second"] == pytest.approx(3 / 10)  # 3 + 0: the first rounds gave the others
    assert record["hf_assisted_end_to_end_tokens_per_second"] == pytest.approx(8 / 15)
    assert record["ar_end_to_end_tokens_per_second"] == pytest.approx(8 / 19)
    assert record["spec_end_to_end_tokens_per_second"] == pytest.approx(11 / 11)
    assert record["hf_end_to_end_tokens_per_second"] == pytest.approx(8 / 68)  # prompt included, for 6 + 2


def test_speedups_are_ratios_of_these():
    record = speeds(ONE, TWO)
    assert record["speedup"] == pytest.approx((11 / 7) / (8 / 16))
    assert record["speedup_end_to_end"] == pytest.approx((11 / 11) / (8 / 19))
    assert record["ar_over_hf"] == pytest.approx((8 / 16) / (6 / 8))
    assert record["ar_over_hf_end_to_end"] == pytest.approx((8 / 19) / (8 / 68))
    assert record["speedup_over_hf_assisted"] == pytest.approx((11 / 7) / (3 / 10))
    assert record["speedup_over_hf_assisted_end_to_end"] == pytest.approx((11 / 11) / (8 / 15))


def test_a_method_that_was_not_timed_has_no_figures():
    prompts = [{name: runs for name, runs in p.items() if name != "hf_assisted"} for p in [ONE] * 6 + [TWO] * 6]
    record = speeds(*prompts)
    missing = [key for key, value in record.items() if value is None]
    assert missing == [key for key in record if "hf_assisted" in key] and len(missing) == 8
    assert {key: value for key, value in record.items() if key not in missing} == {
        key: value for key, value in speeds(*[ONE] * 6, *[TWO] * 6).items() if key not in missing
    }


def test_the_fastest_baseline_is_the_one_that_decodes_fastest():
    record = speeds(ONE, TWO)  # prompt included it would be our own
    assert record["fastest_baseline"] == "Hugging Face generate"
    assert record["speedup_over_fastest"] == pytest.approx((11 / 7) / (6 / 8))
    slow = {**ONE, "hf": runs(6, [11] * 5, [0] * 5, first=1)}
    record = speeds(slow)
    assert record["fastest_baseline"] == "own plain decoding"
    assert record["speedup_over_fastest"] == record["speedup"] == pytest.approx(12 / 6 * 9 / 6)


def test_the_noise_floor_compares_plain_decoding_with_itself_run_by_run():
    # first, third, fifth run: medians 11 and 4; second and fourth: 13 and 4.5
    assert speeds(ONE, TWO)["noise_floor"] == pytest.approx((11 + 4) / (13 + 4.5))
    assert speeds({**TWO, "ar": runs(2, [3, 3], [1, 1])})["noise_floor"] == 1


def test_eleven_prompts_have_no_intervals_and_twelve_have_some_around_the_value():
    few, enough = speeds(*[ONE] * 11), speeds(*[ONE] * 6, *[TWO] * 6)
    for key in SPEEDUPS:
        assert few[f"{key}_lo"] is few[f"{key}_hi"] is None
        assert enough[f"{key}_lo"] < enough[key] < enough[f"{key}_hi"]


def test_prompts_are_drawn_with_all_their_methods():
    """Prompts of very different lengths that all gain the same leave no doubt about the gain."""
    prompts = [
        {
            "ar": runs(n, [2 * n, 2 * n], [4, 4]),
            "spec": runs(n, [n, n], [2, 2]),
            "hf": runs(n + 1, [n, n], [0, 0], first=1),
            "hf_assisted": runs(n, [n, n], [0, 0]),
        }
        for n in range(1, 14)
    ]
    record = speeds(*prompts)
    for key in ("speedup", "speedup_end_to_end"):
        assert record[f"{key}_lo"] == pytest.approx(2) == record[key]
        assert record[f"{key}_hi"] == pytest.approx(2)


def test_a19_a_clock_that_stands_still_gives_none():
    still = {name: runs(4, [0.0] * 5, [0.0] * 5) for name in METHODS}
    record = speeds(*[still] * 12)
    for name in METHODS:
        assert record[f"{name}_tokens_per_second"] is record[f"{name}_end_to_end_tokens_per_second"] is None
    for key in SPEEDUPS:
        assert record[key] is record[f"{key}_lo"] is record[f"{key}_hi"] is None
    # One method alone too fast for the clock leaves the others' figures.
    record = speeds({**ONE, "spec": still["spec"]})
    assert record["spec_tokens_per_second"] is record["speedup"] is None
    assert record["ar_over_hf"] == pytest.approx(1 / 2)


def test_a_method_that_decoded_nothing_has_no_speed():
    record = speeds({name: runs(1, [1.0] * 5, [1.0] * 5, first=int(name == "hf")) for name in METHODS})
    assert record["ar_over_hf"] is None
    assert record["hf_end_to_end_tokens_per_second"] == 0.5
    assert record["hf_tokens_per_second"] is None


# Prediction

DRAFTED = [4, 2, 0, 1]
TARGET = {1: 0.2, 2: 0.22, 3: 0.3, 4: 9.0, 5: 0.4}  # no round fed 4 tokens


def prediction(drafted=DRAFTED, alpha=0.5, tau=2.5, speedup=0.9, draft_seconds=0.1, target=TARGET):
    record = prediction_record(drafted, alpha, tau, speedup, draft_seconds, target)
    json.dumps(record, allow_nan=False)
    return record


def test_costs_are_means_over_the_rounds():
    record = prediction()
    assert record["cost_coefficient"] == pytest.approx(0.5)
    assert record["mean_drafted_per_round"] == 1.75
    assert record["verify_cost_ratio"] == pytest.approx((0.4 + 0.3 + 0.2 + 0.22) / 4 / 0.2)  # 1.4
    assert (record["draft_seconds_1"], record["target_seconds_1"], record["target_seconds_k1"]) == (0.1, 0.2, 0.4)


def test_prediction_ideal_and_what_lies_between():
    record = prediction()
    iid = (1.9375 + 1.75 + 1 + 1.5) / 4
    assert record["predicted_speedup"] == pytest.approx(2.5 / (1.75 * 0.5 + 1.4))
    assert record["ideal_speedup"] == pytest.approx(iid / (1.75 * 0.5 + 1))
    assert record["iid_factor"] == pytest.approx(2.5 / iid)
    assert record["verify_cost_factor"] == pytest.approx(1.875 / 2.275)
    assert record["overhead_factor"] == pytest.approx(0.9 / (2.5 / 2.275))


@pytest.mark.parametrize("drafted", [[4], [1, 4, 4, 2], [0, 0, 2]])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_three_factors_lead_from_the_ideal_to_the_measured(drafted, alpha):
    record = prediction(drafted, alpha, tau=1.7, speedup=1.3)
    product = record["iid_factor"] * record["verify_cost_factor"] * record["overhead_factor"]
    assert record["ideal_speedup"] * product == pytest.approx(1.3)


def test_where_nothing_was_ever_drafted_plain_decoding_is_predicted():
    record = prediction([0, 0], alpha=None, tau=1.0, speedup=0.8, target={1: 0.2})
    assert record["predicted_speedup"] == record["ideal_speedup"] == 1
    assert record["iid_factor"] == record["verify_cost_factor"] == 1
    assert record["overhead_factor"] == 0.8
    assert (record["verify_cost_ratio"], record["target_seconds_k1"]) == (1, 0.2)


def test_without_a_measured_speedup_the_overhead_is_unknown():
    record = prediction(speedup=None)
    assert record["overhead_factor"] is None
    assert record["predicted_speedup"] == pytest.approx(2.5 / 2.275)


def test_a_clock_that_stands_still_predicts_nothing():
    record = prediction(speedup=None, draft_seconds=0.0, target=dict.fromkeys(TARGET, 0.0))
    for key in ("cost_coefficient", "verify_cost_ratio", "predicted_speedup", "ideal_speedup", "overhead_factor"):
        assert record[key] is None
