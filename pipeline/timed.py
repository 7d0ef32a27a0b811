"""One timed comparison: plain, speculative and Hugging Face decoding of the same prompts, interleaved in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.acceptance import PromptResult, acceptance_record, iid_alpha
from pipeline.figures import (
    decode_cost,
    end_to_end_cost,
    prediction_record,
    rate,
    speed_record,
    with_interval,
)
from pipeline.machine import draft_model
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
from specdec.cache import Model
from specdec.chance import GeneratorChooser
from specdec.drafters import Drafter, ModelDrafter
from specdec.errors import InputError
from specdec.identity import TIE_GAP, check_greedy_identity, check_runner
from specdec.sampling import SamplingConfig
from specdec.timing import StepClock, cached_step, interleave

COST_RUNS = 2  # timed calls, after each prompt, of each forward from which c and v are taken
DRAFT = "draft"


@dataclass(frozen=True)
class Rival:
    """Another program's greedy decoding of the same target, and passes of it that are timed after each prompt."""

    name: str
    method: Method
    costs: StepClock


def compare(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[TextPrompt],
    setting: Setting,
    label: str,
    rival: Rival | None = None,
) -> dict[str, Any]:
    """Time the methods on the prompts; return the measured keys of a benchmark cell.

    Args:
        target: transformers' model. `generate` runs it as it is, our loop with the setting's kernels; it also judges greedy
            output.
        drafter: with transformers' model, if it has one.
        rival: takes turns with the others.

    Raises:
        InputError: kernels that do not run these models, or compute something else; in float32, greedy output that differs from
            plain decoding by more than a tie.
    """
    ours, our_drafter, kernels_seconds = prepared(target, drafter, setting.kernels)
    kernels = {
        "kernels_seconds": kernels_seconds,
        **kernel_logit_errors(target, drafter, ours, our_drafter, prompts[0]),
    }
    methods = {"ar": own_method(ours, None, setting), "spec": own_method(ours, our_drafter, setting)}
    methods["hf"] = hugging_face_method(target, setting)
    assisted = assisted_method(target, drafter, setting) if setting.hf_assisted else None
    if assisted is not None:
        methods["hf_assisted"] = assisted
    if rival is not None:
        methods[rival.name] = rival.method
    for method in methods.values():
        for _ in range(setting.warmup):
            method(prompts[0])
    costs = cost_clock(ours, our_drafter, prompts, min(setting.k, setting.max_new_tokens - 1) + 1)
    outcomes = []
    with tqdm(total=len(prompts) * setting.runs * len(methods), desc=label, unit="run") as progress:
        for prompt in prompts:
            outcomes.append(in_turns(methods, prompt, setting.runs, progress))
            costs.sample(COST_RUNS)
            if rival is not None:
                rival.costs.sample(COST_RUNS)
    results = [
        PromptResult(p.question_id, p.category, outcome["spec"][0].stats)
        for p, outcome in zip(prompts, outcomes, strict=True)
    ]
    acceptance = acceptance_record(results, setting.verifier)
    speed = speed_record([{name: [o.run for o in runs] for name, runs in outcome.items()} for outcome in outcomes])
    alpha, tau = iid_alpha(acceptance, setting.verifier), acceptance["mean_acceptance_length"]
    prediction = _predicted(results, alpha, tau, speed["speedup"], costs.medians())
    identity = identity_record(target, ours, our_drafter, prompts, outcomes, setting)
    beside = {} if rival is None else rival_record(rival.name, target, prompts, outcomes)
    samples = [_raw(p, outcome) for p, outcome in zip(prompts, outcomes, strict=True)]
    return {**acceptance, **speed, **prediction, **kernels, **identity, **beside, "samples": samples}


def rival_record(
    name: str, reference: PreTrainedModel, prompts: Sequence[TextPrompt], outcomes: Sequence[dict[str, list[Outcome]]]
) -> dict[str, Any]:
    """A rival's speeds, ours and Hugging Face's over its, and where its greedy text parts from our plain one.

    Its sums have another order, so a difference is told with its gap and fails nothing.
    """
    runs = [{method: [o.run for o in found] for method, found in outcome.items()} for outcome in outcomes]
    record: dict[str, Any] = {
        f"{name}_tokens_per_second": rate([decode_cost(r[name]) for r in runs]),
        f"{name}_end_to_end_tokens_per_second": rate([end_to_end_cost(r[name]) for r in runs]),
    }
    for method in ("ar", "spec", "hf"):
        key = f"{method}_over_{name}"
        record |= with_interval(key, [(decode_cost(r[name]), decode_cost(r[method])) for r in runs])
    reports = [
        check_greedy_identity(reference, p.input_ids, o["ar"][0].new_tokens, o[name][0].new_tokens)
        for p, o in zip(prompts, outcomes, strict=True)
    ]
    return record | {
        f"{name}_identical_prompts": sum(r.matches for r in reports),
        f"{name}_ties": sum(r.is_tie for r in reports),
        f"{name}_first_divergences": [r.first_divergence for r in reports],
        # Infinite where one text is the beginning of the other, and JSON has no such number.
        f"{name}_divergence_gaps": [None if r.top2_gap == float("inf") else r.top2_gap for r in reports],
    }


def kernel_logit_errors(
    target: PreTrainedModel, drafter: Drafter, ours: Model, our_drafter: Drafter, prompt: TextPrompt
) -> dict[str, float | None]:
    """How far the logits of both models as they are timed lie from those that transformers' models give.

    Raises:
        InputError: too far. Kernels that compute something else agree with themselves, so that no other check would notice.
    """
    draft, draft_error = draft_model(drafter), None
    if draft is not None and isinstance(our_drafter, ModelDrafter):
        draft_error = check_runner(our_drafter.model, draft, prompt.input_ids)
    return {
        "kernels_logit_error": check_runner(ours, target, prompt.input_ids),
        "draft_kernels_logit_error": draft_error,
    }


def _predicted(
    results: Sequence[PromptResult], alpha: float | None, tau: float, speedup: float | None, seconds: dict[str, float]
) -> dict[str, Any]:
    drafted = [r.drafted for result in results for r in result.stats.rounds]
    target_seconds = {int(n): value for n, value in seconds.items() if n != DRAFT}
    return prediction_record(drafted, alpha, tau, speedup, seconds[DRAFT], target_seconds)


def identity_record(
    reference: PreTrainedModel,
    target: Model,
    drafter: Drafter,
    prompts: Sequence[TextPrompt],
    outcomes: Sequence[dict[str, list[Outcome]]],
    setting: Setting,
) -> dict[str, Any]:
    """Is greedy speculative output plain greedy output? Sampled runs are decoded once more, greedily, to answer it.

    Args:
        reference: transformers' model, by which a difference is judged.
        target: the same as it was timed.

    Raises:
        InputError: in float32, a difference that is not a tie: the times would be those of a faulty loop.
    """
    if setting.sampling.is_greedy:
        pairs = [(o["ar"][0].new_tokens, o["spec"][0].new_tokens) for o in outcomes]
    else:
        greedy = replace(setting, sampling=SamplingConfig())
        plain, speculative = own_method(target, None, greedy), own_method(target, drafter, greedy)
        pairs = [(plain(p).new_tokens, speculative(p).new_tokens) for p in prompts]
    reports = [check_greedy_identity(reference, p.input_ids, *pair) for p, pair in zip(prompts, pairs, strict=True)]
    for prompt, report in zip(prompts, reports, strict=True):
        if reference.dtype == torch.float32 and not (report.matches or report.is_tie):
            raise InputError(
                f"greedy speculative output of prompt {prompt.question_id} differs from plain decoding at new token "
                f"{report.first_divergence} with a logit gap of {report.top2_gap}; allowed in float32: less than {TIE_GAP}"
            )
    matching, ties = sum(r.matches for r in reports), sum(r.is_tie for r in reports)
    return {
        "identical": identity_verdict(len(reports), matching, ties),
        "identical_prompts": matching,
        "ties": ties,
        "first_divergences": [r.first_divergence for r in reports],
        "divergence_gaps": [r.top2_gap for r in reports],
        "hf_identical_prompts": _equal_to_plain("hf", outcomes, setting),
        "hf_assisted_identical_prompts": _equal_to_plain("hf_assisted", outcomes, setting),
        "unrepeatable_runs": sum(
            o.new_tokens != runs[0].new_tokens for p in outcomes for runs in p.values() for o in runs
        ),
    }


def _equal_to_plain(name: str, outcomes: Sequence[dict[str, list[Outcome]]], setting: Setting) -> int | None:
    """Prompts whose output by one of Hugging Face's methods is that of plain decoding.

    None where it was not timed, and when sampling: its draws are others, and each run of a method repeats its own.
    """
    if not setting.sampling.is_greedy or not all(name in o for o in outcomes):
        return None
    return sum(o[name][0].new_tokens == o["ar"][0].new_tokens for o in outcomes)


def identity_verdict(prompts: int, matching: int, ties: int) -> str:
    if matching == prompts:
        return "identical"
    if matching + ties == prompts:
        return f"identical but for {ties} {'tie' if ties == 1 else 'ties'}"
    return f"{matching} of {prompts} prompts identical"


def cost_clock(target: Model, drafter: Drafter, prompts: Sequence[TextPrompt], most_rows: int) -> StepClock:
    """A clock of T_draft(1), called DRAFT, and of T_target(n), n = 1..most_rows, called n, behind the prompt of median length.

    A drafter without a model has the time of one look-up for its T_draft(1).
    """
    context = sorted((p.input_ids[0] for p in prompts), key=len)[len(prompts) // 2]
    steps = {str(n): cached_step(target, context, n) for n in range(1, most_rows + 1)}
    if isinstance(drafter, ModelDrafter):
        steps[DRAFT] = cached_step(drafter.model, context, 1)
    else:
        chooser = GeneratorChooser(torch.Generator().manual_seed(0))
        steps[DRAFT] = lambda: drafter.propose(context, max(1, most_rows - 1), chooser)
    return StepClock(steps, target.device)


def in_turns(methods: Mapping[str, Method], prompt: TextPrompt, runs: int, progress: tqdm) -> dict[str, list[Outcome]]:
    """What each method did with the prompt, run by run."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in methods}
    for name in interleave(list(methods), runs):
        outcomes[name].append(methods[name](prompt))
        progress.update()
    return outcomes


def _raw(prompt: TextPrompt, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    return {
        "question_id": prompt.question_id,
        "category": prompt.category,
        "prompt_tokens": prompt.input_ids.shape[1],
        "new_tokens": {name: runs[0].run.new_tokens for name, runs in outcomes.items()},
        "prefill_seconds": {name: [o.run.prefill for o in runs] for name, runs in outcomes.items()},
        "decode_seconds": {name: [o.run.decode for o in runs] for name, runs in outcomes.items()},
    }
