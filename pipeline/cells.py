"""Where every result lies, and how it is written.

A cell is one JSON file with the result of one point of one question. dvc.yaml spells the same paths a second time (DVC has
to know them before any Python runs); tests/test_dvc_yaml.py holds the two together. All paths are relative to the repository
root, from which every script runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.errors import InputError

METRICS = Path("metrics")
HARDWARE = METRICS / "hardware.json"


def toy_benchmark() -> Path:
    return METRICS / "toy" / "benchmark.json"


def toy_k(k: int) -> Path:
    return METRICS / "toy" / "k" / f"{k}.json"


def toy_temperature(temperature: float) -> Path:
    return METRICS / "toy" / "temperature" / f"{float(temperature)}.json"


def manifest(pair: str) -> Path:
    """What the pair's weights are: source, revision, hashes. Shared by all studies."""
    return METRICS / "models" / f"{pair}.json"


def sweep_k(study: str, pair: str, k: int) -> Path:
    return METRICS / "sweep_k" / study / pair / f"{k}.json"


def sweep_temperature(study: str, pair: str, temperature: float) -> Path:
    return METRICS / "sweep_temperature" / study / pair / f"{float(temperature)}.json"


def hf_benchmark(study: str, pair: str, k: int) -> Path:
    return METRICS / "hf_benchmark" / study / pair / f"{k}.json"


def cost_curve(study: str, pair: str) -> Path:
    return METRICS / "cost_curve" / study / f"{pair}.json"


def comparison(study: str, pair: str) -> Path:
    return METRICS / "comparison" / study / f"{pair}.json"


def llama_cpp(study: str, pair: str) -> Path:
    """Beside the pair's other timed cells: few studies have such a cell, and a folder that is missing would stop `tables`."""
    return METRICS / "hf_benchmark" / study / pair / "llama_cpp.json"


def sweep_block(study: str, pair: str, temperature: float) -> Path:
    return METRICS / "sweep_block" / study / pair / f"{float(temperature)}.json"


def sweep_confidence(study: str, pair: str, threshold: float) -> Path:
    return METRICS / "sweep_confidence" / study / pair / f"{float(threshold)}.json"


def greedy_identity(study: str, pair: str, dtype: str) -> Path:
    return METRICS / "greedy_identity" / study / pair / f"{dtype}.json"


def contexts(name: str, pair: str) -> Path:
    """The texts of a pair's target: of the contexts of that name, and shared by all studies that use them."""
    return METRICS / "contexts" / name / f"{pair}.json"


def quantized_alpha(contexts_name: str, pair: str, variant: str) -> Path:
    return METRICS / "quantized_alpha" / contexts_name / pair / f"{variant}.json"


def quantized_loop(contexts_name: str, pair: str, variant: str) -> Path:
    return METRICS / "quantized_loop" / contexts_name / pair / f"{variant}.json"


def quantized_benchmark(study: str, pair: str, variant: str) -> Path:
    return METRICS / "quantized_benchmark" / study / pair / f"{variant}.json"


def label(temperature: float) -> str:
    """A temperature at the end of a key of a cell that holds several: 0, 0_7, 1."""
    return f"{temperature:g}".replace(".", "_")


def cpu() -> str | None:
    """The processor that a new cell is measured on, by `hardware`; None if that stage never ran."""
    return read_json(HARDWARE)["fingerprint"]["cpu"] if HARDWARE.exists() else None


def write_json(path: str | Path, record: dict[str, Any]) -> None:
    """Write a record as sorted, indented JSON; equal records give equal bytes.

    Raises:
        InputError: a number is NaN or infinite, which JSON cannot hold (an undefined value is None); the file stays as it was.
    """
    for key, value in _floats(record):
        if not math.isfinite(value):
            raise InputError(f"{path}: {key} is {value}; allowed: finite numbers, or null where a value is undefined.")
    write_text(path, json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n")


def _floats(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every float in a nested record with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _floats(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _floats(item, f"{key}[{index}]")


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: whoever is killed half-way leaves the old file, or none, under the final name.

    Raises:
        InputError: the file cannot be written (no room, no permission, a path below a file).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # same folder, because a rename cannot leave the disk
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror or error}).") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        InputError: the file is missing, or is not a JSON object.
    """
    advice = f"bring it back with `git checkout {path}` or measure it with `dvc repro`"
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {advice}.") from None
    except ValueError:
        raise InputError(f"{path} is not valid JSON; {advice}.") from None
    if not isinstance(record, dict):
        raise InputError(f"{path} holds no JSON object; {advice}.")
    return record
