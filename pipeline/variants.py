"""Variants of a draft: its weights in fewer bits, by names such as `w4-g64-gptq`.

What a name may be is written in pipeline/study.py; here it is taken apart and made.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline import cells, options
from pipeline.study import RESERVED_DRAFTS, VARIANT, VARIANT_NAMES, Params, pair_spec
from pipeline.weights import LoadedPair, load_pair
from specdec.drafters import ModelDrafter
from specdec.errors import InputError
from specdec.grid import Grid
from specdec.lowbit import Recipe, Rounded, cast_copy, lowbit_copy
from specdec.memory import Placement

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Variant:
    """
    Args:
        name: as in params.yaml.
        recipe: grid and method; None for a cast to 16 bits.
    """

    name: str
    recipe: Recipe | None

    def keys(self) -> dict[str, Any]:
        """What the variant is, as keys of a cell."""
        if self.recipe is None:
            return {"variant": self.name, "bits": 16, "group_size": None, "grid": None, "method": "cast"}
        grid = self.recipe.grid
        format_ = {"bits": grid.bits, "group_size": grid.group_size, "grid": grid.kind}
        return {"variant": self.name, **format_, "method": self.recipe.method}

    def of(self, draft: PreTrainedModel, calibration: Sequence[Tensor]) -> Rounded:
        """The variant of a draft, widened again, so that any model can compute with it.

        Args:
            calibration: texts as token ids, each of shape (T,).
        """
        if self.recipe is None:
            return cast_copy(draft, CASTS[self.name])
        return lowbit_copy(draft, self.recipe, calibration)


def parse(name: str) -> Variant:
    """The variant of that name.

    Raises:
        InputError: there is none, or its group has no columns.
    """
    if not re.fullmatch(VARIANT, name):
        raise InputError(f"The variant {name!r} is not known; allowed: {VARIANT_NAMES}.")
    if name in CASTS:
        return Variant(name, None)
    bits, group, *kind, method = name.split("-")
    grid = Grid(
        int(bits.removeprefix("w")),
        None if group == "row" else int(group.removeprefix("g")),
        kind[0] if kind else "zero",  # type: ignore[arg-type]
    )
    return Variant(name, Recipe(grid, method))  # type: ignore[arg-type]


def cell_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a stage whose cells are variants."""
    parser = options.cell_parser(description)
    parser.add_argument("--contexts", required=True, help="contexts of params.yaml, written by stage `contexts`")
    parser.add_argument("--variant", required=True, help="such as w4-g64-gptq, see params.yaml")
    return parser


@dataclass(frozen=True)
class Unquantized:
    """A target and the draft whose variants are judged: the pair's, or where that is no model of its own, the target."""

    target: PreTrainedModel
    draft: PreTrainedModel
    draft_name: str
    tokenizer: PreTrainedTokenizerBase
    end_tokens: list[int]
    loaded: LoadedPair


def load_unquantized(params: Params, pair_name: str, device: Placement, dtype: torch.dtype) -> Unquantized:
    """Load both; of a self-draft one model."""
    pair = pair_spec(params, pair_name)
    self_draft = pair.draft in RESERVED_DRAFTS
    loaded = load_pair(
        pair.model_copy(update={"draft": "lookup"}) if self_draft else pair,  # `lookup` loads no draft
        params.models,
        device=device,
        dtype=dtype,
        manifest=cells.manifest(pair_name),
    )
    drafting = loaded.drafter.model if isinstance(loaded.drafter, ModelDrafter) else None
    draft = drafting if isinstance(drafting, PreTrainedModel) else loaded.target
    name = pair.target if self_draft else pair.draft
    return Unquantized(loaded.target, draft, name, loaded.tokenizer, loaded.end_tokens, loaded)
