"""What two git revisions measured, machine by machine: `make compare A=hw/one B=hw/other` prints one table.

The results of a machine are a revision of their own (README.md, "Across machines"). Each is read with the study that its own
params.yaml names, and nothing is checked out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline import cells
from pipeline.cli import run
from pipeline.wording import UNKNOWN, Column, Row, interval, number, words
from specdec.errors import InputError

Key = tuple[str, str]  # the kind of cell, and which configuration
SHOWN: tuple[Column, ...] = (
    ("kernels", words("kernels")),
    ("plain tok/s", number("ar_tokens_per_second", 1)),
    ("speculative tok/s", number("spec_tokens_per_second", 1)),
    ("speed-up", interval("speedup")),
    ("c", number("cost_coefficient")),
    ("v", number("verify_cost_ratio")),
)
NEEDED = (
    *("kernels", "ar_tokens_per_second", "spec_tokens_per_second", "speedup", "speedup_lo", "speedup_hi"),
    *("cost_coefficient", "verify_cost_ratio"),
)


@dataclass(frozen=True)
class Results:
    """What a revision holds of its study's timed cells.

    Args:
        machines: the processor, and the accelerator if there was one, that each cell was timed on.
    """

    revision: str
    commit: str
    study: str
    fingerprint: dict[str, Any]
    machines: list[tuple[str, str | None]]
    rows: dict[Key, Row]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print what two git revisions measured, side by side: speeds, speed-up, c and v of every timed configuration."
    )
    parser.add_argument("a", metavar="A", help="a tag, branch or commit with one machine's results, such as hw/one")
    parser.add_argument("b", metavar="B", help="the other's")
    arguments = parser.parse_args()
    print(compared(read(arguments.a), read(arguments.b)))


def read(revision: str) -> Results:
    """
    Raises:
        InputError: there is no such revision, or it holds no study or no timed results.
    """
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise InputError(f"{revision} is no revision here; `git fetch --tags` brings those of other machines.")
    commit = commit.strip()
    study = _study(commit, revision)
    name = str(study["name"])
    found = {key: record for key, path in _declared(study) if (record := _record(commit, path)) is not None}
    rows = dict(_rows(found))
    if not rows:
        raise InputError(
            f"{revision} has no timed results of its study {name}; `make study` takes them, and metrics/ is to be committed."
        )
    hardware = _record(commit, cells.HARDWARE) or {}
    machines = [_machine(record) for record in found.values() if record.get("cpu")]
    return Results(revision, commit, name, hardware.get("fingerprint", {}), machines, rows)


def _git(*arguments: str) -> str | None:
    """What git prints, or None where it refuses."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        raise InputError("git is not installed; results are compared by what git holds.") from None
    if "not a git repository" in done.stderr:
        raise InputError("This folder is no git repository; results are compared by what git holds.")
    if "dubious ownership" in done.stderr:  # git's next lines say what to do about it
        raise InputError(" ".join(done.stderr.split()))
    return done.stdout if done.returncode == 0 else None


def _study(commit: str, revision: str) -> dict[str, Any]:
    """The study of a revision, as it stands there: today's rules may not be those of its params.yaml."""
    try:
        content = YAML(typ="safe").load(_git("show", f"{commit}:./params.yaml") or "")
    except YAMLError:
        content = None
    study = content.get("study") if isinstance(content, dict) else None
    if not isinstance(study, dict) or "name" not in study:
        raise InputError(f"{revision} has no params.yaml that names a study.")
    return study


def _declared(study: Mapping[str, Any]) -> Iterator[tuple[Key, Path]]:
    """Every timed cell of a study, and which one it is; cells that left the study may still be there."""
    name, timed = study["name"], study.get("timed_pairs", [])
    for pair in timed:
        for k in study.get("benchmark_k", []):
            yield ("hf_benchmark", f"{pair}, k = {k}"), cells.hf_benchmark(name, pair, k)
    for pair in study.get("quantized_pairs", []):
        for variant in study.get("kernel_variants", []):
            yield ("quantized_benchmark", f"{pair}, {variant}"), cells.quantized_benchmark(name, pair, variant)
    for pair in timed:
        yield ("cost_curve", pair), cells.cost_curve(name, pair)
    for pair in study.get("comparisons", []):
        yield ("comparison", pair), cells.comparison(name, pair)


def _record(commit: str, path: Path) -> dict[str, Any] | None:
    """A committed JSON object; None where there is none."""
    text = _git("show", f"{commit}:./{path.as_posix()}")
    try:
        record = json.loads(text) if text is not None else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _machine(record: Mapping[str, Any]) -> tuple[str, str | None]:
    return str(record["cpu"]), record.get("device_name") if record.get("device", "cpu") != "cpu" else None


def _rows(found: Mapping[Key, Mapping[str, Any]]) -> Iterator[tuple[Key, Row]]:
    """A row per timed configuration; a key that a cell lacks is unknown."""
    for (kind, name), record in found.items():
        if kind in ("hf_benchmark", "quantized_benchmark"):
            yield (kind, name), {key: record.get(key) for key in NEEDED}
        elif kind == "comparison":
            yield from _contestants(name, record, found.get(("cost_curve", name), {}).get("curves", []))


def _contestants(pair: str, record: Mapping[str, Any], curves: list[dict[str, Any]]) -> Iterator[tuple[Key, Row]]:
    """The drafting ones, each beside plain decoding with its kernels; c and v are those of the pair's T(n)."""
    contestants = {found["name"]: found for found in record.get("contestants", [])}
    for found in contestants.values():
        if found["method"] != "spec":
            continue
        kernels, k = found["kernels"], found["k"]
        plain = contestants.get(f"ar {kernels}", {}).get("tokens_per_second")
        yield (
            ("comparison", f"{pair}, {kernels}, k = {k}"),
            {key: found.get(key) for key in NEEDED}
            | {"ar_tokens_per_second": plain, "spec_tokens_per_second": found["tokens_per_second"]}
            | _costs(curves, kernels, k),
        )


def _costs(curves: list[dict[str, Any]], kernels: str, k: int | str) -> Row:
    """c and v behind the shortest context; of a k that changes from round to round there is no one v."""
    shortest = min((curve["context"] for curve in curves), default=None)
    of = {
        curve["role"]: curve["seconds"]
        for curve in curves
        if (curve["kernels"], curve["context"]) == (kernels, shortest) and curve["seconds"] and curve["seconds"][0]
    }
    target, draft = of.get("target"), of.get("draft")
    v = target[k] / target[0] if target and isinstance(k, int) and k < len(target) and target[k] else None
    return {"cost_coefficient": draft[0] / target[0] if target and draft else None, "verify_cost_ratio": v}


def compared(a: Results, b: Results) -> str:
    """Both machines, then a line of each for every configuration of either."""
    lines = [["cell", "configuration", "", *(heading for heading, _ in SHOWN)]]
    nothing: Row = dict.fromkeys(NEEDED)
    for kind, name in {**a.rows, **b.rows}:
        for side, results in (("A", a), ("B", b)):
            row = results.rows.get((kind, name), nothing)
            texts = [text(row) if row is not nothing else UNKNOWN for _, text in SHOWN]
            lines.append([kind if side == "A" else "", name if side == "A" else "", side, *texts])
    return "\n\n".join(
        [
            described("A", a),
            described("B", b),
            _difference(a.fingerprint, b.fingerprint),
            aligned(lines),
            "c = T_draft(1) / T_target(1), v = T_target(k+1) / T_target(1); of a comparison those of the pair's cost curve. In "
            "brackets, 95 % intervals.",
        ]
    )


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    if not a or not b:
        return "Whether the fingerprints differ is not known: not both revisions hold metrics/hardware.json."
    differ = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    return f"The fingerprints differ in {', '.join(differ)}." if differ else "Both fingerprints are the same."


def described(side: str, results: Results) -> str:
    """The machine of a revision, by its fingerprint and by what its cells say they were timed on."""
    fingerprint = ", ".join(f"{key} {value}" for key, value in sorted(results.fingerprint.items())) or UNKNOWN
    cpus, devices = (
        (list(dict.fromkeys(column)) for column in zip(*results.machines, strict=True))
        if results.machines
        else ([], [])
    )
    timed = f"CPU {' and '.join(cpus) or UNKNOWN}; GPU {' and '.join(d for d in devices if d) or UNKNOWN}"
    lines = [
        f"{side} = {results.revision} ({results.commit[:10]}), study {results.study}",
        f"    fingerprint: {fingerprint}",
        f"    timed on: {timed}",
    ]
    others = [cpu for cpu, _ in results.machines if cpu != results.fingerprint.get("cpu", cpu)]
    if others:
        lines.append(
            f"    {len(others)} of {len(results.machines)} timed cells are not of the fingerprint's processor."
        )
    return "\n".join(lines)


def aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    run(main)
