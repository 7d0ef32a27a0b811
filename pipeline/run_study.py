"""`dvc repro`, then the results and one line on where they come from. `make study` and `make measure` call this."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pipeline import cells, notes
from pipeline.cli import run
from pipeline.markers import fill
from pipeline.report import readme_part
from pipeline.results import study_folder
from pipeline.study import Params, load_params

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the study of params.yaml and print its results; only cells that are out of date are measured."
    )
    parser.add_argument("--measure", action="store_true", help="measure every cell of the study anew on this machine")
    parser.add_argument("dvc_args", nargs="*", metavar="ARGUMENT", help="passed on to `dvc repro`, after a --")
    arguments = parser.parse_args()
    params = load_params()
    # --no-run-cache, because DVC would otherwise restore an earlier result for the same inputs instead of measuring.
    force = ["--force", "--no-run-cache"] if arguments.measure else []
    code, ran = repro([*force, *arguments.dvc_args])
    if code != 0:
        return code
    folder = study_folder(params.study.name)
    report = folder / "report.md"
    print(f"\n{readme_part(report.read_text(encoding='utf-8'))}\n")
    print(f"All tables and figures: {report}, and {folder / 'report.html'} for a browser.")
    print(provenance(study_cells(params), ran))
    update_readme(Path("README.md"), report)
    if params.study.name == notes.STUDY:
        notes.update()
    return 0


def repro(arguments: list[str]) -> tuple[int, set[str]]:
    """Run `dvc repro`, its output passed through as it comes; gives its exit code and the stages that it ran."""
    # Stages call plain `python`, which must be the one that runs this; a pipe must not hold their output back.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    ran = set()
    # stderr stays the terminal itself, so progress bars work.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, encoding="utf-8", errors="replace") as dvc:
        assert dvc.stdout is not None
        try:
            for line in dvc.stdout:
                print(line, end="", flush=True)
                if match := re.fullmatch(r"Running stage '(.+)':\s*", line):
                    ran.add(match[1])
        except KeyboardInterrupt:
            pass  # Ctrl-C reaches DVC as well, which ends its stage and says so; leaving first would orphan them
        return dvc.wait(), ran


def study_cells(params: Params) -> dict[str, Path]:
    """Every measured cell of the study, as {DVC's name of its stage: file}."""
    study = params.study
    found = {"toy_benchmark": cells.toy_benchmark()}
    found |= {f"toy_sweep_k@{k}": cells.toy_k(k) for k in params.toy.k}
    found |= {f"toy_sweep_temperature@{t}": cells.toy_temperature(t) for t in params.toy.temperature}
    for pair in study.pairs:
        prefix = f"{study.name}-{pair}"
        found |= {f"sweep_k@{prefix}-{k}": cells.sweep_k(study.name, pair, k) for k in study.k}
        found |= {
            f"sweep_temperature@{prefix}-{t}": cells.sweep_temperature(study.name, pair, t) for t in study.temperature
        }
    for pair in study.timed_pairs:
        prefix = f"{study.name}-{pair}"
        found |= {f"hf_benchmark@{prefix}-{k}": cells.hf_benchmark(study.name, pair, k) for k in study.benchmark_k}
        found[f"cost_curve@{prefix}"] = cells.cost_curve(study.name, pair)
    found |= {f"comparison@{study.name}-{pair}": cells.comparison(study.name, pair) for pair in study.comparisons}
    found |= {f"llama_cpp@{study.name}-{pair}": cells.llama_cpp(study.name, pair) for pair in study.llama_cpp_pairs}
    for pair in study.detail_pairs:
        prefix = f"{study.name}-{pair}"
        found |= {f"sweep_block@{prefix}-{t}": cells.sweep_block(study.name, pair, t) for t in study.temperature}
        found |= {
            f"sweep_confidence@{prefix}-{c}": cells.sweep_confidence(study.name, pair, c) for c in study.confidence
        }
        found |= {
            f"greedy_identity@{prefix}-{d}": cells.greedy_identity(study.name, pair, d) for d in study.identity_dtypes
        }
    for pair in study.quantized_pairs:
        prefix = f"{study.contexts}-{pair}"
        found |= {
            f"quantized_alpha@{prefix}-{v}": cells.quantized_alpha(study.contexts, pair, v) for v in study.variants
        }
        found |= {
            f"quantized_loop@{prefix}-{v}": cells.quantized_loop(study.contexts, pair, v) for v in study.loop_variants
        }
        found |= {
            f"quantized_benchmark@{study.name}-{pair}-{v}": cells.quantized_benchmark(study.name, pair, v)
            for v in study.kernel_variants
        }
    return found


def provenance(cells_by_stage: dict[str, Path], ran: Iterable[str]) -> str:
    """One line: how many cells were measured in this run, how many came from earlier ones, and on which processor those ran."""
    measured = cells_by_stage.keys() & set(ran)
    old = [path for stage, path in cells_by_stage.items() if stage not in measured]
    line = f"{len(measured)} cells measured now on this machine; {len(old)} from committed results"
    cpus = sorted({cpu for path in old if (cpu := cells.read_json(path).get("cpu"))})
    return f"{line}, measured on CPU {' and '.join(cpus)}" if cpus else line


def update_readme(readme: Path, report: Path) -> None:
    """Put the report's part for it between README.md's two markers, if it is the default study's and not there already.

    Raises:
        InputError: there is no README, or it has not exactly one pair of markers.
    """
    if report.parent.name != "embedded":
        return
    fill(readme, BEGIN, END, readme_part(report.read_text(encoding="utf-8")))


if __name__ == "__main__":
    run(main)
