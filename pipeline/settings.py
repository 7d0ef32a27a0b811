"""How a study's timed cells draw and repeat, as params.yaml has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.methods import Setting
from pipeline.study import Params
from specdec.sampling import SamplingConfig


def setting_of(params: Params, k: int, max_new_tokens: int, end_tokens: list[int], **changes: Any) -> Setting:
    """The setting of a cell; `changes` are what it has otherwise than params.yaml."""
    setting = Setting(
        k,
        SamplingConfig(params.decoding.temperature, params.decoding.top_k, params.decoding.top_p),
        max_new_tokens,
        end_tokens,
        params.decoding.seed,
        params.timing.runs,
        params.timing.warmup,
        params.decoding.verifier,
    )
    return replace(setting, **changes)
