"""Passes over a few tokens behind a context, to be timed against each other, and what the machine could do at best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specdec.cache import Model, open_cache
from specdec.errors import InputError
from specdec.kernels import Int4Linear
from specdec.models import vocabulary_size
from specdec.quantize import Int8Linear
from specdec.timing import interleave, now

Step = Callable[[], object]

SUM_FLOATS = 2**26  # 256 MiB, several times the size of any cache
PRODUCT_SIDE = 2048
MACHINE = {
    "sum": 4 * SUM_FLOATS,
    "product": 2 * PRODUCT_SIDE**3,
}  # bytes that the one reads, operations that the other does


def context_for(models: Iterable[Model], length: int) -> Tensor:
    """Random tokens that all the models know, shape (length,): a pass takes as long over any text."""
    known = min(vocabulary_size(model) for model in models)
    return torch.randint(known, (length,), generator=torch.Generator().manual_seed(0))


def passes(model: Model, context: Tensor, rows: int) -> dict[int, Step]:
    """n -> a step that feeds n tokens behind the context, which is in the cache already, and rolls them back; n = 1..rows.

    Raises:
        InputError: the model's positions do not reach so far.
    """
    cache = open_cache(model)
    if cache.room < len(context) + rows:
        raise InputError(
            f"{rows} tokens behind a context of {len(context)} are more than the {cache.room} that the model reaches"
        )
    cache.forward(context, keep=1)
    tokens = context.repeat(-(-rows // len(context)))

    def step(n: int) -> Step:
        def run() -> Tensor:
            logits = cache.forward(tokens[:n]).cpu()
            cache.rollback(len(context))
            return logits

        return run

    return {n: step(n) for n in range(1, rows + 1)}


def machine_steps(device: torch.device) -> dict[str, Step]:
    """The steps of MACHINE: a sum, which memory limits, and a float32 matrix product, which arithmetic does."""
    values = torch.ones(SUM_FLOATS, device=device)
    matrix = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE, device=device)
    return {"sum": values.sum, "product": lambda: matrix @ matrix}


def sampled(steps: Mapping[str, Step], runs: int, device: torch.device, label: str) -> dict[str, list[float]]:
    """Seconds of each step in each run. Steps take turns, there and back; the first call of each does not count."""
    for step in steps.values():
        step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in tqdm(interleave(list(steps), runs), desc=label, total=len(steps) * runs, unit="pass"):
        start = now(device)
        steps[name]()
        samples[name].append(now(device) - start)
    return samples


def weights_read(model: nn.Module) -> list[Tensor]:
    """What each pass reads as a whole: not the tensors that only embeddings hold, of which it reads a row for each token."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            low_bit = module.buffers(recurse=False) if isinstance(module, Int4Linear | Int8Linear) else ()
            found |= {id(tensor): tensor for tensor in (*module.parameters(recurse=False), *low_bit)}
    return list(found.values())
