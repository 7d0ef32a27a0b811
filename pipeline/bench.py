"""One comparison and what it ran on: the record of a benchmark cell."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.machine import draft_model, is_spread, resolved, surroundings
from pipeline.methods import Setting, TextPrompt
from pipeline.timed import Rival, compare
from specdec.drafters import Drafter
from specdec.identity import check_device
from specdec.models import count_parameters


@dataclass(frozen=True)
class Bench:
    """The models of transformers and prompts of one comparison, and how the record names them."""

    names: dict[str, Any]
    target: PreTrainedModel
    drafter: Drafter
    draft_parameters: int  # 0 where the text itself drafts
    prompts: list[TextPrompt]
    end_tokens: list[int]


def measure(backend: str, bench: Bench, setting: Setting, rival: Rival | None = None) -> dict[str, Any]:
    """Check the device, run the comparison and describe what it ran on."""
    setting = replace(setting, kernels=resolved(setting.kernels, bench.target))
    device_errors = device_logit_errors(bench)
    if bench.target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    label = f"{bench.names['pair']} k={setting.k} T={setting.sampling.temperature}"
    measured = compare(bench.target, bench.drafter, bench.prompts, setting, label, rival)
    return {
        **bench.names,
        "backend": backend,
        "k": setting.k,
        "temperature": setting.sampling.temperature,
        "top_k": setting.sampling.top_k,
        "top_p": setting.sampling.top_p,
        "verifier": setting.verifier,
        "confidence_threshold": getattr(bench.drafter, "confidence_threshold", 0.0),
        "seed": setting.seed,
        "max_new_tokens": setting.max_new_tokens,
        "runs": setting.runs,
        "kernels": setting.kernels,
        **surroundings(bench.target, bench.drafter),
        **device_errors,
        "target_parameters": count_parameters(bench.target),
        "draft_parameters": bench.draft_parameters,
        "peak_memory_bytes": peak_memory_bytes(bench.target.device),
        **measured,
    }


def device_logit_errors(bench: Bench) -> dict[str, float | None]:
    """How far the logits of both models lie from the CPU's float32 ones; where the target is those, nothing is copied.

    None for a model that is spread over several devices: it may be larger than the main memory.

    Raises:
        InputError: too far. A wrong target gives garbage at a fine speed; a wrong draft gives a wrong α and speed-up.
    """
    ids = bench.prompts[0].input_ids
    spread = is_spread(bench.target)
    draft = draft_model(bench.drafter)
    if bench.target.device.type == "cpu" and bench.target.dtype == torch.float32:
        return {"device_logit_error": 0.0, "draft_device_logit_error": None}
    return {
        "device_logit_error": None if spread else check_device(bench.target, ids),
        "draft_device_logit_error": None if draft is None else check_device(draft, ids),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process held: on the GPUs for cuda, else in main memory, the check of the device included."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    kib_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib_or_bytes if sys.platform == "darwin" else kib_or_bytes * 1024
