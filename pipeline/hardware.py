"""Stage `hardware`: check everything that the study will read, then write down what machine this is.

It runs first and every time. DVC deletes a stage's outputs before it runs the stage, so a mistake in params.yaml or in the
prompts has to stop the run here, while no result has been touched yet. Timed cells depend on `fingerprint`, so a key belongs
into it only if a change means that times must be taken anew; nothing in the file may differ between two runs on one machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from pipeline import cells
from pipeline.cli import run
from pipeline.prompts import load_prompts, select_prompts
from pipeline.study import load_params
from specdec.errors import InputError


def main() -> None:
    argparse.ArgumentParser(
        description="Check params.yaml and the prompts, then describe this machine in metrics/hardware.json."
    ).parse_args()
    params = load_params()
    select_prompts(load_prompts(params.prompts.file), params.prompts.categories, params.study.prompts_per_category)
    spec = params.contexts[params.study.contexts]
    context_prompts = load_prompts(params.context_prompts)
    categories = list(dict.fromkeys(prompt.category for prompt in context_prompts))
    select_prompts(context_prompts, categories, spec.prompts_per_category + spec.calibration_per_category)
    for name in params.study.comparisons:
        compared = params.comparisons[name]
        select_prompts(context_prompts, compared.categories, compared.prompts_per_category)
    pair_devices = {f"pairs.{name}.device": params.pairs[name].device for name in params.study.pairs}
    check_devices({"timing.device": params.timing.device, **pair_devices})
    placed = {name: params.pairs[name].device or params.timing.device for name in params.study.pairs}
    check_kernels(params.timing.kernels, params.timing.dtype, placed)
    cells.write_json(cells.HARDWARE, describe(params.timing.threads))
    print(f"params.yaml is in order: study {params.study.name}, pairs {', '.join(params.study.pairs)}")


def check_devices(asked: Mapping[str, str | None]) -> None:
    """
    Args:
        asked: device names by their keys in params.yaml.

    Raises:
        InputError: one of them is not here.
    """
    here = ("auto", "cpu", "spread", *accelerators())
    for key, device in asked.items():
        if device is not None and device not in here:
            raise InputError(
                f"params.yaml: {key} is {device}, which is not on this machine; allowed: {', '.join(here)}."
            )


def check_kernels(kernels: str, dtype: str, placed: Mapping[str, str]) -> None:
    """
    Args:
        placed: the device of each pair that is timed.

    Raises:
        InputError: these kernels cannot run there. Whether they run a model of its class shows only when it is loaded.
    """
    for pair, device in placed.items():
        here = next(iter(accelerators()), "cpu") if device == "auto" else device
        if kernels == "packed" and (here != "cpu" or dtype != "float32"):
            raise InputError(
                f"params.yaml: timing.kernels is packed, and the pair {pair} is timed on {here} in {dtype}; allowed: cpu and "
                "float32, or timing.kernels: auto, default or joined."
            )
        if kernels == "joined" and here == "spread":
            raise InputError(
                f"params.yaml: timing.kernels is joined, and the pair {pair} is timed on spread; allowed: one device, or "
                "timing.kernels: auto or default."
            )
        if kernels in ("compiled", "native") and here != "cpu":
            raise InputError(
                f"params.yaml: timing.kernels is {kernels}, and the pair {pair} is timed on {here}; allowed: cpu, or "
                "timing.kernels: auto, default or joined."
            )


def describe(threads: int | None) -> dict[str, Any]:
    """The record: `fingerprint`, and beside it what is worth knowing but does not call for new times.

    `cores` are the logical processors that this process may use, `threads` what a timed run uses of them.
    """
    devices = accelerators()
    return {
        "fingerprint": {
            "cpu": cpu_name(),
            "device": next(iter(devices.values()), "cpu"),
            "cores": available_cores(),
            "threads": threads or default_threads(),
            "torch": installed("torch"),
            "transformers": installed("transformers"),
            "os": platform.system(),
        },
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise InputError(
            f"The package {package} is not installed; `pip install -r requirements.txt` brings it."
        ) from None


def available_cores() -> int:
    """Logical processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """One thread per physical core that this process may use: a second one on the same core gains no arithmetic."""
    return min(available_cores(), psutil.cpu_count(logical=False) or available_cores())


def accelerators() -> dict[str, str]:
    """What torch can use besides the CPU, as {name in params.yaml: name of the device}; the best first."""
    # Importing torch takes longer than all the rest of this stage, which runs every time: skip it where it can find nothing.
    nodes = [*Path("/dev").glob("nvidia*"), *Path("/dev").glob("dxg"), *Path("/dev").glob("kfd")]
    if platform.system() == "Linux" and not nodes:
        return {}
    import torch

    found = {}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_device_name(0)
    if torch.backends.mps.is_available():
        found["mps"] = "mps"
    return found


def cpu_name() -> str:
    """The processor's model, or as much as the system tells of it."""
    system = platform.system()
    if system == "Linux":
        return linux_cpu_name(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    if system == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def linux_cpu_name(cpuinfo: str) -> str:
    """The model's name from the text of /proc/cpuinfo.

    Virtual machines often say just "Intel(R) Xeon(R) Processor", and Arm processors give numbers only. A name without a model
    number (three digits in a row) gets the numbers behind it, so that two kinds of processor never look the same.
    """
    first = dict(re.findall(r"^([^\t:]+)[\t ]*: *(.*)$", cpuinfo.split("\n\n")[0], flags=re.MULTILINE))
    name = " ".join((first.get("model name") or platform.machine()).split())
    if re.search(r"\d{3}", name):
        return name
    keys = ("cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    numbers = [f"{key.removeprefix('cpu ').removeprefix('CPU ')} {first[key]}" for key in keys if first.get(key)]
    return f"{name} ({', '.join(numbers)})" if numbers else name


if __name__ == "__main__":
    run(main)
