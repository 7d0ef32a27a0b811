"""From raw timed runs to the figures of a benchmark cell. Pure functions: no models, no clock.

A figure of a prompt is the median of its runs; a speed-up is a ratio of seconds per token, summed over prompts; its interval is a
bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from specdec.stats import bootstrap_interval
from specdec.theory import iid_acceptance_length, predicted_speedup
from specdec.timing import TimedRun

PromptRuns = Mapping[
    str, Sequence[TimedRun]
]  # the runs of one prompt, by method: METHODS, of which the last may be missing
Cost = tuple[float, int]  # seconds, tokens
METHODS = ("ar", "spec", "hf", "hf_assisted")
PREDICTIONS = (
    *("cost_coefficient", "verify_cost_ratio", "predicted_speedup"),
    *("ideal_speedup", "verify_cost_factor", "overhead_factor"),
)


def decode_cost(runs: Sequence[TimedRun]) -> Cost:
    return median(run.decode for run in runs), runs[0].decoded


def end_to_end_cost(runs: Sequence[TimedRun]) -> Cost:
    return median(run.end_to_end for run in runs), runs[0].new_tokens


def speed_record(prompts: Sequence[PromptRuns]) -> dict[str, Any]:
    """Tokens per second of each method, and the speed-ups with their intervals; None of a method that was not timed."""
    record: dict[str, Any] = {}
    for name in METHODS:
        timed = [p[name] for p in prompts if name in p]
        record[f"{name}_tokens_per_second"] = rate([decode_cost(runs) for runs in timed])
        record[f"{name}_end_to_end_tokens_per_second"] = rate([end_to_end_cost(runs) for runs in timed])
    fastest = max(("ar", "hf"), key=lambda name: record[f"{name}_tokens_per_second"] or 0.0)
    record["fastest_baseline"] = {"ar": "own plain decoding", "hf": "Hugging Face generate"}[fastest]

    def compare(key: str, slow: str, fast: str, cost: Callable[[Sequence[TimedRun]], Cost]) -> None:
        record.update(with_interval(key, [(cost(p[slow]), cost(p[fast])) for p in prompts if slow in p]))

    compare("speedup", "ar", "spec", decode_cost)
    compare("speedup_end_to_end", "ar", "spec", end_to_end_cost)
    compare("speedup_over_fastest", fastest, "spec", decode_cost)
    compare("speedup_over_hf_assisted", "hf_assisted", "spec", decode_cost)
    compare("speedup_over_hf_assisted_end_to_end", "hf_assisted", "spec", end_to_end_cost)
    compare("ar_over_hf", "hf", "ar", decode_cost)
    compare("ar_over_hf_end_to_end", "hf", "ar", end_to_end_cost)
    # A/A: the same method against itself. How far this lies from 1 is how far any ratio here may lie from the truth.
    halves = [(decode_cost(p["ar"][::2]), decode_cost(p["ar"][1::2])) for p in prompts]
    record.update(with_interval("noise_floor", halves))
    return record


def prediction_record(
    drafted: Sequence[int],
    alpha: float | None,
    tau: float,
    speedup: float | None,
    draft_seconds: float,
    target_seconds: Mapping[int, float],
) -> dict[str, Any]:
    """The predicted speed-up τ / (kc + v), and what separates the measured one from Leviathan's ideal.

    measured / ideal = (i.i.d. violation) × (verify cost) × (overhead): the first two from measured τ, α, c and v, the last is
    what remains. k varies from round to round, so kc and v are means over rounds.

    Args:
        drafted: tokens drafted in each round.
        alpha: of the geometric form; None where nothing was ever proposed.
        tau: tokens per target forward.
        draft_seconds: T_draft(1), or the time of one look-up.
        target_seconds: n -> T_target(n), for 1 and for every round's k + 1.
    """
    k, longest = fmean(drafted), max(target_seconds)
    tau_iid = iid_acceptance_length(alpha or 0.0, drafted) or 1.0
    record: dict[str, Any] = {
        "mean_drafted_per_round": k,
        "draft_seconds_1": draft_seconds,
        "target_seconds_1": target_seconds[1],
        "target_seconds_k1": target_seconds[longest],
        "iid_factor": tau / tau_iid,
        **dict.fromkeys(PREDICTIONS),
    }
    if target_seconds[1] > 0:  # a clock too coarse for one step predicts nothing
        c = draft_seconds / target_seconds[1]
        v = fmean(target_seconds[n + 1] for n in drafted) / target_seconds[1]
        predicted = predicted_speedup(tau, k, c, v)
        ideal = predicted_speedup(tau_iid, k, c, 1.0)
        overhead = None if speedup is None else speedup / predicted
        record |= dict(zip(PREDICTIONS, (c, v, predicted, ideal, (k * c + 1) / (k * c + v), overhead), strict=True))
    return record


def rate(costs: Sequence[Cost]) -> float | None:
    seconds, tokens = sum(s for s, _ in costs), sum(t for _, t in costs)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def with_interval(key: str, pairs: Sequence[tuple[Cost, Cost]]) -> dict[str, float | None]:
    low, high = bootstrap_interval(pairs, speedup)
    return {key: speedup(pairs), f"{key}_lo": low, f"{key}_hi": high}


def speedup(pairs: Sequence[tuple[Cost, Cost]]) -> float | None:
    """How many times faster, per token, the second method of each pair is."""
    slow, fast = rate([a for a, _ in pairs]), rate([b for _, b in pairs])
    return fast / slow if slow and fast else None
