"""Reading the clock fairly: the device drained on both sides, methods interleaved, warm-up thrown away."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from specdec.cache import Model, open_cache
from specdec.generate import GenerationResult


@dataclass(frozen=True)
class TimedRun:
    """One timed generation.

    Args:
        prefill: seconds until the prompt is in all caches.
        decode: seconds from there to the last token.
        decoded: tokens that the decode time paid for.
        new_tokens: all new tokens; one more than `decoded` where the prompt's own pass gave the first.
    """

    prefill: float
    decode: float
    decoded: int
    new_tokens: int

    @property
    def end_to_end(self) -> float:
        return self.prefill + self.decode


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was queued; without it a clock reads the time of queueing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, read after the device is idle."""
    synchronize(device)
    return time.perf_counter()


def time_generation(
    generate: Callable[[Callable[[], None]], GenerationResult], device: torch.device
) -> tuple[GenerationResult, TimedRun]:
    """Time `generate(on_prefill)`, which must pass `on_prefill` on to a decoding loop."""
    prefilled: list[float] = []
    start = now(device)
    result = generate(lambda: prefilled.append(now(device)))
    end = now(device)
    count = len(result.new_tokens)
    return result, TimedRun(prefilled[0] - start, end - prefilled[0], count, count)


def interleave(names: list[str], runs: int) -> Iterator[str]:
    """A B C, C B A, A B C, ...: each name `runs` times, so that a drift of the machine falls on all alike."""
    for run in range(runs):
        yield from names if run % 2 == 0 else reversed(names)


class StepClock:
    """Times several steps against each other, a few calls at a time, so that they can be spread over a long measurement.

    A machine's speed drifts over minutes: figures of one burst would be of another machine than the runs they are set beside.
    A call that does not count stands before each one that does: in decoding a step follows one like it, and finds in the caches
    what that has left there.
    """

    def __init__(self, steps: Mapping[str, Callable[[], object]], device: torch.device) -> None:
        self._steps = steps
        self._device = device
        self._samples: dict[str, list[float]] = {name: [] for name in steps}

    def sample(self, runs: int) -> None:
        """Time each step `runs` times, interleaved."""
        for name in interleave(list(self._steps), runs):
            self._steps[name]()
            start = now(self._device)
            self._steps[name]()
            self._samples[name].append(now(self._device) - start)

    def medians(self) -> dict[str, float]:
        """Seconds of each step."""
        return {name: median(values) for name, values in self._samples.items()}


def cached_step(model: Model, context: Tensor, n: int) -> Callable[[], object]:
    """A step that feeds n tokens behind `context`, shape (T,), already in the cache, and rolls them back: T(n).

    Of a text that is too long for the model its end is taken.
    """
    cached = open_cache(model)
    context = context[max(0, len(context) + n - cached.room) :]
    cached.forward(context, keep=1)
    tokens = context.repeat(-(-n // len(context)))[:n]

    def step() -> object:
        logits = cached.forward(tokens).cpu()
        cached.rollback(len(context))
        return logits

    return step
