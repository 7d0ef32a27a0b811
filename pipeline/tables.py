"""Stage `tables`: gather the cells that the study declares, and no others, into one CSV per question.

DVC never deletes the cells of a value that left params.yaml, so what lies in metrics/ does not say what belongs to the study.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline import cells
from pipeline import prompt_tables as inside
from pipeline import quantized_tables as quantized
from pipeline.cli import run
from pipeline.results import study_folder, write_table
from pipeline.study import Params, load_params
from specdec.errors import InputError
from specdec.theory import iid_acceptance_length

Record = dict[str, Any]


def _with_interval(*keys: str) -> tuple[str, ...]:
    return tuple(f"{key}{end}" for key in keys for end in ("", "_lo", "_hi"))


# What the figures and the report read; a table shows these first, then whatever else its cells hold.
COUNTED = (
    *("pair", "target", "draft", "k", "temperature", "verifier", "prompts", "max_new_tokens"),
    *("rounds", "proposed", "accepted", "tested"),
    *("mean_drafted_per_round", "mean_accepted_per_round", "iid_acceptance_length"),
    *_with_interval("draft_acceptance_rate", "alpha", "alpha_overlap", "mean_acceptance_length"),
)
# Timed cells run the verifiers themselves, and so know nothing of what both would have accepted.
ACCEPTANCE = (
    *COUNTED,
    *("confidence_threshold", "expected_emitted_token", "expected_emitted_block"),
    *_with_interval("block_gain"),
)
BENCHMARK = (
    *COUNTED,
    *(
        "target_parameters",
        "draft_parameters",
        "device",
        "device_name",
        "dtype",
        "threads",
        "kernels",
        "torch",
        "transformers",
        "runs",
    ),
    *("ar_tokens_per_second", "spec_tokens_per_second", "hf_tokens_per_second", "fastest_baseline"),
    "hf_assisted_tokens_per_second",
    *_with_interval("speedup", "speedup_over_fastest", "speedup_end_to_end", "speedup_over_hf_assisted"),
    *_with_interval("ar_over_hf", "noise_floor"),
    *("predicted_speedup", "ideal_speedup", "iid_factor", "verify_cost_factor", "overhead_factor"),
    *("cost_coefficient", "verify_cost_ratio", "peak_memory_bytes"),
    *("identical", "identical_prompts", "hf_identical_prompts", "hf_assisted_identical_prompts", "unrepeatable_runs"),
)
# Of a curve T(n), and of the cell that holds it; each row of the table is one n of one curve.
CURVE = ("role", "model", "kernels", "context")
CURVE_LISTS = (*_with_interval("seconds"), "roof_seconds")
CURVE_CELL = (
    *("cpu", "device", "device_name", "dtype", "draft_dtype", "threads", "torch", "transformers", "runs"),
    *("target_weight_bytes", "draft_weight_bytes", "bytes_per_second", "operations_per_second"),
)
# Of a comparison: of each contestant, and of the cell that holds them; each row of the table is one contestant.
CONTESTANT = (
    *("name", "method", "kernels", "k", "tokens_per_second", "end_to_end_tokens_per_second"),
    *("alpha", "mean_acceptance_length", "mean_drafted_per_round"),
    *_with_interval("speedup", "speedup_over_fastest", "speedup_over_hf", "speedup_over_hf_assisted"),
    *("predicted_speedup", *_with_interval("measured_over_predicted")),
    *("identical", "identical_prompts", "ties", "unrepeatable_runs"),
)
COMPARISON = (
    *("pair", "target", "draft", "fastest_plain", "fastest_speculative", "best_over_same_kernels", "best_fixed_k"),
    *_with_interval("auto_over_best_fixed_k", "ar_over_hf", "noise_floor"),
    *("prompts", "max_new_tokens", "temperature", "top_k", "top_p", "verifier", "runs", "cpu", "device", "device_name"),
    *("dtype", "draft_dtype", "threads", "torch", "transformers", "peak_memory_bytes"),
)
LLAMA_CPP = (
    *BENCHMARK,
    *("target_seconds_1", "target_seconds_k1", "llama_cpp_seconds_1", "llama_cpp_seconds_5"),
    *("llama_cpp_tokens_per_second", "llama_cpp_end_to_end_tokens_per_second"),
    *_with_interval("ar_over_llama_cpp", "spec_over_llama_cpp", "hf_over_llama_cpp"),
    *("llama_cpp_identical_prompts", "llama_cpp_ties", "llama_cpp_logit_error"),
    *("llama_cpp_python", "llama_cpp_gguf_sha256", "cpu"),
)
QUANTIZED_BENCHMARK = (*BENCHMARK, *quantized.TIMED)
IDENTITY = (
    *("pair", "target", "draft", "k", "dtype", "prompts", "max_new_tokens", "new_tokens"),
    *("identical_prompts", "near_ties", "faults", "limit_ulps", "largest_gap", "largest_ulps"),
    *("share_within_limit", "largest_emitted_ulps"),
)
TOY_LIMITS = ("argmax_agreement", "limit_high_temperature")
# Columns of the position tables, and the cell's list behind each.
POSITION_LISTS = {
    **{key: key for key in _with_interval("acceptance_per_position", "conditional_acceptance_per_position")},
    "proposed": "proposed_per_position",
    "tested": "tested_per_position",
}


def main() -> None:
    argparse.ArgumentParser(
        description="Gather the cells of params.yaml's study into the CSV files of plots/<study>/."
    ).parse_args()
    params = load_params()
    folder = study_folder(params.study.name)
    tables = gather(params)  # all of them first: a missing cell must not leave half of the tables renewed
    for name, table in tables.items():
        write_table(folder, name, table)


def gather(params: Params) -> dict[str, pd.DataFrame]:
    """Every table of the study by name.

    Raises:
        InputError: a cell is missing, or lacks a key that a table needs.
    """
    study, pairs, timed = params.study.name, params.study.pairs, params.study.timed_pairs
    with_lists = (*ACCEPTANCE, *POSITION_LISTS.values())
    sweep = [cells.sweep_k(study, pair, k) for pair in pairs for k in params.study.k]
    toy_sweep = [cells.toy_k(k) for k in params.toy.k]
    by_k = _with_geometric_form(sweep, _read(sweep, (*with_lists, "per_prompt")))
    by_temperature = [cells.sweep_temperature(study, pair, t) for pair in pairs for t in params.study.temperature]
    benchmarks = [cells.hf_benchmark(study, pair, k) for pair in timed for k in params.study.benchmark_k]
    drafted_by_model = params.study.detail_pairs
    by_block = [cells.sweep_block(study, pair, t) for pair in drafted_by_model for t in params.study.temperature]
    by_confidence = [
        cells.sweep_confidence(study, pair, c) for pair in drafted_by_model for c in params.study.confidence
    ]
    by_dtype = [
        cells.greedy_identity(study, pair, d) for pair in drafted_by_model for d in params.study.identity_dtypes
    ]
    toy_by_k = _with_geometric_form(toy_sweep, _read(toy_sweep, (*with_lists, "per_prompt")))
    toy_by_temperature = _read([cells.toy_temperature(t) for t in params.toy.temperature], (*ACCEPTANCE, *TOY_LIMITS))
    by_category = [cells.sweep_k(study, pair, k) for pair in pairs for k in _timed_k(params)]
    compared = [cells.comparison(study, pair) for pair in params.study.comparisons]
    return {
        "sweep_k": _table(by_k, ACCEPTANCE),
        "sweep_temperature": _table(_read(by_temperature, ACCEPTANCE), ACCEPTANCE),
        "sweep_block": _table(_read(by_block, ACCEPTANCE), ACCEPTANCE),
        "sweep_confidence": _table(_read(by_confidence, ACCEPTANCE), ACCEPTANCE),
        "greedy_identity": _table(_read(by_dtype, IDENTITY), IDENTITY),
        "acceptance_per_position": _positions(by_k),
        "hf_benchmark": _table(_read(benchmarks, BENCHMARK), BENCHMARK),
        "cost_curve": _curves([cells.cost_curve(study, pair) for pair in timed]),
        "comparison": _contestants(compared),
        "acceptance_by_category": _inside(by_category, inside.acceptance_by_category, inside.ACCEPTANCE_BY_CATEGORY),
        "accepted_per_round": _inside(sweep, inside.round_rows, inside.ROUNDS),
        "speedup_by_category": _inside(benchmarks, inside.speedup_by_category, inside.SPEEDUP_BY_CATEGORY),
        "speedup_by_k": _table(_speedup_by_k(params, benchmarks, compared), inside.SPEEDUP_BY_K),
        "llama_cpp": _table(
            _read([cells.llama_cpp(study, p) for p in params.study.llama_cpp_pairs], LLAMA_CPP), LLAMA_CPP
        ),
        "quantized_alpha": _table(_quantized_alpha(params), quantized.ALPHA),
        "quantized_contrasts": _table(_quantized_contrasts(params), quantized.CONTRASTS),
        "quantized_by_category": _inside(_loop_alpha(params), quantized.category_rows, quantized.BY_CATEGORY),
        "quantized_loop": _table(_quantized_loop(params), quantized.LOOP),
        "quantized_benchmark": _table(_quantized_benchmark(params), (*QUANTIZED_BENCHMARK, *quantized.ALPHA_NEEDED)),
        "toy_k": _table(toy_by_k, ACCEPTANCE),
        "toy_temperature": _table(toy_by_temperature, (*ACCEPTANCE, *TOY_LIMITS)),
        "toy_acceptance_per_position": _positions(toy_by_k),
        "toy_benchmark": _table(_read([cells.toy_benchmark()], BENCHMARK), BENCHMARK),
    }


def _timed_k(params: Params) -> list[int]:
    """The k of the sweep at which speed was measured too, or its largest."""
    return [k for k in params.study.k if k in params.study.benchmark_k] or [max(params.study.k)]


def _quantized_alpha(params: Params) -> list[Record]:
    rows = []
    for pair in params.study.quantized_pairs:
        for variant in params.study.variants:
            path = cells.quantized_alpha(params.study.contexts, pair, variant)
            record = cells.read_json(path)
            with _keys_of(path):
                rows += quantized.alpha_rows(record)
    return rows


def _loop_alpha(params: Params) -> list[Path]:
    """The α cells of the few variants that are decoded with as well."""
    study = params.study
    return [
        cells.quantized_alpha(study.contexts, pair, variant)
        for pair in study.quantized_pairs
        for variant in study.loop_variants
    ]


def _quantized_contrasts(params: Params) -> list[Record]:
    rows = []
    for pair in params.study.quantized_pairs:
        paths = [cells.quantized_alpha(params.study.contexts, pair, variant) for variant in params.study.variants]
        records, changed = [cells.read_json(path) for path in paths], []
        for path, record in zip(paths, records, strict=True):
            with _keys_of(path):
                if record["contexts_sha256"] != records[0]["contexts_sha256"]:
                    raise InputError(
                        f"{path} and {paths[0]} were measured behind other texts; `dvc repro` measures them anew."
                    )
                changed.append(quantized.changes(record))
        rows += quantized.contrast_rows(records, changed)
    return rows


def _quantized_loop(params: Params) -> list[Record]:
    rows = []
    for pair in params.study.quantized_pairs:
        for variant in params.study.loop_variants:
            path = cells.quantized_loop(params.study.contexts, pair, variant)
            of_contexts = cells.quantized_alpha(params.study.contexts, pair, variant)
            record, behind_contexts = cells.read_json(path), cells.read_json(of_contexts)
            with _keys_of(path):
                temperatures = record["temperatures"]
            with _keys_of(of_contexts):
                forced = quantized.forced(behind_contexts, temperatures)
            with _keys_of(path):
                rows += quantized.loop_rows(record, forced)
    return rows


def _quantized_benchmark(params: Params) -> list[Record]:
    name, pairs = params.study.name, params.study.quantized_pairs
    paths = [cells.quantized_benchmark(name, pair, v) for pair in pairs for v in params.study.kernel_variants]
    return quantized.with_alpha_needed(_read(paths, QUANTIZED_BENCHMARK))


def _read(paths: Sequence[Path], needed: Sequence[str]) -> list[Record]:
    records = []
    for path in paths:
        record = cells.read_json(path)
        missing = next((key for key in needed if key not in record), None)
        if missing is not None:
            raise InputError(_lacks(path, missing))
        records.append(record)
    return records


def _with_geometric_form(paths: Sequence[Path], records: Sequence[Record]) -> list[Record]:
    """Add the mean over rounds of (1 − α^(k_r+1)) / (1 − α), with the α of the pair's cell k = 1, and τ's distance from it.

    The last round of a text has a smaller k_r, and counts with it. Left empty where the sweep has no k = 1.
    """
    alphas = {record["pair"]: record["alpha"] for record in records if record["k"] == 1}
    rows = []
    for path, record in zip(paths, records, strict=True):
        alpha, tau = alphas.get(record["pair"]), record["mean_acceptance_length"]
        with _keys_of(path):
            drafted = [n for prompt in record["per_prompt"] for n in prompt["per_round_drafted"]]
        geometric = None if alpha is None else iid_acceptance_length(alpha, drafted)
        difference = None if geometric is None or tau is None else tau - geometric
        rows.append({**record, "geometric_tokens_per_round": geometric, "difference": difference})
    return rows


def _inside(paths: Sequence[Path], rows_of: Callable[[Record], list[Record]], columns: Sequence[str]) -> pd.DataFrame:
    return _table(_rows(paths, rows_of), columns)


def _speedup_by_k(params: Params, benchmarks: Sequence[Path], compared: Sequence[Path]) -> list[Record]:
    """Of a pair that was timed in two stages, the one with more k: within a run speeds compare, between runs they do not."""
    runs = [_rows(compared, inside.compared_rows), _rows(benchmarks, lambda record: [inside.timed_row(record)])]
    rows = []
    for pair in params.study.pairs:
        in_one, in_other = ([row for row in run if row["pair"] == pair] for run in runs)
        rows += in_one if len(in_one) > len(in_other) else in_other
    return rows


def _rows(paths: Sequence[Path], rows_of: Callable[[Record], list[Record]]) -> list[Record]:
    """What lies inside each cell, as rows."""
    rows = []
    for path in paths:
        record = cells.read_json(path)
        with _keys_of(path):
            rows += rows_of(record)
    return rows


@contextmanager
def _keys_of(path: Path) -> Iterator[None]:
    """A key that is missed in this block is one that the cell lacks."""
    try:
        yield
    except KeyError as error:
        raise InputError(_lacks(path, error.args[0])) from None


def _lacks(path: Path, key: str) -> str:
    return f"{path} lacks the key {key}; measure the cell again with `dvc repro --force`."


def _positions(records: list[Record]) -> pd.DataFrame:
    """One row per pair, k and position in the round."""
    rows = []
    for record in records:
        lists = [record[key] for key in POSITION_LISTS.values()]
        for position, values in enumerate(zip(*lists, strict=True), start=1):
            start = {key: record[key] for key in inside.PAIR} | {"position": position}
            rows.append({**start, **dict(zip(POSITION_LISTS, values, strict=True))})
    return _table(rows, (*inside.PAIR, "position", *POSITION_LISTS))


def _curves(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per pair, role, kernels, context and n."""
    columns = ("pair", *CURVE, "n", *CURVE_LISTS, "refusal", *CURVE_CELL)
    rows = []
    for path, record in zip(paths, _read(paths, ("pair", "curves", *CURVE_CELL)), strict=True):
        with _keys_of(path):
            for curve in record["curves"]:
                start = {key: record[key] for key in ("pair", *CURVE_CELL)} | {
                    key: curve[key] for key in (*CURVE, "refusal")
                }
                for n, values in enumerate(zip(*(curve[key] for key in CURVE_LISTS), strict=True), start=1):
                    rows.append({**start, "n": n, **dict(zip(CURVE_LISTS, values, strict=True))})
    return _table(rows, columns)


def _contestants(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per contestant, and one for each of the kernels that do not run here, with the reason."""
    rows = []
    for path, record in zip(paths, _read(paths, (*COMPARISON, "contestants", "refusals")), strict=True):
        cell = {key: record[key] for key in COMPARISON}
        with _keys_of(path):
            rows += [cell | {key: found[key] for key in CONTESTANT} for found in record["contestants"]]
            rows += [cell | {"kernels": r["kernels"], "refusal": r["reason"]} for r in record["refusals"]]
    return _table(rows, ("pair", *CONTESTANT, "refusal", *COMPARISON[1:]))


def _table(records: list[Record], first: Sequence[str]) -> pd.DataFrame:
    """One row per record: the columns `first`, then the other keys by name. Lists (raw samples) are left out."""
    keys = {key for record in records for key, value in record.items() if not isinstance(value, list | dict)}
    return pd.DataFrame(
        {key: _column([record.get(key) for record in records]) for key in [*first, *sorted(keys - {*first})]}
    )


def _column(values: list[Any]) -> Any:
    """Integers stay integers beside a missing value, or a parameter count would be rounded to six digits."""
    if all(value is None or type(value) is int for value in values):
        return pd.array(values, dtype="Int64")
    return values


if __name__ == "__main__":
    run(main)
