"""What is timed, and what it runs on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline import cells
from pipeline.study import AUTO
from specdec.cache import Model
from specdec.drafters import Drafter, ModelDrafter
from specdec.memory import SPREAD, require_memory
from specdec.models import count_parameters
from specdec.runners import fastest, runner


def surroundings(target: PreTrainedModel, drafter: Drafter) -> dict[str, Any]:
    """Device, number formats, threads and versions, as keys of a cell."""
    cuda = target.device.type == "cuda"
    return {
        "device": SPREAD if is_spread(target) else target.device.type,
        "device_name": torch.cuda.get_device_name() if cuda else target.device.type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "draft_dtype": draft_dtype(drafter),
        "threads": torch.get_num_threads(),
        "cpu": cells.cpu(),
        "os": platform.platform(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def draft_model(drafter: Drafter) -> PreTrainedModel | None:
    """transformers' model that drafts; None of a drafter that copies text."""
    model = drafter.model if isinstance(drafter, ModelDrafter) else None
    return model if isinstance(model, PreTrainedModel) else None


def resolved(kernels: str, target: PreTrainedModel) -> str:
    """The kernels of that name in params.yaml: `auto` is the fastest that run the target."""
    return fastest(target) if kernels == AUTO else kernels


def run_with(model: PreTrainedModel, kernels: str, *, draft: bool = False) -> Model:
    """The model as `runner` makes it, if there is room for the copies of its weights beside them.

    Raises:
        InputError: there is not, or these kernels do not run the model.
    """
    if kernels not in ("default", "native"):  # native code reads the model's own weights
        what = f"{type(model).__name__} with the kernels {kernels}"
        require_memory(what, count_parameters(model), model.dtype, model.device)
    return runner(model, kernels, draft=draft)


def is_spread(model: PreTrainedModel) -> bool:
    return hasattr(model, "hf_device_map")


def draft_dtype(drafter: Drafter) -> str | None:
    """The number format of the draft's activations; None without a model."""
    return str(drafter.model.dtype).removeprefix("torch.") if isinstance(drafter, ModelDrafter) else None
