"""One interleaved run of everything that is compared: kernels, k and baselines, on the same prompts, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.methods import (
    Method,
    Outcome,
    Setting,
    TextPrompt,
    assisted_method,
    hugging_face_method,
    own_method,
    prepared,
)
from pipeline.standings import AUTO, HF, HF_ASSISTED, PLAIN, SPECULATIVE, Contestant, StepCosts, line_up, standings
from pipeline.timed import COST_RUNS, DRAFT, cost_clock, identity_verdict, in_turns, kernel_logit_errors
from specdec.cache import Model
from specdec.drafters import Drafter
from specdec.errors import InputError
from specdec.identity import TIE_GAP, IdentityReport, check_greedy_identity
from specdec.policy import AdaptiveK
from specdec.sampling import SamplingConfig
from specdec.timing import StepClock

FIRST_COST_RUNS = 5  # timed calls of each forward before the first prompt: k: auto needs the costs from the start


@dataclass(frozen=True)
class Engine:
    """A pair on its kernels."""

    target: Model
    drafter: Drafter
    prepared: dict[str, float | None]  # what it took to make it, and its logits' errors


def compete(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[TextPrompt],
    setting: Setting,
    kernels: Sequence[str],
    lengths: Sequence[int | str],
    expected_alpha: float,
    label: str,
) -> dict[str, Any]:
    """Time everything against everything; return the measured keys of a cell.

    Args:
        target: transformers' model, for `generate` and as the judge of greedy output.
        drafter: with transformers' model, if it has one.
        setting: its k is that at which kernels are compared; its `kernels` are not used.
        kernels: the last that run here are those for which k varies.
        lengths: k of these, numbers or AUTO.
        expected_alpha: acceptance that AUTO starts each text from.

    Raises:
        InputError: no kernels run the models, or some compute something else; in float32, greedy output of our loop that differs
            from plain decoding by more than a tie.
    """
    engines, refusals = engines_of(target, drafter, kernels, prompts[0])
    longest = max([setting.k, *(k for k in lengths if isinstance(k, int))])
    rows = min(longest, setting.max_new_tokens - 1) + 1
    clocks = {name: cost_clock(engine.target, engine.drafter, prompts, rows) for name, engine in engines.items()}
    for clock in clocks.values():
        clock.sample(FIRST_COST_RUNS)
    policy = adaptive(step_costs(clocks[list(engines)[-1]]), expected_alpha)
    assisted = assisted_method(target, drafter, setting)
    contestants = line_up(list(engines), setting.k, lengths, assisted=assisted is not None)
    methods = own_methods(contestants, engines, setting, policy) | {HF: hugging_face_method(target, setting)}
    if assisted is not None:
        methods[Contestant(HF_ASSISTED, k=setting.k).name] = assisted
    for method in methods.values():
        for _ in range(setting.warmup):
            method(prompts[0])
    outcomes = []
    with tqdm(total=len(prompts) * setting.runs * len(methods), desc=label, unit="run") as progress:
        for prompt in prompts:
            outcomes.append(in_turns(methods, prompt, setting.runs, progress))
            for clock in clocks.values():
                clock.sample(COST_RUNS)
    costs = {name: step_costs(clock) for name, clock in clocks.items()}
    runs = [{name: [o.run for o in found] for name, found in outcome.items()} for outcome in outcomes]
    stats = {x.name: [o[x.name][0].stats for o in outcomes] for x in contestants if x.method == SPECULATIVE}
    record = standings(contestants, runs, stats, costs)
    reports = identities(target, prompts, outcomes, contestants, engines, setting, policy)
    for entry in record["contestants"]:
        entry |= identity_keys(reports.get(entry["name"])) | {
            "unrepeatable_runs": _unrepeatable(outcomes, entry["name"])
        }
    return {
        **record,
        **identity_keys([report for x in contestants if x.kernels for report in reports[x.name]]),
        "unrepeatable_runs": sum(entry["unrepeatable_runs"] for entry in record["contestants"]),
        "prompts": len(prompts),
        "kernels_run": [
            {
                "kernels": name,
                **engine.prepared,
                "draft_seconds": costs[name].draft,
                "target_seconds": list(costs[name].target),
                "cost_coefficient": costs[name].c if costs[name].target[0] else None,
                "verify_cost_ratios": costs[name].v if costs[name].target[0] else None,
            }
            for name, engine in engines.items()
        ],
        "refusals": [{"kernels": name, "reason": reason} for name, reason in refusals.items()],
        "samples": [_raw(p, outcome) for p, outcome in zip(prompts, outcomes, strict=True)],
    }


def engines_of(
    target: PreTrainedModel, drafter: Drafter, kernels: Sequence[str], prompt: TextPrompt
) -> tuple[dict[str, Engine], dict[str, str]]:
    """The pair on each of the kernels that run it; of the others, why not.

    Raises:
        InputError: none do, or some compute something else.
    """
    engines, refusals = {}, {}
    for name in kernels:
        try:
            ours, our_drafter, seconds = prepared(target, drafter, name)
        except InputError as error:  # not every pair and machine can do all
            refusals[name] = str(error)
            continue
        errors = kernel_logit_errors(target, drafter, ours, our_drafter, prompt)
        engines[name] = Engine(ours, our_drafter, {"kernels_seconds": seconds, **errors})
    if not engines:
        raise InputError(f"none of the kernels to compare run this pair: {next(iter(refusals.values()))}")
    return engines, refusals


def step_costs(clock: StepClock) -> StepCosts:
    seconds = clock.medians()
    return StepCosts(seconds[DRAFT], tuple(value for name, value in seconds.items() if name != DRAFT))


def adaptive(costs: StepCosts, alpha: float) -> AdaptiveK:
    """k: auto. A clock too coarse for one step leaves it the costs of the literature: c = 0 and v = 1."""
    if costs.target[0] <= 0:
        return AdaptiveK(0.0, [1.0] * len(costs.target), alpha)
    return AdaptiveK(costs.c, costs.v, alpha)


def own_methods(
    contestants: Sequence[Contestant], engines: Mapping[str, Engine], setting: Setting, policy: AdaptiveK
) -> dict[str, Method]:
    """Our loop for each of our contestants."""
    methods = {}
    for x in contestants:
        if x.kernels is not None:
            engine = engines[x.kernels]
            k = policy if x.k == AUTO else x.k if isinstance(x.k, int) else None
            methods[x.name] = own_method(engine.target, engine.drafter if x.method == SPECULATIVE else None, setting, k)
    return methods


def identities(
    reference: PreTrainedModel,
    prompts: Sequence[TextPrompt],
    outcomes: Sequence[Mapping[str, list[Outcome]]],
    contestants: Sequence[Contestant],
    engines: Mapping[str, Engine],
    setting: Setting,
    policy: AdaptiveK,
) -> dict[str, list[IdentityReport]]:
    """Each contestant's greedy output beside that of plain decoding with the first kernels, a report per prompt.

    Sampled runs are decoded once more, greedily, those of Hugging Face left out.

    Raises:
        InputError: in float32, a difference in our loop that is not a tie: its times would be those of a faulty one.
    """
    if setting.sampling.is_greedy:
        texts = {name: [o[name][0].new_tokens for o in outcomes] for name in outcomes[0]}
    else:
        greedy = own_methods(contestants, engines, replace(setting, sampling=SamplingConfig()), policy)
        texts = {name: [method(p).new_tokens for p in prompts] for name, method in greedy.items()}
    plain = texts[Contestant(PLAIN, next(iter(engines))).name]
    reports = {
        name: [
            check_greedy_identity(reference, p.input_ids, *pair) for p, *pair in zip(prompts, plain, found, strict=True)
        ]
        for name, found in texts.items()
    }
    for x in contestants:
        for prompt, report in zip(prompts, reports.get(x.name, []), strict=False):
            if x.kernels and reference.dtype == torch.float32 and not (report.matches or report.is_tie):
                raise InputError(
                    f"greedy output of {x.name} for prompt {prompt.question_id} differs from plain decoding at new token "
                    f"{report.first_divergence} with a logit gap of {report.top2_gap}; allowed in float32: less than {TIE_GAP}"
                )
    return reports


def identity_keys(reports: Sequence[IdentityReport] | None) -> dict[str, Any]:
    """The verdict on texts, None where none was compared."""
    if reports is None:
        return {"identical": None, "identical_prompts": None, "ties": None}
    matching, ties = sum(r.matches for r in reports), sum(r.is_tie for r in reports)
    return {"identical": identity_verdict(len(reports), matching, ties), "identical_prompts": matching, "ties": ties}


def _unrepeatable(outcomes: Sequence[Mapping[str, list[Outcome]]], name: str) -> int:
    return sum(o.new_tokens != found[name][0].new_tokens for found in outcomes for o in found[name])


def _raw(prompt: TextPrompt, outcomes: Mapping[str, list[Outcome]]) -> dict[str, Any]:
    """Seconds as text, in the order of the runs: a number a line would be thousands of lines."""

    def seconds(part: str) -> dict[str, str]:
        return {name: " ".join(f"{getattr(o.run, part):.6f}" for o in runs) for name, runs in outcomes.items()}

    return {
        "question_id": prompt.question_id,
        "category": prompt.category,
        "prompt_tokens": prompt.input_ids.shape[1],
        "new_tokens": {name: runs[0].run.new_tokens for name, runs in outcomes.items()},
        "decoded": {name: runs[0].run.decoded for name, runs in outcomes.items()},
        "rounds": {name: len(runs[0].stats.rounds) for name, runs in outcomes.items() if runs[0].stats.rounds},
        "prefill_seconds": seconds("prefill"),
        "decode_seconds": seconds("decode"),
    }
