"""Mutation testing of the core, `make mutants`: which small faults in it would the exact and unit tests not notice?

mutmut writes the mutants and runs the tests, each mutant against those tests that reach its function. This script prepares a copy
for it in .mutants, sums up what it found in notes/mutants.md, and fails where too few were killed or a survivor is not explained
in tests/equivalent_mutants.txt. mutmut leaves decorated functions alone, and here every property and every forward is one;
the copy therefore says `f = decorator(f)` behind the function instead, which is what a decorator means.

Beyond mutmut: whole statements left out, an `if` on a bare name turned round, and whatever stands outside functions (constants,
the defaults of dataclasses).
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import libcst as cst
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / ".mutants"
REPORT = ROOT / "notes" / "mutants.md"
EXPLAINED = ROOT / "tests" / "equivalent_mutants.txt"
MODULES = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mutmut"]["only_mutate"]
# The tests of these modules but for the slow ones; those of the pipeline, the models and the timing say nothing about them.
TESTS = "sampling verify chance cache drafters generate stats details exact_* invariants"
LEAST_KILLED = 0.95
PROCESSES = 2


@dataclass(frozen=True)
class Survivor:
    """A mutant that no test notices: its place, such as `cache.CachedModel.check`, and the lines that set it apart."""

    place: str
    change: tuple[str, ...]  # "- old line", "+ new line", without indentation

    def __str__(self) -> str:
        return "\n".join((self.place, *self.change))


class _DecoratorsAsCalls(cst.CSTTransformer):
    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.FlattenSentinel:
        name, statements = updated_node.name, []
        for decorator in reversed(updated_node.decorators):
            call = cst.Call(decorator.decorator, [cst.Arg(name)])
            statements.append(cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(name)], call)]))
        return cst.FlattenSentinel([updated_node.with_changes(decorators=[]), *statements])


def prepare() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "specdec", COPY / "specdec", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", COPY)  # with mutmut's settings
    for module in MODULES:
        path = COPY / module
        path.write_text(cst.parse_module(path.read_text("utf-8")).visit(_DecoratorsAsCalls()).code, "utf-8")
    (COPY / "tests").mkdir()
    for pattern in ("conftest.py", "laws.py", "stand_ins.py", *(f"test_{name}.py" for name in TESTS.split())):
        for path in (ROOT / "tests").glob(pattern):
            shutil.copy(path, COPY / "tests")


def run_mutmut(chosen: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    mutmut = str(Path(sys.executable).with_name("mutmut"))
    subprocess.run([mutmut, "run", "--max-children", str(PROCESSES), *chosen], cwd=COPY, env=environment, check=True)


def results() -> tuple[dict[str, Counter], list[Survivor]]:
    """How many mutants of each module had which fate, and the survivors. Reads the files that mutmut left in `COPY`."""
    os.chdir(COPY)
    config()
    fates, survivors = {}, []
    for module in MODULES:
        data = SourceFileMutationData(path=Path(module))
        data.load()
        fate_of = {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}
        fates[module] = Counter(fate_of.values())
        for name, fate in fate_of.items():
            if fate not in ("killed", "timeout", "not checked"):
                survivors.append(Survivor(_place(name), _change(get_diff_for_mutant(name, path=data.path))))
    return fates, survivors


def _place(name: str) -> str:
    """cache.CachedModel.check of specdec.cache.xǁCachedModelǁcheck__mutmut_12."""
    function = name.removeprefix("specdec.").partition("__mutmut_")[0]
    return function.replace(".x_", ".").replace(".xǁ", ".").replace("ǁ", ".")


def _change(diff: str) -> tuple[str, ...]:
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++")]
    return tuple(f"{line[0]} {line[1:].strip()}" for line in lines)


def explanations() -> dict[Survivor, str]:
    """The entries of `EXPLAINED`, with an empty line between them: place, old lines, new ones (each a mutant), reason."""
    reasons = {}
    for entry in EXPLAINED.read_text("utf-8").split("\n\n"):
        place, *lines = [line for line in entry.splitlines() if not line.startswith("#")] or [""]
        old = tuple(line for line in lines if line.startswith("- "))
        new = [(line,) for line in lines if line.startswith("+ ")]
        reason = " ".join(lines[len(old) + len(new) :])
        reasons |= {Survivor(place, old + line): reason for line in new or [()] if place}
    return reasons


def report(fates: dict[str, Counter], survivors: list[Survivor], reasons: dict[Survivor, str]) -> str:
    kinds = ["killed", "timeout", "survived", "no tests"]
    kinds += sorted({kind for fate in fates.values() for kind in fate} - set(kinds))
    lines = [
        "# Mutants of the core",
        "",
        "Written by `make mutants`: small faults put into the code, and what the exact and unit tests made of them.",
        "A mutant that runs into its time limit (an endless loop) counts as killed.",
        "",
        "| module | mutants | " + " | ".join(kinds) + " | killed % |",
        "|---|" + "---:|" * (len(kinds) + 2),
    ]
    for module, fate in [*fates.items(), ("all", sum(fates.values(), Counter()))]:
        counts = " | ".join(str(fate[kind]) for kind in kinds)
        lines.append(f"| {module} | {fate.total()} | {counts} | {100 * share_killed(fate):.1f} |")
    lines += ["", "## Survivors", ""]
    for (place, reason), alike in groupby(survivors, lambda s: (s.place, reasons.get(s, "**Not explained.**"))):
        changes = "\n\n".join("\n".join(survivor.change) for survivor in alike)
        lines += [f"`{place}`: {reason}", "", "```diff", changes, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def share_killed(fate: Counter) -> float:
    return (fate["killed"] + fate["timeout"]) / max(1, fate.total())


def main() -> None:
    """Arguments: mutmut's names or patterns of the mutants to run, such as specdec.cache.*; the default is all."""
    chosen = sys.argv[1:]
    prepare()
    run_mutmut(chosen)
    fates, survivors = results()
    reasons = explanations()
    text = report(fates, survivors, reasons)
    print(text)
    if chosen:
        return
    REPORT.write_text(text, "utf-8")
    unexplained = [survivor for survivor in survivors if not reasons.get(survivor)]
    share = share_killed(sum(fates.values(), Counter()))
    for stale in reasons.keys() - set(survivors):
        print(f"No longer a survivor, take it out of {EXPLAINED.name}:\n{stale}\n")
    if unexplained or share < LEAST_KILLED:
        sys.exit(
            f"error: {share:.1%} of the mutants are killed and {len(unexplained)} survivors are not explained in "
            f"{EXPLAINED.name}; allowed: at least {LEAST_KILLED:.0%}, and none"
        )


if __name__ == "__main__":
    main()
