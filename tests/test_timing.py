"""The clock is read on an idle device, whatever the device; warm-up and order do not decide the result."""

import time
from collections import Counter

import pytest
import torch
from stand_ins import ScriptedModel, random_table

from specdec import timing
from specdec.drafters import ModelDrafter
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.timing import StepClock, cached_step, interleave, now, time_generation

DEVICES = ["cpu", "cuda", "mps"]


class StandInDevice:
    """A device with a clock of its own: work is queued at no cost, and takes its time when the device is waited for.

    The CPU queues nothing: there the work takes its time at once.
    """

    def __init__(self, name, monkeypatch):
        self.torch_device = torch.device(name)
        self.clock = self.queued = 0.0
        self.waits = Counter()
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self._wait("cuda"))
        monkeypatch.setattr(torch.mps, "synchronize", lambda: self._wait("mps"))

    def work(self, seconds):
        if self.torch_device.type == "cpu":
            self.clock += seconds
        else:
            self.queued += seconds

    def _wait(self, name):
        self.waits[name] += 1
        self.clock += self.queued
        self.queued = 0.0

    def model(self, seed, seconds):
        model = ScriptedModel(random_table(5, seed))
        model.register_forward_hook(lambda *_: self.work(seconds))
        return model


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return StandInDevice(request.param, monkeypatch)


def test_a11_f12_only_the_right_backend_is_waited_for(device):
    device.work(3)
    assert now(device.torch_device) == 3
    name = device.torch_device.type
    assert device.waits == ({} if name == "cpu" else {name: 1})


def test_a11_f12_both_decoders_are_timed_with_all_their_work_and_none_of_what_came_before(device):
    target, draft = device.model(0, 1.0), device.model(1, 0.25)
    prompt = torch.tensor([[1, 2, 3]])

    device.work(100)  # of somebody else, still queued
    result, run = time_generation(
        lambda on_prefill: autoregressive_generate(target, prompt, max_new_tokens=8, on_prefill=on_prefill),
        device.torch_device,
    )
    assert (run.prefill, run.decode, run.end_to_end) == (1, 8, 9)
    assert run.new_tokens == run.decoded == len(result.new_tokens) == 8

    draft.fed.clear()
    result, run = time_generation(
        lambda on_prefill: speculative_generate(
            target, prompt, drafter=ModelDrafter(draft), k=2, max_new_tokens=8, on_prefill=on_prefill
        ),
        device.torch_device,
    )
    assert run.prefill == 1.25
    assert run.decode == result.stats.target_forwards + 0.25 * (len(draft.fed) - 1)
    assert run.new_tokens == 8


def test_a11_f12_a_slow_first_call_is_not_measured_and_one_slow_call_is_not_the_median(device):
    calls = Counter()

    def step(name, seconds, slow):
        def run():
            calls[name] += 1
            device.work(seconds + 2 * (calls[name] in slow))

        return run

    clock = StepClock({"a": step("a", 0.5, {1, 4}), "b": step("b", 0.25, {1})}, device.torch_device)
    clock.sample(2)
    device.work(100)  # what happens in between does not count
    clock.sample(3)
    assert clock.medians() == {"a": 0.5, "b": 0.25}
    assert calls == {"a": 10, "b": 10}  # each one timed behind one that is not


def test_methods_take_turns_and_turn_round():
    assert "".join(interleave(["A", "B"], 4)) == "ABBAABBA"
    assert "".join(interleave(["A", "B", "C"], 3)) == "ABCCBAABC"
    assert list(interleave(["A"], 0)) == []
    drift = enumerate(interleave(["A", "B"], 2))  # a machine that slows down steadily costs both the same
    total = Counter()
    for moment, name in drift:
        total[name] += moment
    assert total["A"] == total["B"]


def test_a_cached_step_feeds_n_tokens_behind_the_context_again_and_again():
    model = ScriptedModel(random_table(5, 0))
    context = torch.tensor([4, 3, 2, 1, 0])
    step = cached_step(model, context, 3)
    model.fed.clear()
    for _ in range(3):
        step()
    assert [(fed.cached, len(fed.tokens)) for fed in model.fed] == [((4, 3, 2, 1, 0), 3)] * 3


def test_the_module_reads_the_clock_in_one_place():
    assert timing.time is time  # what the stand-in above replaces
