"""What is timed against each other: our plain and speculative decoding, Hugging Face's `generate` without and with a draft."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from pipeline.acceptance import prompt_generator
from pipeline.machine import run_with
from specdec.cache import Model, open_cache
from specdec.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.models import quiet_transformers, vocabulary_size
from specdec.sampling import SamplingConfig
from specdec.stats import AcceptanceStats
from specdec.timing import TimedRun, now, time_generation

if TYPE_CHECKING:  # most of what is timed decodes with a number
    from specdec.policy import KPolicy


@dataclass(frozen=True)
class TextPrompt:
    """A prompt of input ids, shape (1, T)."""

    question_id: int | str
    category: str
    input_ids: Tensor


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison share.

    Args:
        kernels: how matrices of target and draft run in our loop, see specdec/runners.py; `generate` has transformers' own.
        hf_assisted: whether transformers' `generate` with the draft is timed too.
    """

    k: int
    sampling: SamplingConfig
    max_new_tokens: int
    end_tokens: list[int]
    seed: int
    runs: int
    warmup: int
    verifier: str = "token"
    kernels: str = "default"
    hf_assisted: bool = True


@dataclass(frozen=True)
class Outcome:
    """One timed run of one method; `stats` is empty where the method reports none."""

    new_tokens: tuple[int, ...]
    stats: AcceptanceStats
    run: TimedRun


Method = Callable[[TextPrompt], Outcome]


def on_kernels(drafter: Drafter, kernels: str) -> Drafter:
    """The drafter with its model, if it has one, on these kernels."""
    if not isinstance(drafter, ModelDrafter) or not isinstance(drafter.model, PreTrainedModel):
        return drafter
    ours = copy.copy(drafter)
    ours.model = run_with(drafter.model, kernels, draft=True)
    return ours


def prepared(target: PreTrainedModel, drafter: Drafter, kernels: str) -> tuple[Model, Drafter, float]:
    """Target and drafter on these kernels, and the seconds until both had fed one token and several: with packing and compiling.

    Raises:
        InputError: these kernels do not run them.
    """
    start = now(target.device)
    ours, our_drafter = run_with(target, kernels), on_kernels(drafter, kernels)
    for model in [ours, *([our_drafter.model] if isinstance(our_drafter, ModelDrafter) else [])]:
        cache = open_cache(model)
        for tokens in (4, 2, 1):  # code for the first pass of a text, for several tokens behind a context, and for one
            cache.forward(torch.zeros(tokens, dtype=torch.int64), keep=1)
    return ours, our_drafter, now(target.device) - start


def own_method(target: Model, drafter: Drafter | None, setting: Setting, k: int | KPolicy | None = None) -> Method:
    """Our loop: plain decoding without a drafter, else speculative. Every run of a prompt draws the same tokens.

    Args:
        k: draft tokens per round, or who chooses them from round to round; None is the setting's k.
    """

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
                    k=setting.k if k is None else k,
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
    options = _generate_options(setting)

    def method(prompt: TextPrompt) -> Outcome:
        clock = _PromptClock(target.device)
        return _generate(target, prompt, setting.seed, clock, logits_processor=LogitsProcessorList([clock]), **options)

    return method


def assisted_method(target: Any, drafter: Drafter, setting: Setting) -> Method | None:
    """transformers' own `generate` with the same draft and k: assisted generation with a model, prompt lookup without one.

    Its first round reads the prompt too, so its decode time pays for the tokens of the other rounds. None where it cannot use the
    draft: a drafter that it does not have, or a draft model of another vocabulary size, for which it wants two tokenizers.
    """
    options = _generate_options(setting)
    draft: Any = None
    match drafter:
        case ModelDrafter(model=PreTrainedModel() as draft) if vocabulary_size(draft) == vocabulary_size(target):
            options |= {"assistant_model": draft}
        case PromptLookupDrafter():
            options |= {"prompt_lookup_num_tokens": setting.k, "max_matching_ngram_size": drafter.max_ngram}
        case _:
            return None
    fixed = {
        "num_assistant_tokens": setting.k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": getattr(drafter, "confidence_threshold", 0.0),
    }

    def method(prompt: TextPrompt) -> Outcome:
        clock = _RoundClock(target.device)
        with _configured(draft, fixed):
            return _generate(target, prompt, setting.seed, clock, streamer=clock, **options)

    return method


def _generate_options(setting: Setting) -> dict[str, Any]:
    sampling = setting.sampling
    options: dict[str, Any] = {"do_sample": not sampling.is_greedy, "max_new_tokens": setting.max_new_tokens}
    if not sampling.is_greedy:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    # One that is no end token would be hidden from the draft wherever it stands in the prompt.
    end = setting.end_tokens[0] if setting.end_tokens else None
    return options | {"eos_token_id": setting.end_tokens or None, "pad_token_id": end}


def _generate(target: Any, prompt: TextPrompt, seed: int, clock: _PromptClock | _RoundClock, **options: Any) -> Outcome:
    ids = prompt.input_ids.to(target.device)
    # `generate` draws from the global generator, and warns of what its assisted mode hands on to itself.
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(seed)
        start = now(target.device)
        sequences = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        end = now(target.device)
    new_tokens = tuple(sequences[0, ids.shape[1] :].tolist())
    run = TimedRun(clock.read - start, end - clock.read, len(new_tokens) - clock.tokens, len(new_tokens))
    return Outcome(new_tokens, AcceptanceStats(), run)


@contextmanager
def _configured(draft: Any, values: dict[str, Any]) -> Iterator[None]:
    """transformers reads these from the draft's own generation_config and nowhere else. Without a draft, nothing is done."""
    if draft is None:
        yield
        return
    config = draft.generation_config
    before = {name: getattr(config, name) for name in values}
    config.update(**values)
    try:
        yield
    finally:
        config.update(**before)


class _PromptClock(LogitsProcessor):
    """Notes when the prompt had been read: at its first call, before the first token is chosen. It changes no logits."""

    tokens = 1  # that came with the prompt

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.read = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.read:
            self.read = now(self._device)
        return scores


class _RoundClock(BaseStreamer):
    """Notes when the first round ended, and how many tokens it gave. A streamer gets the prompt, then each round's tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._puts = 0
        self.read = 0.0
        self.tokens = 0

    def put(self, value: Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.read, self.tokens = now(self._device), value.numel()

    def end(self) -> None:
        pass
