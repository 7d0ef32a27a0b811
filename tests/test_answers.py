"""The three questions are answered by the tables, whatever these say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_cells
import pandas as pd
import pytest

from pipeline import cells, tables
from pipeline.answers import answers
from pipeline.study import Params, load_params

FOLDER = Path("plots/fake")
QUESTIONS = ("Is it lossless here?", "What does it gain?", "Why not more?", "Which draft and k?")
NOISE = {"noise_floor": 1.0, "noise_floor_lo": 0.99, "noise_floor_hi": 1.01}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    return fake_cells.write(tmp_path)


def told(**changed: pd.DataFrame) -> dict[str, str]:
    """The answer to each question, from the cells as they are; or from other tables."""
    found = tables.gather(load_params()) | changed
    names = ("hf_benchmark", "quantized_benchmark", "comparison", "greedy_identity", "cost_curve")
    lines = answers(*(found[name] for name in names)).splitlines()
    return {question: line.removeprefix(f"- **{question}** ") for question, line in zip(QUESTIONS, lines, strict=True)}


def timed(params: Params) -> list[Path]:
    pairs, variants = params.study.timed_pairs, params.study.kernel_variants
    return [
        *(cells.hf_benchmark("fake", pair, 4) for pair in pairs),
        *(cells.quantized_benchmark("fake", "small_int8", variant) for variant in variants),
    ]


def set_contestants(params: Params, **values: Any) -> None:
    for path in (cells.comparison("fake", pair) for pair in params.study.comparisons):
        drafting = [c | values if c["method"] == "spec" else c for c in cells.read_json(path)["contestants"]]
        fake_cells.edit(path, contestants=drafting)


def set_all(params: Params, value: float | None, half: float | None = 0.02) -> None:
    """Give every configuration the same speed-up over the fastest, with an interval unless `half` is None.

    All on packed kernels, which are those of the fastest plain decoding in the comparisons.
    """
    ends = {
        "speedup_over_fastest": value,
        "speedup_over_fastest_lo": None if half is None or value is None else value - half,
        "speedup_over_fastest_hi": None if half is None or value is None else value + half,
    }
    for path in timed(params):
        fake_cells.edit(path, **ends, **NOISE, kernels="packed")
    set_contestants(params, **ends)


def test_it_pays(study: Params) -> None:
    set_all(study, 1.2)
    best = cells.hf_benchmark("fake", "small_bf16", 4)
    ends = {"speedup_over_fastest": 1.456, "speedup_over_fastest_lo": 1.41, "speedup_over_fastest_hi": 1.5}
    fake_cells.edit(best, **ends, mean_acceptance_length=4.5, predicted_speedup=1.5)
    gain = told()["What does it gain?"]
    assert gain.startswith(
        "On this machine speculative decoding pays, because a round yields τ = 4.50 tokens and costs, by c and v, 3.00 steps of "
        "plain decoding. Best measured configuration: `small_bf16`, k = 4, packed kernels, 1.46 [1.41, 1.50] times the speed of "
        "the fastest decoding without a draft (Hugging Face generate): faster."
    )
    drafting = sum(
        c["method"] == "spec"
        for p in study.study.comparisons
        for c in cells.read_json(cells.comparison("fake", p))["contestants"]
    )
    count = len(timed(study)) + drafting
    assert gain.endswith(
        f" Those of the comparison included, {count} of {count} timed configurations are faster than the fastest without."
    )
    fake_cells.edit(best, predicted_speedup=3.0)
    assert "costs, by c and v, 1.50 steps" in told()["What does it gain?"]


def test_the_best_may_be_a_contestant(study: Params) -> None:
    """Its k is a whole number also where no k of the table is auto."""
    path = cells.comparison("fake", "small_lookup")
    fake_cells.write(Path(), fake_cells.PARAMS.replace("k: [2, 8, auto]", "k: [2, 8]"))
    set_all(study, 0.9)
    contestants = cells.read_json(path)["contestants"]
    ends = {"speedup_over_fastest": 2.0, "speedup_over_fastest_lo": 1.9, "speedup_over_fastest_hi": 2.1}
    for contestant in contestants:
        if contestant["name"] == "spec packed k=4":
            contestant |= ends | {"end_to_end_tokens_per_second": 30.0}
        if contestant["name"] == "ar packed":
            contestant["end_to_end_tokens_per_second"] = 24.0
    fake_cells.edit(path, contestants=contestants)
    answer = told()
    assert (
        "Best measured configuration: `small_lookup`, k = 4, packed kernels, 2.00 [1.90, 2.10] times the speed of the fastest "
        "decoding without a draft (plain decoding, packed kernels): faster. With the pass over the prompt counted, which a draft "
        "makes longer: 1.25. Those of the comparison included, 1 of "
    ) in answer["What does it gain?"]
    assert answer["What does it gain?"].endswith("timed configurations is faster than the fastest without.")
    assert answer["Which draft and k?"].startswith("Of what was timed, `small_lookup`, k = 4, packed kernels. ")
    assert answer["Why not more?"].startswith("The best cell whose factors are known is `small_"), (
        "no cell explains a contestant; the best that one does is told"
    )


def over_fastest(value: float, half: float) -> dict[str, float]:
    key = "speedup_over_fastest"
    return {key: value, f"{key}_lo": value - half, f"{key}_hi": value + half}


def test_what_is_faster_comes_before_what_may_be(study: Params) -> None:
    set_all(study, 1.2)
    fake_cells.edit(cells.hf_benchmark("fake", "small_lookup", 4), **over_fastest(1.9, 1.0))
    fake_cells.edit(cells.quantized_benchmark("fake", "small_int8", "w4-g64-gptq"), **over_fastest(1.5, 0.1))
    answer, name = told(), "`small_int8` with w4-g64-gptq, k = 4, packed kernels"
    assert answer["What does it gain?"].startswith("On this machine speculative decoding pays, because")
    assert f"Best measured configuration: {name}, 1.50 [1.40, 1.60]" in answer["What does it gain?"]
    assert answer["Which draft and k?"].startswith(f"Of what was timed, {name}. ")


def test_where_nothing_is_faster_no_draft_is_named_as_the_choice(study: Params) -> None:
    set_all(study, 0.06, 0.01)
    fake_cells.edit(cells.hf_benchmark("fake", "small_int8", 4), **over_fastest(0.07, 0.01))
    assert told()["Which draft and k?"].startswith(
        "Nothing that was timed is known to be faster than no draft; the nearest is `small_int8`, k = 4, packed kernels. "
    )


def test_a_gain_that_c_and_v_do_not_explain_has_no_because(study: Params) -> None:
    set_all(study, 1.2)
    fake_cells.edit(cells.hf_benchmark("fake", "small_int8", 4), **over_fastest(1.9, 0.1), predicted_speedup=0.9)
    assert told()["What does it gain?"].startswith("On this machine speculative decoding pays. Best measured")


def test_cells_on_slower_kernels_than_the_fastest_plain_decoding_are_left_out(study: Params) -> None:
    """Their baseline is plain decoding with the same kernels: slower than the one that a draft has to beat."""
    set_all(study, 1.4)
    set_contestants(study, **over_fastest(0.8, 0.02))
    for path in timed(study):
        fake_cells.edit(path, kernels="default")
    gain = told()["What does it gain?"]
    assert gain.startswith("On this machine speculative decoding does not pay") and ", 0 of " in gain
    assert gain.endswith(
        f" Cells left out, for plain decoding is faster with other kernels than theirs: {len(timed(study))}."
    )


@pytest.mark.parametrize(
    ("value", "half", "speedup", "predicted", "start", "reason"),
    [
        (0.8, 0.02, 0.8, 0.9, "does not pay, because a round yields", "steps of plain decoding. Best"),
        (0.8, 0.02, 0.9, 1.5, "does not pay, because a round yields", ", but overhead takes more than the difference. Best"),
        (0.8, 0.02, 1.2, 1.5, "does not pay, because a", "not the steps of the fastest decoding without a draft. Best"),
        (1.1, 0.2, 1.2, 1.5, "is not known to pay. Best", ": not distinguishable from 1. There a round"),
        (1.005, 0.002, 1.2, 1.5, "is not known to pay. Best", ": within the noise of this run. There a round"),
        (1.3, None, 1.2, 1.5, "is not known to pay. Best", ": too few prompts for an interval. There a round"),
        (0.8, 0.02, 0.8, None, "does not pay. Best", ": slower."),
    ],
)  # fmt: skip
def test_it_does_not_pay(
    study: Params, value: float, half: float | None, speedup: float, predicted: float | None, start: str, reason: str
) -> None:
    set_all(study, value, half)
    for path in timed(study):
        fake_cells.edit(path, speedup=speedup, predicted_speedup=predicted)
    set_contestants(study, speedup=speedup, predicted_speedup=predicted)
    gain = told()["What does it gain?"]
    assert gain.startswith(f"On this machine speculative decoding {start}") and reason in gain


def test_nothing_compared_is_said(study: Params) -> None:
    set_all(study, None)
    answer = told()
    assert answer["What does it gain?"].startswith("Not known") and answer["Why not more?"].startswith("Not known")
    assert answer["Which draft and k?"].startswith("Predicted optimum")


def test_what_costs_most_is_told_with_the_product(study: Params) -> None:
    set_all(study, 1.2)
    path = cells.hf_benchmark("fake", "small_int8", 4)
    factors = {
        "speedup": 1.2,
        "ideal_speedup": 2.0,
        "iid_factor": 0.96,
        "verify_cost_factor": 0.65,
        "overhead_factor": 0.95,
    }
    fake_cells.edit(path, speedup_over_fastest=1.4, **factors)
    assert told()["Why not more?"] == (
        "The best cell whose factors are known is `small_int8`, k = 4, packed kernels: verification costs most, "
        "×0.650. Measured = ideal × i.i.d. × verification × overhead: 1.20 = 2.00 × 0.960 × 0.650 × 0.950. "
        "Overhead is what neither c nor v holds, such as draws and bookkeeping, and what the clock of T(n) misses."
    )


def test_output_is_what_was_compared(study: Params) -> None:
    assert told()["Is it lossless here?"].startswith("Yes, as far as greedy output shows. In float32, ")
    path = cells.hf_benchmark("fake", "small_int8", 4)
    fake_cells.edit(path, identical_prompts=10, ties=2)
    assert told()["Is it lossless here?"].startswith("Yes, up to ties, where rounding decides")
    fake_cells.edit(path, identical_prompts=9, dtype="bfloat16")
    output = told()["Is it lossless here?"]
    assert output.startswith(
        "Not to the letter. In bfloat16, 9 of 12 greedy texts by 1 timed configuration are plain decoding's"
    )
    assert "In bfloat16, 2 of 12 prompts diverge, all of them at near-ties." in output
    fake_cells.edit(path, identical_prompts=12, ties=0)
    assert told()["Is it lossless here?"].startswith("Yes, as far as greedy output shows. ")
    fake_cells.edit(cells.greedy_identity("fake", "small_int8", "float16"), identical_prompts=8, near_ties=0, faults=4)
    output = told()["Is it lossless here?"]
    assert (
        output.startswith("Not to the letter. ")
        and "In float16, 4 of 12 prompts diverge, 0 at near-ties and 4" in output
    )
    for timed_cell in timed(study):
        fake_cells.edit(timed_cell, identical_prompts=None)
    set_contestants(study, identical_prompts=None)
    assert told()["Is it lossless here?"].startswith(
        "Not checked: no timed configuration compares greedy outputs. In bfloat16, 2"
    )


def curve(pair: str, role: str, kernels: str, seconds: list[float | None]) -> pd.DataFrame:
    rows = {"pair": pair, "role": role, "kernels": kernels, "context": 64, "seconds": seconds}
    return pd.DataFrame(rows | {"n": range(1, len(seconds) + 1)})


FLAT = [1.0] * 9


def test_the_optimum_stands_beside_the_same_prediction_for_what_was_timed(study: Params) -> None:
    """A free draft that is always right gains k + 1."""
    set_all(study, 1.2)
    path = cells.hf_benchmark("fake", "small_int8", 4)
    fake_cells.edit(path, alpha=1.0, **over_fastest(1.9, 0.1))
    costs = pd.concat(
        [curve("small_int8", "target", "default", FLAT), curve("small_int8", "draft", "default", [1e-9] * 9)]
    )
    told_of = told(cost_curve=costs)["Which draft and k?"]
    assert (
        told_of.endswith("measured (default); the same prediction for k = 4 is 5.00.")
        and "k = 8, the largest" in told_of
    )


@pytest.mark.parametrize(
    ("alpha", "curves", "want"),
    [  # By hand: a draft that costs nothing and is always right gains k + 1.
        (1.0, [("target", "default", FLAT), ("draft", "default", [1e-9] * 9)],
         "`small_int8`, k = 8, the largest that T(n) was measured for, default kernels, 9.00 times"),
        (0.5, [("target", "default", FLAT), ("draft", "default", [0.2] * 9)],  # 1.75 / 1.4 at k = 2, 1.5 / 1.2 at k = 1
         "`small_int8`, k = 1, default kernels, 1.25 times the speed of plain decoding with the fastest kernels whose T(n) was "
         "measured (default)"),
        (1.0, [("target", "default", [2.0] * 3), ("draft", "default", [0.2] * 3), ("target", "packed", [1.0, 2.0, 3.0]),
               ("draft", "packed", [0.9] * 3)],
         "`small_int8`, k = 2, the largest that T(n) was measured for, default kernels, 1.25 times the speed of plain "
         "decoding with the fastest kernels whose T(n) was measured (packed)"),  # 3 / 1.2 / 2
        (0.5, [("target", "default", FLAT), ("draft", "default", [0.9] * 9)],
         "Predicted optimum: no draft model, for by α and T(n) no k of theirs gains. What a look-up gains is not predicted."),
        (0.5, [("target", "default", FLAT)], "The predicted optimum is not known."),
        (0.5, [("target", "default", [None]), ("draft", "default", [1.0])], "The predicted optimum is not known."),
        (None, [("target", "default", FLAT), ("draft", "default", [0.2])], "The predicted optimum is not known."),
    ],
)  # fmt: skip
def test_the_predicted_optimum(
    study: Params, alpha: float | None, curves: list[tuple[str, str, list[float | None]]], want: str
) -> None:
    fake_cells.edit(cells.hf_benchmark("fake", "small_int8", 4), alpha=alpha)
    costs = pd.concat([curve("small_int8", *one) for one in curves])
    assert want in told(cost_curve=costs)["Which draft and k?"]
