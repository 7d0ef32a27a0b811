"""Is speculative greedy output the plain greedy output, and if not, is it a tie or a fault?

One pass over k + 1 tokens and k + 1 passes over one token run different kernels, which differ in the last bits. Where the two
best logits lie closer than that, either token is greedy. Any larger gap is a fault.

The judge is always transformers' model, whichever kernels decoded (specdec/runners.py): it is the independent reference.
`check_device` judges that model on its device, and `check_runner` judges what decodes in its place.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache import Model, open_cache
from specdec.errors import InputError
from specdec.memory import free_memory, require_memory

TIE_GAP = 5e-4  # in logits, float32; ten times the difference seen between kernels
# In a coarser format a gap is told in units in the last place (ulps) of the largest logit: of a bfloat16 logit near 20, one is
# 0.125. A near-tie is one ulp of rounding on either side.
NEAR_TIE_ULPS = 2.0
# How far a device's logits may lie from the CPU's float32 ones, relative to their spread. Rounding is far below, another model
# or a broken kernel near 1.
DEVICE_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# How far a float32 runner's logits may lie from those of the model that it runs. Rounding is far below; other weights or
# positions change them by as much as they spread.
RUNNER_ERROR = 1e-3
_CHECKED_TOKENS = 16  # a shorter prompt is repeated: of a few tokens alone rounding tells too much


@dataclass(frozen=True)
class IdentityReport:
    """
    Args:
        matches: the token sequences are equal.
        first_divergence: index of the first differing new token, None if they match.
        top2_gap: the largest logit there minus the smaller logit of the two tokens, by one uncached pass; None if they match.
    """

    matches: bool
    first_divergence: int | None = None
    top2_gap: float | None = None

    @property
    def is_tie(self) -> bool:
        return self.top2_gap is not None and self.top2_gap < TIE_GAP


def check_greedy_identity(
    target: PreTrainedModel, input_ids: Tensor, plain: Sequence[int], speculative: Sequence[int]
) -> IdentityReport:
    """Compare the new tokens of plain and speculative greedy decoding of one prompt, shape (1, T).

    Args:
        target: transformers' model, from whose logits a gap is taken, also where a runner of it decoded.
    """
    if tuple(plain) == tuple(speculative):
        return IdentityReport(True)
    shared = min(len(plain), len(speculative))
    first = next((i for i in range(shared) if plain[i] != speculative[i]), shared)
    if first == shared:  # one is the beginning of the other: a fault in stopping, never a tie
        return IdentityReport(False, first, float("inf"))
    context = torch.cat([input_ids[0].cpu(), torch.tensor(plain[:first], dtype=torch.int64)])
    with torch.inference_mode():
        logits = target(context[None].to(target.device), logits_to_keep=1).logits[0, -1].float()
    gap = float(logits.max() - torch.minimum(logits[plain[first]], logits[speculative[first]]))
    return IdentityReport(False, first, gap)


@dataclass(frozen=True)
class EmittedGaps:
    """How safely each new token was the best one, by one uncached pass over the text; all of shape (n,), float64.

    Args:
        below_best: the largest logit minus that of the emitted token; 0 where the best one was emitted.
        top2: the largest logit minus the second largest.
        ulp: the spacing of the target's number format at the largest logit.
    """

    below_best: Tensor
    top2: Tensor
    ulp: Tensor


@torch.inference_mode()
def emitted_gaps(target: PreTrainedModel, input_ids: Tensor, new_tokens: Sequence[int]) -> EmittedGaps:
    """Judge greedy output by teacher forcing: feed the prompt, shape (1, T), and the n new tokens at once.

    Args:
        target: transformers' model, also where a runner of it decoded.
    """
    emitted = torch.tensor(new_tokens, dtype=torch.int64)
    text = torch.cat([input_ids[0].cpu(), emitted])[:-1]
    logits = target(text[None].to(target.device), logits_to_keep=len(emitted)).logits[0].cpu()
    best, second = logits.double().topk(2, dim=-1).values.T
    chosen = logits.double().gather(1, emitted[:, None])[:, 0]
    exponent = best.abs().clamp_min(torch.finfo(logits.dtype).tiny).log2().floor()
    return EmittedGaps(best - chosen, best - second, torch.finfo(logits.dtype).eps * 2.0**exponent)


def check_device(model: PreTrainedModel, input_ids: Tensor) -> float:
    """Compare the model's logits with those that it has in float32 on the CPU, on one prompt, shape (1, T).

    A device whose kernels are wrong agrees with itself: plain and speculative decoding then give the same garbage, and an
    equality check passes. A float32 model on the CPU is the reference itself and is not moved.

    Returns:
        The error relative to the spread of a position's logits, mean over positions but the first. (On the first token of a text
        the attention of all others rests; in bfloat16 with real weights it is off by 0.2, the others by 0.03.)

    Raises:
        InputError: the error is larger than rounding in this number format explains.
    """
    if model.device.type == "cpu" and model.dtype == torch.float32:
        return 0.0
    text = _checked_text(input_ids)
    with torch.inference_mode():
        logits = model(text.to(model.device)).logits[0, 1:].cpu().double()
    _require_room(model)
    with _float32_on_the_cpu(model), torch.inference_mode():
        expected = model(text).logits[0, 1:].double()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    error = float(((logits - expected).norm(dim=-1) / spread).mean())
    allowed = DEVICE_ERROR.get(model.dtype, DEVICE_ERROR[torch.bfloat16])
    if not error <= allowed:  # NaN included
        raise InputError(
            f"the logits of {type(model).__name__} on {model.device} in {str(model.dtype).removeprefix('torch.')} differ from "
            f"the CPU's by {error:.2g} of their spread (torch {torch.__version__}); allowed: at most {allowed:g}, another device"
        )
    return error


@torch.inference_mode()
def check_runner(runner: Model, model: PreTrainedModel, input_ids: Tensor) -> float:
    """Compare the logits of what `runners.runner` made of a model with the model's own, on one prompt, shape (1, T).

    The runner is fed as in decoding, the last tokens by one, two and five behind its cache: few rows may run on other kernels
    than many. The model reads everything in one pass without a cache.

    Returns:
        The largest difference of two logits, over all positions but the first (see `check_device`); 0 for the model itself.

    Raises:
        InputError: with float32 parameters, the difference is larger than RUNNER_ERROR; in 16 bits, which layers of low bits go
            with, larger than the share of the logits' reach that DEVICE_ERROR allows.
    """
    if runner is model:
        return 0.0
    text, cached = _checked_text(input_ids)[0], open_cache(runner)
    parts = text.split([len(text) - 8, 1, 2, 5])
    logits = torch.cat([cached.forward(part).cpu().double() for part in parts])[1:]
    expected = model(text[None].to(model.device)).logits[0, 1:].cpu().double()
    error, allowed = float((logits - expected).abs().max()), RUNNER_ERROR
    if model.dtype != torch.float32:
        reach = (expected - expected.mean(dim=-1, keepdim=True)).abs().max()
        allowed = float(reach) * DEVICE_ERROR.get(model.dtype, DEVICE_ERROR[torch.bfloat16])
    if not error <= allowed:  # NaN included
        raise InputError(
            f"the logits of {type(model).__name__} as a {type(runner).__name__} differ from transformers' by {error:.2g} "
            f"(torch {torch.__version__}); allowed: at most {allowed:.2g}, or the kernels 'default'"
        )
    return error


def _checked_text(input_ids: Tensor) -> Tensor:
    """The prompt, repeated until it has enough tokens, shape (1, T'), on the CPU."""
    return input_ids.cpu().repeat(1, -(-_CHECKED_TOKENS // input_ids.shape[1]))


def _require_room(model: PreTrainedModel) -> None:
    """For the model in float32 in main memory. What it already has there it gives up; so it does on mps, which has no other."""
    cpu = torch.device("cpu")
    parameters = list(model.parameters())
    held = 0 if model.device.type == "cuda" else sum(parameter.nbytes for parameter in parameters)
    count = sum(parameter.numel() for parameter in parameters)
    what = f"{type(model).__name__}, to be checked against the CPU,"
    require_memory(what, count, torch.float32, cpu, free=free_memory(cpu) + held)


@contextmanager
def _float32_on_the_cpu(model: PreTrainedModel) -> Iterator[None]:
    """Move the model's tensors there, one by one, and back again: for a copy beside it there may be no room.

    INT8 weights stay what they are, and 16 bits come back unchanged from 32.
    """
    homes = [(tensor, tensor.device, tensor.dtype) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, _, dtype in homes:
            tensor.data = tensor.data.to("cpu", torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)
        yield
    finally:
        for tensor, device, dtype in homes:
            tensor.data = tensor.data.to(device, dtype)
