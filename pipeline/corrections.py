"""The measurements in notes/corrections.md: what the original write-up says, held against the default study's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pipeline import cells
from pipeline.attribution_report import place_for_speculation
from pipeline.cost_report import cost_machine
from pipeline.results import read_table, study_folder
from pipeline.wording import PAIR, Column, K, Row, interval, markdown, number, words
from specdec.stats import bootstrap_interval, ratio, ratio_of_sums
from specdec.theory import break_even_alpha, expected_tokens_per_round, iid_acceptance_length

STUDY = "embedded"

Cell = dict[str, Any]
# target, draft, backend, "α (accept rate)", accepted/round, speed-up, as the original write-up has them; k = 4
ORIGINAL = (
    ("gpt2-large", "distilgpt2", "MPS", 0.710, 2.84, 1.80),
    ("gpt2-medium", "distilgpt2", "MPS", 0.642, 2.46, 1.71),
    ("gpt2-large", "gpt2", "MPS", 0.841, 3.36, 1.13),
    ("gpt2", "distilgpt2", "MPS", 0.781, 3.00, 0.88),
    ("gpt2-medium", "distilgpt2", "CPU", 0.612, 2.31, 0.70),
)
ORIGINAL_K = 4
DEPTHS = (1, 2, 4, 8)


def measured() -> str:
    """The note's tables, from the default study's committed results."""
    folder = study_folder(STUDY)
    sweeps, costs = sweeps_over_k(), read_table(folder, "cost_curve")
    blocks = [
        "**Table 1.** What the original's own rows imply.",
        implied(),
        "**Table 2.** Two acceptance numbers, at the largest k.",
        two_numbers(sweeps),
        "**Table 3.** Acceptance rate against k, and acceptance by depth.",
        by_depth(sweeps),
        "**Table 4.** τ over the geometric form, at the largest k.",
        geometric(sweeps),
        "**Table 5.** What bounds a pass on this CPU.",
        cost_machine(costs),
        place_for_speculation(costs),
    ]
    return "\n\n".join(blocks)


def sweeps_over_k() -> dict[str, dict[int, Cell]]:
    """By pair and k the cells of the sweeps over k, those of the toy pair last.

    Left out are pairs without k = 1, and those that never drafted.
    """
    found: dict[str, dict[int, Cell]] = {}
    table = read_table(study_folder(STUDY), "sweep_k")
    for pair, k in zip(table["pair"], table["k"], strict=True):
        found.setdefault(pair, {})[k] = cells.read_json(cells.sweep_k(STUDY, pair, k))
    toy = read_table(study_folder(STUDY), "toy_k")
    found["toy"] = {k: cells.read_json(cells.toy_k(k)) for k in toy["k"]}
    return {
        pair: by_k
        for pair, by_k in found.items()
        if 1 in by_k and all(by_k[k]["alpha"] is not None for k in (1, max(by_k)))
    }


def implied() -> str:
    """Of each of the original's rows: τ, what the formula makes of its "α", the α that gives τ, and the cost of a round."""
    columns: list[Column] = [
        ("target", words("target")),
        ("draft", words("draft")),
        ("backend", words("backend")),
        ('"α"', number("rate", 3)),
        ("accepted / round", number("accepted")),
        ("τ", number("tau")),
        ('formula at "α"', number("wrong")),
        ("α that gives τ", number("alpha", 3)),
        ("speed-up", number("speedup")),
        ("steps a round", number("cost")),
    ]
    table = pd.DataFrame(ORIGINAL, columns=["target", "draft", "backend", "rate", "accepted", "speedup"])
    table["tau"] = 1 + table["accepted"]
    table["wrong"] = [expected_tokens_per_round(rate, ORIGINAL_K) for rate in table["rate"]]
    table["alpha"] = [break_even_alpha(ORIGINAL_K, 0.0, tau) for tau in table["tau"]]  # E(α, k) = τ
    table["cost"] = table["tau"] / table["speedup"]
    return markdown(table, columns)


def two_numbers(sweeps: dict[str, dict[int, Cell]]) -> str:
    columns: list[Column] = [
        PAIR,
        K,
        ("accepted", number("accepted", 0)),
        ("proposed", number("proposed", 0)),
        ("tested", number("tested", 0)),
        ("acceptance rate", interval("draft_acceptance_rate", 3)),
        ("α", interval("alpha", 3)),
        ("τ", interval("mean_acceptance_length")),
        ("formula at α", number("iid_acceptance_length")),
        ("formula at the rate", number("wrong")),
        ("1 + k̄ × rate", number("linear_rate")),
        ("1 + k̄ × α", number("linear_alpha")),
    ]
    rows: list[Row] = []
    for pair, by_k in sweeps.items():
        cell = by_k[max(by_k)]
        rate, drafted = cell["draft_acceptance_rate"], [n for counts in prompts(cell) for n in counts.drafted]
        proposed = cell["proposed"] / cell["rounds"]
        added = {
            "wrong": iid_acceptance_length(rate, drafted),
            "linear_rate": 1 + proposed * rate,
            "linear_alpha": 1 + proposed * cell["alpha"],
        }
        rows.append({**cell, **added, "pair": pair})
    return markdown(pd.DataFrame(rows), columns)


def by_depth(sweeps: dict[str, dict[int, Cell]]) -> str:
    columns: list[Column] = [
        PAIR,
        ("rate at k = 1", number("first", 3)),
        ("largest k", number("k", 0)),
        ("rate there", number("draft_acceptance_rate", 3)),
        ("the same at a constant α", number("constant", 3)),
        *((f"depth {depth}", words(f"depth_{depth}")) for depth in DEPTHS),
    ]
    rows: list[Row] = []
    for pair, by_k in sweeps.items():
        one, cell = by_k[1], by_k[max(by_k)]
        drafted = [n for counts in prompts(cell) for n in counts.drafted]
        tau = iid_acceptance_length(one["alpha"], drafted)
        constant = None if tau is None else ratio(tau - 1, cell["mean_drafted_per_round"])
        added = {"first": one["draft_acceptance_rate"], "constant": constant}
        rows.append({**cell, **added, **{f"depth_{depth}": at_depth(cell, depth) for depth in DEPTHS}, "pair": pair})
    return markdown(pd.DataFrame(rows), columns)


def at_depth(cell: Cell, depth: int) -> str | None:
    """P(accepted given that all before it were), its interval, and how many tokens were tested there."""
    tested = cell["tested_per_position"]
    if len(tested) < depth:
        return None
    key = "conditional_acceptance_per_position"
    row = {f"{key}{end}": cell[f"{key}{end}"][depth - 1] for end in ("", "_lo", "_hi")}
    return f"{interval(key, 3)(row)} of {tested[depth - 1]}"


def geometric(sweeps: dict[str, dict[int, Cell]]) -> str:
    columns: list[Column] = [
        PAIR,
        K,
        ("τ", number("mean_acceptance_length")),
        ("τ over the form at α of k = 1", interval("of_one", 3)),
        ("τ over the form at the counted α", interval("own", 3)),
    ]
    rows: list[Row] = []
    for pair, by_k in sweeps.items():
        one, cell = prompts(by_k[1]), by_k[max(by_k)]
        own = prompts(cell)
        row = {**cell, "pair": pair}
        for key, of_alpha in (("of_one", one), ("own", own)):
            units = list(zip(of_alpha, own, strict=True))
            low, high = bootstrap_interval(units, over_geometric)
            row |= {key: over_geometric(units), f"{key}_lo": low, f"{key}_hi": high}
        rows.append(row)
    return markdown(pd.DataFrame(rows), columns)


@dataclass(frozen=True)
class Counts:
    """Of one prompt: its tokens, what each round drafted, and its draft tokens that were accepted and tested."""

    emitted: int
    drafted: list[int]
    accepted: int
    tested: int


def prompts(cell: Cell) -> list[Counts]:
    """The prompts of a cell with token verification, which tests what it accepts and the first token that it does not."""
    return [
        Counts(
            sum(prompt["per_round_emitted"]),
            prompt["per_round_drafted"],
            sum(prompt["per_round_accepted"]),
            sum(min(a + 1, n) for a, n in zip(prompt["per_round_accepted"], prompt["per_round_proposed"], strict=True)),
        )
        for prompt in cell["per_prompt"]
    ]


def over_geometric(units: Sequence[tuple[Counts, Counts]]) -> float | None:
    """τ over the mean over rounds of (1 − α^(k_r+1)) / (1 − α).

    Args:
        units: of each prompt what α is counted from, and what τ and k_r are.
    """
    alpha = ratio_of_sums([(counts.accepted, counts.tested) for counts, _ in units])
    drafted = [n for _, counts in units for n in counts.drafted]
    expected = None if alpha is None else iid_acceptance_length(alpha, drafted)
    tau = ratio(sum(counts.emitted for _, counts in units), len(drafted))
    return None if tau is None or expected is None else ratio(tau, expected)
