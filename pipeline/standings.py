"""From the raw timed runs of a comparison to its figures. Pure functions: no models, no clock.

As in pipeline/figures.py a ratio is one of seconds per token, summed over prompts, and its interval a bootstrap over prompts. All
contestants decoded the same prompts in turns, so each ratio is of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.figures import Cost, PromptRuns, decode_cost, end_to_end_cost, rate, speedup, with_interval
from specdec.stats import AcceptanceStats, bootstrap_interval

AUTO = "auto"
PLAIN, SPECULATIVE, HF, HF_ASSISTED = "ar", "spec", "hf", "hf_assisted"


@dataclass(frozen=True)
class Contestant:
    """
    Args:
        method: PLAIN, SPECULATIVE, HF or HF_ASSISTED.
        kernels: None of Hugging Face's, which have transformers' own.
        k: draft tokens per round, AUTO, or None without a draft.
    """

    method: str
    kernels: str | None = None
    k: int | str | None = None

    @property
    def name(self) -> str:
        return " ".join([self.method, *([self.kernels] if self.kernels else []), *([f"k={self.k}"] if self.k else [])])


@dataclass(frozen=True)
class StepCosts:
    """Seconds of T_draft(1), or of one look-up, and of T_target(n), n = 1, 2, ..., on the kernels of a contestant."""

    draft: float
    target: tuple[float, ...]

    @property
    def c(self) -> float:
        return self.draft / self.target[0]

    @property
    def v(self) -> list[float]:
        """v[k] is the verify cost ratio of k drafted tokens."""
        return [seconds / self.target[0] for seconds in self.target]


def line_up(kernels: Sequence[str], k: int, lengths: Sequence[int | str], *, assisted: bool) -> list[Contestant]:
    """Who takes part, nobody twice.

    Args:
        kernels: those that run here. The last of them are the ones for which k varies.
        k: for comparing kernels, and of Hugging Face's assisted generation.
        lengths: further k of the last kernels.
    """
    found = [Contestant(PLAIN, name) for name in kernels]
    found += [Contestant(SPECULATIVE, name, k) for name in kernels]
    found += [Contestant(SPECULATIVE, kernels[-1], length) for length in lengths]
    found += [Contestant(HF), *([Contestant(HF_ASSISTED, k=k)] if assisted else [])]
    return list(dict.fromkeys(found))


def standings(
    contestants: Sequence[Contestant],
    prompts: Sequence[PromptRuns],
    stats: Mapping[str, Sequence[AcceptanceStats]],
    costs: Mapping[str, StepCosts],
) -> dict[str, Any]:
    """A record for each contestant, and flat keys that say who was how much faster than whom.

    Args:
        prompts: the runs of each prompt, by contestant's name.
        stats: of the speculative contestants, by name, a value per prompt.
        costs: by kernels.
    """
    speeds = {x.name: rate([decode_cost(p[x.name]) for p in prompts]) for x in contestants}

    def fastest(*methods: str) -> Contestant:
        return max((x for x in contestants if x.method in methods), key=lambda x: speeds[x.name] or 0.0)

    best_plain, best_own, best = fastest(PLAIN, HF), fastest(PLAIN), fastest(SPECULATIVE)
    names = {x.method: x.name for x in contestants if x.method in (HF, HF_ASSISTED)}

    def over(key: str, fast: Contestant, slow: str | None) -> dict[str, float | None]:
        pairs = [(decode_cost(p[slow]), decode_cost(p[fast.name])) for p in prompts] if slow else []
        return with_interval(key, pairs)

    records = []
    for x in contestants:
        own, drafts = x.method in (PLAIN, SPECULATIVE), x.method == SPECULATIVE
        record = {
            "name": x.name,
            "method": x.method,
            "kernels": x.kernels,
            "k": x.k,
            "tokens_per_second": speeds[x.name],
            "end_to_end_tokens_per_second": rate([end_to_end_cost(p[x.name]) for p in prompts]),
            **over("speedup", x, Contestant(PLAIN, x.kernels).name if drafts else None),
            **over("speedup_over_fastest", x, best_plain.name if drafts else None),
            **over("speedup_over_hf", x, names.get(HF) if own else None),
            **over("speedup_over_hf_assisted", x, names.get(HF_ASSISTED) if drafts else None),
            **_acceptance(stats[x.name] if drafts else []),
            **_prediction(x, prompts, stats[x.name] if drafts else [], costs.get(x.kernels or "")),
        }
        records.append(record)
    by_name = {record["name"]: record for record in records}
    return {
        "fastest_plain": best_plain.name,
        "fastest_speculative": best.name,
        "fastest_kernels": best.kernels,
        **_same_kernels([by_name[x.name] for x in contestants if x.method == SPECULATIVE]),
        **{
            f"{key}{end}": by_name[best.name][f"{key}{end}"]
            for key in (
                "speedup_over_fastest",
                "speedup_over_hf",
                "speedup_over_hf_assisted",
                "measured_over_predicted",
            )
            for end in ("", "_lo", "_hi")
        },
        **over("ar_over_hf", best_own, names.get(HF)),
        **_auto(contestants, prompts, speeds),
        # Plain decoding against itself: as far as this lies from 1, any ratio here may lie from the truth.
        **with_interval(
            "noise_floor", [(decode_cost(p[best_own.name][::2]), decode_cost(p[best_own.name][1::2])) for p in prompts]
        ),
        "contestants": records,
    }


def _acceptance(stats: Sequence[AcceptanceStats]) -> dict[str, float | int | None]:
    """Prompts pooled; None of whoever drafts nothing, and of a drafter that never proposed."""
    pooled = AcceptanceStats(tuple(r for of_prompt in stats for r in of_prompt.rounds))
    drafted = sum(r.drafted for r in pooled.rounds)
    return {
        "alpha": pooled.alpha,
        "mean_acceptance_length": pooled.mean_acceptance_length,
        "mean_drafted_per_round": drafted / len(pooled.rounds) if pooled.rounds else None,
        "rounds": len(pooled.rounds) or None,
    }


def _prediction(
    x: Contestant, prompts: Sequence[PromptRuns], stats: Sequence[AcceptanceStats], costs: StepCosts | None
) -> dict[str, float | None]:
    """τ / (kc + v), k and v means over rounds, and how far the speed-up over plain decoding with the same kernels is from it."""
    units: list[tuple[Cost, Cost, Cost]] = []
    if stats and costs is not None and costs.target[0] > 0:  # a clock too coarse for one step predicts nothing
        c, v = costs.c, costs.v
        plain = Contestant(PLAIN, x.kernels).name
        for p, of_prompt in zip(prompts, stats, strict=True):
            # What a prompt's rounds should take, in steps of plain decoding, for the tokens that they emitted.
            steps = sum(r.drafted * c + v[r.drafted] for r in of_prompt.rounds)
            units.append((decode_cost(p[plain]), decode_cost(p[x.name]), (steps, of_prompt.new_tokens)))
    low, high = bootstrap_interval(units, _over_predicted)
    return {
        "predicted_speedup": rate([steps for _, _, steps in units]),
        "measured_over_predicted": _over_predicted(units),
        "measured_over_predicted_lo": low,
        "measured_over_predicted_hi": high,
    }


def _over_predicted(units: Sequence[tuple[Cost, Cost, Cost]]) -> float | None:
    measured, predicted = speedup([(slow, fast) for slow, fast, _ in units]), rate([steps for _, _, steps in units])
    return measured / predicted if measured and predicted else None


def _same_kernels(speculative: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best speed-up over plain decoding with the same kernels, and whose it is."""
    best = max(speculative, key=lambda record: record["speedup"] or 0.0)
    ends = {f"speedup_same_kernels{end}": best[f"speedup{end}"] for end in ("", "_lo", "_hi")}
    return {**ends, "best_over_same_kernels": best["name"]}


def _auto(
    contestants: Sequence[Contestant], prompts: Sequence[PromptRuns], speeds: Mapping[str, float | None]
) -> dict[str, Any]:
    """k: auto against the fixed k that was fastest with the same kernels; None where k: auto takes no part."""
    auto = next((x for x in contestants if x.k == AUTO), None)
    fixed = [x for x in contestants if auto and (x.method, x.kernels) == (auto.method, auto.kernels) and x.k != AUTO]
    if auto is None or not fixed:
        return {"best_fixed_k": None, **with_interval("auto_over_best_fixed_k", [])}
    best = max(fixed, key=lambda x: speeds[x.name] or 0.0)
    pairs = [(decode_cost(p[best.name]), decode_cost(p[auto.name])) for p in prompts]
    return {"best_fixed_k": best.k, **with_interval("auto_over_best_fixed_k", pairs)}
