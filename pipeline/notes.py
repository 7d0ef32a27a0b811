"""The measurements that notes quote, from the default study's committed results.

    python pipeline/notes.py

`make study` does the same after the default study. Each note has one place for them, between two markers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from pipeline import cells
from pipeline.attribution_report import place_for_speculation
from pipeline.cli import run
from pipeline.comparison_report import comparison_findings, comparison_table
from pipeline.corrections import STUDY, measured
from pipeline.cost_report import cost_curves, cost_machine
from pipeline.llama_cpp_report import llama_cpp_section
from pipeline.markers import fill
from pipeline.results import read_table, study_folder
from pipeline.wording import interval, markdown, number, words

LLAMA_CPP_PAIR = "smollm2-135m_int4"
QUANTISED = ("int4", "int8", "bf16")
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def main() -> None:
    argparse.ArgumentParser(description="Write what was measured into the notes, between their markers.").parse_args()
    update()


def update() -> None:
    """Put the measurements into each note, if they are not there already."""
    for path, text in TEXTS.items():
        fill(path, BEGIN, END, text())


def on_a_cpu() -> str:
    """Of notes/cpu.md: kernels, k and baselines in one run, and T(n)."""
    folder = study_folder(STUDY)
    compared, costs = read_table(folder, "comparison"), read_table(folder, "cost_curve")
    ours = [comparison_table(compared), comparison_findings(compared)]
    passes = [cost_machine(costs), cost_curves(costs), place_for_speculation(costs)]
    return "\n\n".join([*ours, *passes, *beside_llama_cpp()])


def beside_llama_cpp() -> list[str]:
    """Blocks of text on the cell of study `llama_cpp`; none where it was not measured, which the default study does not need."""
    path = cells.llama_cpp("llama_cpp", LLAMA_CPP_PAIR)
    return llama_cpp_section(pd.DataFrame([cells.read_json(path)]))[1:] if path.exists() else []


def of_quantised_drafts() -> str:
    """Of notes/quantised-drafts.md: the speed of those that kernels read."""
    folder = study_folder(STUDY)
    tables = [read_table(folder, name) for name in ("hf_benchmark", "quantized_benchmark")]
    copies = tables[0][tables[0]["draft"].isin(QUANTISED)]  # not the models that a user's own pairs draft with
    timed = pd.concat([copies.assign(variant=None), tables[1]]).sort_values("speedup", ascending=False)
    return markdown(
        timed,
        [
            ("draft", lambda row: row["variant"] or row["draft"]),
            ("kernels", words("kernels")),
            ("k", number("k", 0)),
            ("c", number("cost_coefficient")),
            ("α", number("alpha")),
            ("τ", number("mean_acceptance_length")),
            ("over plain decoding", interval("speedup")),
        ],
    )


TEXTS: dict[Path, Callable[[], str]] = {
    Path("notes/corrections.md"): measured,
    Path("notes/cpu.md"): on_a_cpu,
    Path("notes/quantised-drafts.md"): of_quantised_drafts,
}


if __name__ == "__main__":
    run(main)
