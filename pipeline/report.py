"""Stage `report`: the study's tables as text, in plots/<study>/report.md.

Every sentence is made from numbers of the tables, so that none can contradict them. What stands between `BEGIN` and `END` is
the part for README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline import cells
from pipeline.cli import run
from pipeline.results import read_table, study_folder
from pipeline.study import load_params
from specdec.errors import InputError

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
UNKNOWN = "–"

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]  # the heading, and the text for a row

READING = (
    "α = accepted / tested draft tokens; acceptance rate = accepted / proposed, which falls with k even where α does not; τ = "
    "tokens per target forward. Speeds are of decoding alone, without the pass over the prompt. The speed-up is over our own "
    "plain decoding with the same kernels; predicted = τ / (kc + v); in brackets, 95 % intervals over prompts."
)
ATTRIBUTION = (
    "measured = ideal × i.i.d. × verification × overhead. The ideal is Leviathan's (1 − α^(k+1)) / ((1 − α)(kc + 1)), where "
    "tokens are accepted independently and a verification costs no more than one step. The first two factors are what these two "
    "assumptions make of it, the third is everything else. c = T_draft(1) / T_target(1), v = T_target(k+1) / T_target(1)."
)
BASELINES = (
    "Noise is our own plain decoding timed against itself: as far as the ends of its interval lie from 1, any ratio here may lie "
    "from the truth, so that only one that lies farther from 1 is called faster or slower. End "
    "to end includes the pass over the prompt. HF output equal: prompts whose greedy output from HF generate is that of our own "
    "plain decoding."
)
TOY = "Tiny random models, to check the loop and the theory; their speed says nothing about real ones."
GEOMETRIC = "mean over rounds of (1 − α^(k_r+1)) / (1 − α), α of k = 1"


def main() -> None:
    argparse.ArgumentParser(
        description="Write the tables of params.yaml's study as text into plots/<study>/report.md."
    ).parse_args()
    params = load_params()
    folder = study_folder(params.study.name)
    cells.write_text(folder / "report.md", report(params.study.name, folder))


def report(study: str, folder: Path) -> str:
    """The whole text, from the CSV files in `folder`."""
    benchmark, toy_benchmark = read_table(folder, "hf_benchmark"), read_table(folder, "toy_benchmark")
    toy_k, toy_temperature = read_table(folder, "toy_k"), read_table(folder, "toy_temperature")
    blocks = [
        f"# Study `{study}`",
        *(BEGIN, header(benchmark), results(benchmark), verdicts(benchmark), READING, END),
        *("## Why not more", ATTRIBUTION, attribution(benchmark)),
        *("## Baselines and noise", BASELINES, baselines(benchmark)),
        *("## Acceptance against k", sweep(read_table(folder, "sweep_k"), K)),
        *("## Acceptance against temperature", sweep(read_table(folder, "sweep_temperature"), T)),
        *("## Toy pair", TOY, header(toy_benchmark), results(toy_benchmark), verdicts(toy_benchmark)),
        "### What the toy sweep shows beside the original's findings",
        toy_findings(toy_k, read_table(folder, "toy_acceptance_per_position"), toy_temperature),
        *("### Toy pair against k", sweep(toy_k, K, (GEOMETRIC, number("geometric_tokens_per_round")))),
        *("### Toy pair against temperature", sweep(toy_temperature, T)),
    ]
    return "\n\n".join(blocks) + "\n"


def readme_part(text: str) -> str:
    """What of a report's text belongs into README.md.

    Raises:
        InputError: the markers are not there.
    """
    if not text.count(BEGIN) == text.count(END) == 1:
        raise InputError(f"The report has no part between {BEGIN} and {END}; `dvc repro report` writes it anew.")
    return text.split(BEGIN)[1].split(END)[0].strip()


def header(benchmark: pd.DataFrame) -> str:
    """What the numbers were measured on, and how. Rows that differ in something show all its values."""

    def all_of(column: str) -> str:
        if column not in benchmark:
            return UNKNOWN
        return " / ".join(str(value) for value in benchmark[column].dropna().unique()) or UNKNOWN

    decoding = " / ".join(dict.fromkeys(decoding_words(row) for row in _rows(benchmark)))
    devices = " / ".join(dict.fromkeys(device_words(row) for row in _rows(benchmark)))
    return (
        f"CPU {all_of('cpu')}, {all_of('threads')} threads, device {devices}, {all_of('dtype')}; "
        f"torch {all_of('torch')}, transformers {all_of('transformers')}. {decoding}, {all_of('prompts')} prompts × "
        f"{all_of('max_new_tokens')} tokens, median of {all_of('runs')} interleaved runs."
    )


def device_words(row: Row) -> str:
    """The kind of device, and which one it was where its name says more."""
    kind, name = words("device")(row), row["device_name"]
    return kind if name == kind or not _known(name) else f"{kind} ({name})"


def decoding_words(row: Row) -> str:
    if row["temperature"] == 0:
        return "Greedy decoding"
    limits = [f"{key} = {row[key]:g}" for key in ("top_k", "top_p") if _known(row.get(key))]
    return ", ".join([f"Sampling at T = {row['temperature']:g}", *limits])


def results(benchmark: pd.DataFrame) -> str:
    columns: list[Column] = [
        ("Target (params)", lambda row: model(row["target"], row["target_parameters"])),
        ("Draft (params)", lambda row: model(row["draft"], row["draft_parameters"])),
        ("k", number("k", 0)),
        ("α", number("alpha", 3)),
        ("acceptance rate", number("draft_acceptance_rate", 3)),
        ("accepted / round", number("mean_accepted_per_round")),
        ("τ", number("mean_acceptance_length")),
        ("plain tok/s", number("ar_tokens_per_second", 1)),
        ("speculative tok/s", number("spec_tokens_per_second", 1)),
        ("HF generate tok/s", number("hf_tokens_per_second", 1)),
        ("speed-up", interval("speedup")),
        ("over fastest baseline", interval("speedup_over_fastest")),
        ("predicted", number("predicted_speedup")),
        ("greedy output against plain", words("identical")),
    ]
    return markdown(benchmark, columns)


def verdicts(benchmark: pd.DataFrame) -> str:
    """A line per row: what its intervals allow to say."""
    return "\n".join(f"- {verdict(row)}" for row in _rows(benchmark))


def verdict(row: Row) -> str:
    fastest = words("fastest_baseline")(row)
    if row["speedup"] == row["speedup_over_fastest"]:
        comparisons = comparison(row, "speedup", f"{fastest}, the fastest baseline")
    else:
        over_own = comparison(row, "speedup", "own plain decoding")
        comparisons = f"{over_own}; {comparison(row, 'speedup_over_fastest', f'the fastest baseline, {fastest}')}"
    line = f"`{row['pair']}`, k = {row['k']}: {comparisons}. Measured / predicted = {number('overhead_factor')(row)}."
    return f"{line}{repeatability(row)}"


def repeatability(row: Row) -> str:
    """A sentence where runs with the same seed gave different tokens, or nothing."""
    runs = row["unrepeatable_runs"]
    if not _known(runs) or runs == 0:
        return ""
    count = f"{runs:.0f} timed {'run' if runs == 1 else 'runs'}"
    return f" Not repeatable: {count} gave other tokens than the first of the same kind."


def comparison(row: Row, key: str, baseline: str) -> str:
    """One speed-up in words; faster or slower is said only where the interval leaves out 1 and noise does not reach as far."""
    value, low, high = row[key], row[f"{key}_lo"], row[f"{key}_hi"]
    noise = noise_distance(row)
    if not _known(value):
        return f"not compared with {baseline}"
    if not _known(low):
        conclusion = "too few prompts for an interval"
    elif low <= 1 <= high:
        conclusion = "not distinguishable from 1"
    elif noise is None:
        conclusion = "the noise of this run is unknown"
    elif abs(value - 1) <= noise:
        conclusion = "within the noise of this run"
    else:
        conclusion = "faster" if value > 1 else "slower"
    return f"{interval(key)(row)} times the speed of {baseline}: {conclusion}"


def noise_distance(row: Row) -> float | None:
    """How far from 1 plain decoding against itself may lie: the farther end of its interval, or the value without one."""
    ends = [row[f"noise_floor{end}"] for end in ("_lo", "_hi")]
    known = [end for end in (ends if all(map(_known, ends)) else [row["noise_floor"]]) if _known(end)]
    return max((abs(end - 1) for end in known), default=None)


def attribution(benchmark: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        ("k", number("k", 0)),
        ("measured", number("speedup")),
        ("ideal", number("ideal_speedup")),
        ("i.i.d.", number("iid_factor", 3)),
        ("verification", number("verify_cost_factor", 3)),
        ("overhead", number("overhead_factor", 3)),
        ("c", number("cost_coefficient", 3)),
        ("v", number("verify_cost_ratio", 3)),
    ]
    return markdown(benchmark, columns)


def baselines(benchmark: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        ("k", number("k", 0)),
        ("noise", interval("noise_floor", 3)),
        ("plain over HF generate", interval("ar_over_hf")),
        ("HF output equal", hf_equal),
        ("fastest baseline", words("fastest_baseline")),
        ("speed-up end to end", interval("speedup_end_to_end")),
        ("peak memory, GiB", lambda row: number("gib")({"gib": row["peak_memory_bytes"] / 2**30})),
    ]
    return markdown(benchmark, columns)


def hf_equal(row: Row) -> str:
    """Sampled outputs are not compared: Hugging Face draws other tokens."""
    count, prompts = (number(key, 0)(row) for key in ("hf_identical_prompts", "prompts"))
    return UNKNOWN if count == UNKNOWN else f"{count} of {prompts}"


def sweep(table: pd.DataFrame, axis: Column, *more: Column) -> str:
    columns: list[Column] = [
        PAIR,
        axis,
        ("tested", number("tested", 0)),
        ("acceptance rate", number("draft_acceptance_rate", 3)),
        ("α", interval("alpha", 3)),
        ("α as mean Σ min(p, q)", interval("alpha_overlap", 3)),
        ("τ", interval("mean_acceptance_length")),
        ("τ if i.i.d.", number("iid_acceptance_length")),
        *more,
    ]
    return markdown(table, columns)


def toy_findings(by_k: pd.DataFrame, positions: pd.DataFrame, by_temperature: pd.DataFrame) -> str:
    """Each finding of the original write-up on its toy pair, beside the same quantity computed from the tables."""
    k = by_k["k"].max()
    conditional = positions.loc[positions["k"] == k, "conditional_acceptance_per_position"]
    ordered = by_temperature.sort_values("temperature")
    coldest, hottest = ordered.iloc[0], ordered.iloc[-1]
    here_and_original = [
        (
            f"τ against the {GEOMETRIC}; k_r, drafted in round r, is smaller in last rounds",
            geometric_finding(by_k),
            "at most 0.35 token apart for k = 1..8",
        ),
        (
            f"acceptance rate for k = {by_k['k'].min()}..{k}",
            _range(by_k["draft_acceptance_rate"]),
            "near 0.95 throughout",
        ),
        (f"acceptance given that of the position before, k = {k}", _range(conditional), "no decay with depth"),
        ("lowest α over temperatures", lowest_alpha(ordered), "0.27 near T = 0.2"),
        (
            f"α at T = {coldest['temperature']:g}, its limit for T → 0 being how often the argmaxes agree",
            f"{coldest['alpha_overlap']:.3f}, limit {coldest['argmax_agreement']:.3f}",
            "towards about 0.97",
        ),
        (
            f"α at T = {hottest['temperature']:g}, beside its limit for T → ∞",
            f"{hottest['alpha_overlap']:.3f}, limit {hottest['limit_high_temperature']:g}",
            "towards 1",
        ),
    ]
    table = pd.DataFrame(here_and_original, columns=["quantity", "here", "original"])
    return markdown(table, [(name, words(name)) for name in ("quantity", "here", "original")])


def geometric_finding(by_k: pd.DataFrame) -> str:
    rows = [row for row in _rows(by_k) if _known(row["difference"])]
    if not rows:
        return f"{UNKNOWN} (toy.k has no 1)"
    worst = max(rows, key=lambda row: abs(row["difference"]))
    side = "above" if worst["difference"] > 0 else "below"
    return f"at most {abs(worst['difference']):.2f} token apart, at k = {worst['k']}, where τ lies {side}"


def lowest_alpha(by_temperature: pd.DataFrame) -> str:
    """By both definitions, for the original's α was accepted / proposed."""

    def lowest(column: str) -> str:
        row = min(_rows(by_temperature), key=lambda row: row[column])
        return f"{row[column]:.2f} at T = {row['temperature']:g}"

    return f"{lowest('alpha_overlap')}; acceptance rate {lowest('draft_acceptance_rate')}"


def markdown(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    lines = [[heading for heading, _ in columns], ["---"] * len(columns)]
    lines += [[text(row).replace("|", r"\|") for _, text in columns] for row in _rows(table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def words(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key]) if _known(row[key]) else UNKNOWN


def number(key: str, digits: int = 2) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.{digits}f}" if _known(row[key]) else UNKNOWN


def interval(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A value and its interval; of too few prompts there is none."""
    value, low, high = (number(name, digits) for name in (key, f"{key}_lo", f"{key}_hi"))

    def text(row: Row) -> str:
        ends = f"{low(row)}, {high(row)}" if _known(row[f"{key}_lo"]) else UNKNOWN
        return f"{value(row)} [{ends}]"

    return text


PAIR: Column = ("pair", words("pair"))
K: Column = ("k", number("k", 0))
T: Column = ("T", lambda row: f"{row['temperature']:g}")


def model(name: str, parameters: float) -> str:
    """A model and its size; a draft that copies text has none."""
    if not _known(parameters) or parameters == 0:
        return name
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{name} ({float(f'{parameters / size:.3g}'):g}{unit})"
    return f"{name} ({parameters:.0f})"


def _range(values: pd.Series) -> str:
    return f"{values.min():.3f} to {values.max():.3f}" if values.notna().any() else UNKNOWN


def _rows(table: pd.DataFrame) -> list[Row]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def _known(value: Any) -> bool:
    return bool(pd.notna(value))


if __name__ == "__main__":
    run(main)
