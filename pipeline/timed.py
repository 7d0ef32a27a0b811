"""One timed comparison: plain, speculative and Hugging Face decoding of the same prompts, interleaved in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from pipeline.acceptance import PromptResult, acceptance_record, iid_alpha, prompt_generator
from pipeline.figures import prediction_record, speed_record
from specdec.chance import GeneratorChooser
from specdec.drafters import Drafter, ModelDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.identity import TIE_GAP, check_greedy_identity
from specdec.sampling import SamplingConfig
from specdec.stats import AcceptanceStats
from specdec.timing import StepClock, TimedRun, cached_step, interleave, now, time_generation

COST_RUNS = 2  # timed calls, after each prompt, of each forward from which c and v are taken
DRAFT = "draft"


@dataclass(frozen=True)
class TextPrompt:
    """A prompt of input ids, shape (1, T)."""

    question_id: int | str
    category: str
    input_ids: Tensor


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison share."""

    k: int
    sampling: SamplingConfig
    max_new_tokens: int
    end_tokens: list[int]
    seed: int
    runs: int
    warmup: int
    verifier: str = "token"


@dataclass(frozen=True)
class Outcome:
    """One timed run of one method; `stats` is empty where the method reports none."""

    new_tokens: tuple[int, ...]
    stats: AcceptanceStats
    run: TimedRun


Method = Callable[[TextPrompt], Outcome]


def compare(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[TextPrompt], setting: Setting, label: str
) -> dict[str, Any]:
    """Time the methods on the prompts; return the measured keys of a benchmark cell.

    Raises:
        InputError: in float32, greedy output that differs from plain decoding by more than a tie.
    """
    methods = {
        "ar": own_method(target, None, setting),
        "spec": own_method(target, drafter, setting),
        "hf": hugging_face_method(target, setting),
    }
    for method in methods.values():
        for _ in range(setting.warmup):
            method(prompts[0])
    costs = cost_clock(target, drafter, prompts, min(setting.k, setting.max_new_tokens - 1) + 1)
    outcomes = []
    with tqdm(total=len(prompts) * setting.runs * len(methods), desc=label, unit="run") as progress:
        for prompt in prompts:
            outcomes.append(_interleaved(methods, prompt, setting.runs, progress))
            costs.sample(COST_RUNS)
    results = [
        PromptResult(p.question_id, p.category, outcome["spec"][0].stats)
        for p, outcome in zip(prompts, outcomes, strict=True)
    ]
    acceptance = acceptance_record(results, setting.verifier)
    speed = speed_record([{name: [o.run for o in runs] for name, runs in outcome.items()} for outcome in outcomes])
    drafted = [r.drafted for result in results for r in result.stats.rounds]
    seconds = costs.medians()
    draft_seconds = seconds.pop(DRAFT)
    prediction = prediction_record(
        drafted,
        iid_alpha(acceptance, setting.verifier),
        acceptance["mean_acceptance_length"],
        speed["speedup"],
        draft_seconds,
        {int(n): value for n, value in seconds.items()},
    )
    identity = identity_record(target, drafter, prompts, outcomes, setting)
    samples = [_raw(p, outcome) for p, outcome in zip(prompts, outcomes, strict=True)]
    return {**acceptance, **speed, **prediction, **identity, "samples": samples}


def own_method(target: PreTrainedModel, drafter: Drafter | None, setting: Setting) -> Method:
    """Our loop: plain decoding without a drafter, else speculative. Every run of a prompt draws the same tokens."""

    def method(prompt: TextPrompt) -> Outcome:
        options: dict[str, Any] = {
            "max_new_tokens": setting.max_new_tokens,
            "temperature": setting.sampling.temperature,
            "top_k": setting.sampling.top_k,
            "top_p": setting.sampling.top_p,
            "eos_token_id": setting.end_tokens,
            "generator": prompt_generator(setting.seed, prompt.question_id),
        }
        result, run = time_generation(
            lambda on_prefill: (
                autoregressive_generate(target, prompt.input_ids, on_prefill=on_prefill, **options)
                if drafter is None
                else speculative_generate(
                    target,
                    prompt.input_ids,
                    drafter=drafter,
                    k=setting.k,
                    verify=setting.verifier,
                    on_prefill=on_prefill,
                    **options,
                )
            ),
            target.device,
        )
        return Outcome(result.new_tokens, result.stats, run)

    return method


def hugging_face_method(target: Any, setting: Setting) -> Method:
    """transformers' own `generate`. The prompt's pass gives its first token, so its decode time pays for one token fewer."""
    sampling = setting.sampling
    options: dict[str, Any] = {"do_sample": not sampling.is_greedy, "max_new_tokens": setting.max_new_tokens}
    if not sampling.is_greedy:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    options |= {"eos_token_id": setting.end_tokens or None, "pad_token_id": (setting.end_tokens or [0])[0]}

    def method(prompt: TextPrompt) -> Outcome:
        ids = prompt.input_ids.to(target.device)
        clock = _PromptClock(target.device)
        with torch.random.fork_rng():  # `generate` draws from the global generator
            torch.manual_seed(setting.seed)
            start = now(target.device)
            sequences = target.generate(
                ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([clock]), **options
            )
            end = now(target.device)
        new_tokens = tuple(sequences[0, ids.shape[1] :].tolist())
        run = TimedRun(clock.prompt_read - start, end - clock.prompt_read, len(new_tokens) - 1, len(new_tokens))
        return Outcome(new_tokens, AcceptanceStats(), run)

    return method


class _PromptClock(LogitsProcessor):
    """Notes when the prompt's pass ended: at its first call, before the first token is chosen. It changes no logits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.prompt_read = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.prompt_read:
            self.prompt_read = now(self._device)
        return scores


def identity_record(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[TextPrompt],
    outcomes: Sequence[dict[str, list[Outcome]]],
    setting: Setting,
) -> dict[str, Any]:
    """Is greedy speculative output plain greedy output? Sampled runs are decoded once more, greedily, to answer it.

    Raises:
        InputError: in float32, a difference that is not a tie: the times would be those of a faulty loop.
    """
    if setting.sampling.is_greedy:
        pairs = [(o["ar"][0].new_tokens, o["spec"][0].new_tokens) for o in outcomes]
    else:
        greedy = replace(setting, sampling=SamplingConfig())
        plain, speculative = own_method(target, None, greedy), own_method(target, drafter, greedy)
        pairs = [(plain(p).new_tokens, speculative(p).new_tokens) for p in prompts]
    reports = [check_greedy_identity(target, p.input_ids, *pair) for p, pair in zip(prompts, pairs, strict=True)]
    for prompt, report in zip(prompts, reports, strict=True):
        if target.dtype == torch.float32 and not (report.matches or report.is_tie):
            raise InputError(
                f"greedy speculative output of prompt {prompt.question_id} differs from plain decoding at new token "
                f"{report.first_divergence} with a logit gap of {report.top2_gap}; allowed in float32: less than {TIE_GAP}"
            )
    matching, ties = sum(r.matches for r in reports), sum(r.is_tie for r in reports)
    hf_matching = sum(o["hf"][0].new_tokens == o["ar"][0].new_tokens for o in outcomes)
    return {
        "identical": _verdict(len(reports), matching, ties),
        "identical_prompts": matching,
        "ties": ties,
        "first_divergences": [r.first_divergence for r in reports],
        "divergence_gaps": [r.top2_gap for r in reports],
        # None when sampling: Hugging Face's draws are others, and each run of a method repeats its own
        "hf_identical_prompts": hf_matching if setting.sampling.is_greedy else None,
        "unrepeatable_runs": sum(
            o.new_tokens != runs[0].new_tokens for p in outcomes for runs in p.values() for o in runs
        ),
    }


def _verdict(prompts: int, matching: int, ties: int) -> str:
    if matching == prompts:
        return "identical"
    if matching + ties == prompts:
        return f"identical but for {ties} {'tie' if ties == 1 else 'ties'}"
    return f"{matching} of {prompts} prompts identical"


def cost_clock(target: PreTrainedModel, drafter: Drafter, prompts: Sequence[TextPrompt], most_rows: int) -> StepClock:
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


def _interleaved(methods: dict[str, Method], prompt: TextPrompt, runs: int, progress: tqdm) -> dict[str, list[Outcome]]:
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
