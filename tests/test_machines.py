"""README.md's procedure for two machines, command by command, in clones of one repository whose machines are made up.

Scripts that measure are replaced by one that brings a cell made beforehand (see fake_cells.py); tables, report, git, make and DVC
are the real ones.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fake_cells
import pytest
from pipeline_copy import PARTS, PipelineCopy, stages_run, with_make
from sync_deps import ROOT, synchronised
from test_plot import SMALLEST

from pipeline import cells, compare
from pipeline.study import Params
from specdec.errors import InputError

PARAMS = (
    SMALLEST.replace("file: prompts.jsonl", "file: pipeline/prompts.jsonl")
    .replace("context_prompts: context", "context_prompts: pipeline/context")
    .replace("[bf16, w8-row-sym-rtn, w4-g64-rtn, w4-g64-gptq, w4-g64-awq, w3-row-rtn]", "[bf16, w4-g64-gptq]")
    .replace("loop_variants: [bf16, w4-g64-gptq]", "loop_variants: [bf16]")
    .replace("kernel_variants: [bf16, w8-row-sym-rtn, w4-g64-gptq]", "kernel_variants: [bf16]")
    .replace("identity_dtypes: [bfloat16, float16]", "identity_dtypes: [bfloat16]")
)
BRING = '''\
"""Brings what this stage's script would have measured on this machine."""

import os
import sys
from pathlib import Path

from pipeline import cells

options = dict(zip(sys.argv[1:], sys.argv[2:]))
out = options.get("--out") or options.get("--json") or str(cells.HARDWARE)
cells.write_text(out, (Path(os.environ["MACHINE"]) / out).read_text(encoding="utf-8"))
'''
DRAW = """\
from pathlib import Path

from pipeline import cells
from pipeline.captions import FIGURES

for name in FIGURES:
    table = Path("plots/fake/hf_benchmark.csv").read_text(encoding="utf-8")
    cells.write_text(f"plots/fake/{name}.svg", f'<svg xmlns="http://www.w3.org/2000/svg"><desc>{table}</desc></svg>')
"""
TIMED = {
    *("toy_benchmark", "hf_benchmark@fake-small_int8-4", "cost_curve@fake-small_int8", "comparison@fake-small_int8"),
    "quantized_benchmark@fake-small_int8-bf16",
}
LAST = {"tables", "plot", "report"}
CPUS = {"A": "Imaginary CPU 9000", "B": "Other CPU 1"}
CELL = cells.hf_benchmark("fake", "small_int8", 4)


def procedure() -> list[list[str]]:
    """The commands of each code block of the section."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Across machines\n")[1].split("\n## ")[0]
    return [block.strip().splitlines() for block in re.findall(r"(?s)```\n(.*?)```", section)]


def measured_on(machine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Every result that the machine would have, in `folder`: the second one is twice as fast and gains nothing."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    params = fake_cells.write(folder, PARAMS)
    fingerprint = {"cpu": CPUS[machine], "device": "cpu", "threads": 2}
    cells.write_json(cells.HARDWARE, {"fingerprint": fingerprint})
    cells.write_json(cells.manifest("small_int8"), {})
    cells.write_json(cells.contexts("few", "small_int8"), {})
    if machine == "B":
        timed = [cells.toy_benchmark(), CELL, cells.quantized_benchmark("fake", "small_int8", "bf16")]
        for path in (*timed, cells.cost_curve("fake", "small_int8"), cells.comparison("fake", "small_int8")):
            fake_cells.edit(path, cpu=CPUS["B"])
        slower = {f"{key}{end}": x for key in ("speedup", "speedup_over_fastest") for end, x in ENDS.items()}
        fake_cells.edit(CELL, ar_tokens_per_second=40.0, spec_tokens_per_second=34.0, **slower)
    return params


ENDS = {"": 0.85, "_lo": 0.8, "_hi": 0.9}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The project with nothing measured, as all clone it."""
    lab = PipelineCopy(tmp_path / "start")
    for part in (*PARTS, "Makefile", "requirements.txt"):
        (lab.root / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, lab.root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, lab.root / part)
    text = (lab.root / "dvc.yaml").read_text(encoding="utf-8")
    for script in set(re.findall(r"python (pipeline/\w+\.py)", text)):
        if Path(script).stem not in ("tables", "report"):
            cells.write_text(lab.root / script, DRAW if Path(script).stem == "plot" else BRING)
    cells.write_text(lab.root / "dvc.yaml", synchronised(text, lab.root))
    cells.write_text(lab.root / "params.yaml", PARAMS)
    cells.write_text(lab.root / "README.md", "# Lab\n")
    cells.write_text(lab.root / "notes" / "about.md", "About.\n")
    lab.git("init", "-q", "-b", "main")
    lab.commit()
    lab.git("clone", "-q", "--bare", ".", str(tmp_path / "origin"))
    return tmp_path / "origin"


def clone(repository: Path, machine: str) -> PipelineCopy:
    """On a machine, with a virtual environment that is this one."""
    root = repository.parent / machine
    subprocess.run(["git", "clone", "-q", str(repository), str(root)], check=True)
    copy = with_make(PipelineCopy(root))
    copy.environment["MACHINE"] = str(repository.parent / f"cells-{machine}")
    return copy


def follow(copy: PipelineCopy, commands: list[str]) -> dict[str, str]:
    """What each command prints."""
    return {command.split("  ")[0]: copy.run("bash", "-c", command).stdout for command in commands}


def test_the_procedure_for_two_machines(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a, on_b, anywhere, on_b_later = procedure()
    for machine in CPUS:
        measured_on(machine, repository.parent / f"cells-{machine}", monkeypatch)
    first = clone(repository, "A")
    assert set(stages_run(follow(first, on_a)["make study"])) > TIMED | LAST

    second = clone(repository, "B")
    printed = follow(second, on_b[:1])["make study"]
    assert set(stages_run(printed)) == {"hardware"} | TIMED | LAST
    assert f"{len(TIMED)} cells measured now on this machine" in printed
    changed = {line[3:] for line in second.git("status", "--porcelain").splitlines()}
    assert {path for path in changed if path.startswith("metrics/")} == {
        str(path) for path in (*timed_cells(), cells.HARDWARE)
    }
    follow(second, on_b[1:])

    printed_by = follow(first, anywhere)
    compared, metrics, params, plots = list(printed_by.values())[1:]
    check_comparison(compared)
    assert re.search(rf"{CELL} +speedup +\S+ +0\.85 ", metrics) and re.search(
        rf"{CELL} +ar_tokens_per_second +20\.0 +40\.0 +20\.0", metrics
    )
    assert "sweep" not in metrics, "acceptance was not measured again"
    assert re.search(rf"metrics/hardware\.json +fingerprint\.cpu +{CPUS['A']} +{CPUS['B']}", params)
    page = Path(plots.strip().removeprefix("file://"))
    drawn = page.read_text(encoding="utf-8")
    assert '"rev": "hw/A"' in drawn and '"rev": "hw/B"' in drawn and "Speed-up over plain decoding" in drawn
    assert {f"hw_{machine}_plots_fake_speedup.svg" for machine in CPUS} <= {
        path.name for path in page.parent.rglob("*.svg")
    }

    assert first.git("rev-parse", "main") == first.git("rev-parse", "hw/A"), "the other machine left main as it was"
    first.replace("params.yaml", "auto],\n     expected_alpha: 0.8", "auto],\n     expected_alpha: 0.7")
    first.git("commit", "-qam", "Another parameter")
    first.git("push", "-q", "origin", "main")
    printed = follow(second, on_b_later)["make study"]
    assert set(stages_run(printed)) == {"hardware", "comparison@fake-small_int8"}
    assert second.git("merge-base", "hw/B", "origin/main") == second.git("rev-parse", "origin/main")
    assert cells.read_json(second.root / CELL)["cpu"] == CPUS["B"]


def timed_cells() -> list[Path]:
    quantized = cells.quantized_benchmark("fake", "small_int8", "bf16")
    others = [function("fake", "small_int8") for function in (cells.cost_curve, cells.comparison)]
    return [cells.toy_benchmark(), CELL, quantized, *others]


def check_comparison(printed: str) -> None:
    for side, cpu in CPUS.items():
        assert re.search(
            rf"(?m)^{side} = hw/{side} \([0-9a-f]{{10}}\), study fake\n    fingerprint: cpu {cpu}, ", printed
        )
        assert f"    timed on: CPU {cpu}; GPU –" in printed
    assert "The fingerprints differ in cpu." in printed and "not of the fingerprint" not in printed
    found = re.search(r"(?m)^hf_benchmark +small_int8, k = 4 +(A.*)\n +(B.*)$", printed)
    assert found and found[1].split()[:3] == ["A", "default", "20.0"]
    assert found[2].split() == ["B", "default", "40.0", "34.0", "0.85", "[0.80,", "0.90]", "0.45", "1.25"]


# What cannot be compared


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineCopy:
    """A repository with the results of one machine, tagged hw/A, and without any, tagged empty and bare."""
    params = measured_on("A", tmp_path / "lab", monkeypatch)
    lab = PipelineCopy(tmp_path / "lab")
    assert params.study.name == "fake"
    lab.git("init", "-q", "-b", "main")
    cells.write_text("other", "")
    for tag, files in {"bare": ["other"], "empty": ["params.yaml"], "hw/A": ["metrics"]}.items():
        lab.git("add", *files)
        lab.git("commit", "-qm", tag)
        lab.git("tag", tag)
    return lab


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("hw/none", "^hw/none is no revision here; `git fetch --tags` brings those of other machines.$"),
        ("--all", "^--all is no revision here"),
        ("bare", "^bare has no params.yaml that names a study.$"),
        ("empty", "^empty has no timed results of its study fake; `make study` takes them, and metrics/ is to be committed.$"),
    ],
)  # fmt: skip
def test_a_revision_without_results_is_named(history: PipelineCopy, revision: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare.read(revision)


def test_without_git_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no git repository"):
        compare.read("main")


def test_a_repository_of_somebody_else_is_told_in_gits_words(
    history: PipelineCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(InputError, match=r"dubious ownership.*safe\.directory"):
        compare.read("main")


def test_without_a_fingerprint_nothing_is_said_of_a_difference(history: PipelineCopy) -> None:
    history.git("rm", "-q", "--cached", str(cells.HARDWARE))
    history.git("commit", "-qm", "without")
    for other in ("hw/A", "main"):
        assert "Whether the fingerprints differ is not known" in compare.compared(
            compare.read("main"), compare.read(other)
        )


def commit(lab: PipelineCopy, **values: Any) -> compare.Results:
    """The results with other values in one timed cell."""
    fake_cells.edit(CELL, **values)
    lab.git("commit", "-qam", "changed")
    return compare.read("main")


def test_an_accelerator_is_named(history: PipelineCopy) -> None:
    other = commit(history, device="cuda", device_name="Imaginary GPU 7")
    assert "; GPU Imaginary GPU 7\n" in compare.compared(compare.read("hw/A"), other)


def test_cells_of_another_processor_are_told(history: PipelineCopy) -> None:
    text = compare.described("B", commit(history, cpu="Third CPU"))
    assert "timed on: CPU Third CPU and Imaginary CPU 9000;" in text
    assert "1 of 4 timed cells are not of the fingerprint's processor." in text


def test_a_configuration_of_one_side_has_dashes_on_the_other(history: PipelineCopy) -> None:
    history.git("rm", "-q", "--cached", str(CELL))
    history.git("commit", "-qm", "without")
    text = compare.compared(compare.read("main"), compare.read("hw/A"))
    found = re.search(r"(?m)^hf_benchmark +small_int8, k = 4 +(A.*)\n +(B.*)$", text)
    assert found and found[1].split() == ["A", *["–"] * 6] and "–" not in found[2]
    assert "Both fingerprints are the same." in text


def test_costs_of_a_comparison_are_those_of_the_curve(history: PipelineCopy) -> None:
    """T(n) = T(1) + (n − 1) · T(1) / 10, as fake_cells.py makes it; what a k chosen on the way costs has no one v."""
    rows = compare.read("hw/A").rows
    row = rows["comparison", "small_int8, packed, k = 8"]
    assert (row["cost_coefficient"], row["verify_cost_ratio"]) == (
        pytest.approx(fake_cells.C["small_int8"]),
        pytest.approx(1.8, abs=0.01),
    )
    assert row["ar_tokens_per_second"] == 30.0 and row["spec_tokens_per_second"] == pytest.approx(33.0)
    assert rows["comparison", "small_int8, packed, k = auto"]["verify_cost_ratio"] is None
