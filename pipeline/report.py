"""Stage `report`: the study's tables and figures as text, in plots/<study>/report.md and, as one page, report.html.

Every sentence is made from numbers of the tables, so that none can contradict them. What stands between `BEGIN` and `END` is
the part for README.md. The page holds its figures itself and needs no network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline import cells
from pipeline import quantized_report as quantized
from pipeline.answers import answers, divergences
from pipeline.attribution_report import ATTRIBUTION, PLACE, attribution, attribution_findings, place_for_speculation
from pipeline.captions import shown
from pipeline.cli import run
from pipeline.comparison_report import COMPARISON, comparison_findings, comparison_table
from pipeline.cost_report import cost_curves, cost_findings, cost_machine, cost_words
from pipeline.llama_cpp_report import llama_cpp_section
from pipeline.page import page
from pipeline.results import read_table, study_folder
from pipeline.study import load_params
from pipeline.wording import (
    PAIR,
    PEAK_MEMORY,
    UNKNOWN,
    Column,
    K,
    Row,
    T,
    interval,
    is_known,
    markdown,
    number,
    rows_of,
    verdict,
    words,
)
from specdec.errors import InputError

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"


READING = (
    "α = accepted / tested draft tokens; acceptance rate = accepted / proposed, which falls with k even where α does not; τ = "
    "tokens per target forward. Speeds are of decoding alone, without the pass over the prompt. The speed-up is over our own "
    "plain decoding with the same kernels; predicted = τ / (k̄c + v), k̄ the tokens drafted per round on average, fewer than k in "
    "last rounds and where lookup finds nothing; in brackets, 95 % intervals over prompts."
)
BASELINES = (
    "Noise is our own plain decoding timed against itself: as far as the ends of its interval lie from 1, any ratio here may lie "
    "from the truth. Faster or slower is said only where a ratio lies farther from 1 than that, and its own interval leaves "
    "out 1. End to end includes the pass over the prompt. HF output equal: prompts whose greedy output from HF generate is that "
    "of our own plain decoding. generate has transformers' own kernels always; with the draft it is timed in the comparison "
    "below."
)
BLOCK = (
    "Token verification (Leviathan et al. 2023) tests one draft token after another, block verification (Sun et al. 2024) the "
    "draft as a whole. Expected / round: the tokens that each rule emits on the drafts of the sweep over "
    "temperatures, averaged over its own draws. So the gain, the ratio of the two, compares "
    "both rules on the same drafts, whereas the two τ are of runs with other drafts and draws, and differ by chance as well. "
    "–: not run. Block verification decodes the pairs of detail_pairs, token verification those of the sweep unless params.yaml "
    "asks for block verification everywhere."
)
CONFIDENCE = (
    "A draft of at most k tokens ends behind a token that the draft model gives less than the threshold; 0 never ends one. "
    "Each drafted token costs a step of the draft, and each round, which yields τ tokens, a pass of the target; whether stopping "
    "pays depends on c and v, and was not timed."
)
IDENTITY = (
    "Greedy speculative against greedy plain decoding. An ulp is a unit in the last place of the largest logit. Where two texts "
    "part, it is a near-tie if both tokens' logits lie at most the limit below the largest, and a fault otherwise. Within the "
    "limit: the share of all positions whose two best logits lie that close, which is what the limit would excuse. Farthest "
    "below the best: the most by which any emitted token's logit lies below the largest, in one pass over the whole text."
)
TOY = "Tiny random models, to check the loop and the theory; their speed says nothing about real ones."
GREEDY_OUTPUT = "greedy output against plain"
OVERLAP = "α (mean Σ min(p, q))"
GEOMETRIC = "mean over rounds of (1 − α^(k_r+1)) / (1 − α), α of k = 1"


def main() -> None:
    argparse.ArgumentParser(
        description="Write the results of params.yaml's study as text into plots/<study>/report.md and report.html."
    ).parse_args()
    params = load_params()
    folder = study_folder(params.study.name)
    text = report(params.study.name, folder)
    whole = as_page(params.study.name, text, folder)
    cells.write_text(folder / "report.md", text)
    cells.write_text(folder / "report.html", whole)


def as_page(study: str, text: str, folder: Path) -> str:
    """The text as HTML, with the figures of `folder` in it."""
    return page(f"Study {study}", text.replace(f"{BEGIN}\n\n", "").replace(f"{END}\n\n", ""), folder)


def report(study: str, folder: Path) -> str:
    """The whole text, from the CSV files in `folder`."""
    benchmark, toy_benchmark = read_table(folder, "hf_benchmark"), read_table(folder, "toy_benchmark")
    toy_k, toy_temperature = read_table(folder, "toy_k"), read_table(folder, "toy_temperature")
    by_temperature, by_block = read_table(folder, "sweep_temperature"), read_table(folder, "sweep_block")
    by_confidence, by_dtype = read_table(folder, "sweep_confidence"), read_table(folder, "greedy_identity")
    quantized_alpha, quantized_loop = read_table(folder, "quantized_alpha"), read_table(folder, "quantized_loop")
    contrasts = read_table(folder, "quantized_contrasts")
    quantized_benchmark = read_table(folder, "quantized_benchmark")
    costs, compared = read_table(folder, "cost_curve"), read_table(folder, "comparison")
    blocks = [
        f"# Study `{study}`",
        *(BEGIN, answers(benchmark, quantized_benchmark, compared, by_dtype, costs)),
        *(header(benchmark), results(benchmark), verdicts(benchmark), READING),
        *("Kernels, k and baselines against each other, in one run:", comparison_findings(compared)),
        "What the machine and the kernels allow:",
        *(place_for_speculation(costs), END),
        *(shown("speedup"), shown("speedup_by_k")),
        *("## Why not more", ATTRIBUTION, attribution(benchmark, quantized_benchmark)),
        attribution_findings(benchmark, quantized_benchmark),
        *(PLACE, place_for_speculation(costs), shown("attribution")),
        *("## Baselines and noise", BASELINES, baselines(benchmark)),
        *("## Kernels, k and baselines in one run", header(compared), COMPARISON, comparison_table(compared)),
        *(comparison_findings(compared), shown("comparison"), "## What a pass over several tokens costs"),
        *(cost_words(costs), cost_machine(costs), cost_curves(costs), cost_findings(costs), shown("cost_curve")),
        *llama_cpp_section(read_table(folder, "llama_cpp")),
        *("## Acceptance against k", sweep(read_table(folder, "sweep_k"), K)),
        *(shown("tokens_per_round"), shown("acceptance_per_position")),
        *(shown("accepted_per_round"), shown("by_category"), shown("real")),
        *("## Acceptance against temperature", sweep(by_temperature, T), shown("acceptance_vs_temperature")),
        *("## Block verification", BLOCK, block(by_temperature, by_block), gains(by_temperature)),
        shown("block_verification"),
        *("## Stopping the draft early", CONFIDENCE, stopping(by_confidence), stopping_findings(by_confidence)),
        shown("confidence"),
        "## Greedy identity in other number formats",
        *(IDENTITY, identity(by_dtype), identity_findings(by_dtype, benchmark)),
        *("## Quantised drafts", quantized.ALPHA, *quantized.acceptance(quantized_alpha)),
        *(shown("quantized_alpha"), "### Quantised drafts by category of prompts", quantized.BY_CATEGORY),
        *(quantized.by_category(read_table(folder, "quantized_by_category")), shown("quantized_by_category")),
        *("### What costs α and what buys it", quantized.COMPARED, quantized.findings(quantized_alpha, contrasts)),
        *("### Methods on the same grid", quantized.by_method(contrasts)),
        *("### Quantised drafts in the loop", quantized.LOOP, quantized.in_loop(quantized_loop)),
        *(quantized.loop_findings(quantized_loop), "### Speed of quantised drafts", header(quantized_benchmark)),
        *(quantized.SPEED, quantized.speed(quantized_benchmark), quantized.speed_verdicts(quantized_benchmark)),
        quantized.without_speed(quantized_alpha, quantized_benchmark),
        *(shown("quantized_speedup"), shown("break_even")),
        *("## Toy pair", TOY, header(toy_benchmark), results(toy_benchmark), verdicts(toy_benchmark)),
        "### What the toy sweep shows beside the original's findings",
        toy_findings(toy_k, read_table(folder, "toy_acceptance_per_position"), toy_temperature),
        *("### Toy pair against k", sweep(toy_k, K, (GEOMETRIC, number("geometric_tokens_per_round")))),
        *("### Toy pair against temperature", sweep(toy_temperature, T, GAIN), gains(toy_temperature)),
        shown("toy"),
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

    threads = all_of("threads")
    decoding = " / ".join(dict.fromkeys(decoding_words(row) for row in rows_of(benchmark)))
    devices = " / ".join(dict.fromkeys(device_words(row) for row in rows_of(benchmark)))
    return (
        f"CPU {all_of('cpu')}, {threads} {'thread' if threads == '1' else 'threads'}, device {devices}, {all_of('dtype')}, "
        f"{all_of('kernels')} kernels; torch {all_of('torch')}, transformers {all_of('transformers')}. {decoding}, "
        f"{all_of('prompts')} prompts × {all_of('max_new_tokens')} tokens, median of {all_of('runs')} interleaved runs."
    )


def device_words(row: Row) -> str:
    """The kind of device, and which one it was where its name says more."""
    kind, name = words("device")(row), row["device_name"]
    return kind if name == kind or not is_known(name) else f"{kind} ({name})"


def decoding_words(row: Row) -> str:
    verifier = ["block verification"] if row["verifier"] == "block" else []
    if row["temperature"] == 0:
        return ", ".join(["Greedy decoding", *verifier])
    limits = [f"{key} = {row[key]:g}" for key in ("top_k", "top_p") if is_known(row.get(key))]
    return ", ".join([f"Sampling at T = {row['temperature']:g}", *limits, *verifier])


def results(benchmark: pd.DataFrame) -> str:
    columns: list[Column] = [
        ("Target (params)", lambda row: model(row["target"], row["target_parameters"])),
        ("Draft (params)", lambda row: model(row["draft"], row["draft_parameters"])),
        ("k", number("k", 0)),
        (GREEDY_OUTPUT, words("identical")),
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
    ]
    return markdown(benchmark, columns)


def verdicts(benchmark: pd.DataFrame) -> str:
    """A line per row: what its intervals allow to say."""
    return "\n".join(f"- {verdict(row, 'pair')}" for row in rows_of(benchmark))


def baselines(benchmark: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        ("k", number("k", 0)),
        ("noise", interval("noise_floor", 3)),
        ("plain over HF generate", interval("ar_over_hf")),
        ("HF output equal", hf_equal),
        ("fastest baseline", words("fastest_baseline")),
        ("speed-up end to end", interval("speedup_end_to_end")),
        PEAK_MEMORY,
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


def block(by_temperature: pd.DataFrame, by_block: pd.DataFrame) -> str:
    """Both rules by pair and temperature. A rule that no run decoded with has no τ."""
    runs = rows_of(by_temperature) + rows_of(by_block)
    taus = {(row["verifier"], row["pair"], row["temperature"]): row for row in runs}

    def tau(verifier: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            run_of = taus.get((verifier, row["pair"], row["temperature"]))
            return number("mean_acceptance_length")(run_of) if run_of else UNKNOWN

        return text

    columns: list[Column] = [
        PAIR,
        K,
        T,
        ("τ, token run", tau("token")),
        ("τ, block run", tau("block")),
        ("expected / round, token", expected("token")),
        ("expected / round, block", expected("block")),
        GAIN,
    ]
    return markdown(by_temperature, columns)


def expected(verifier: str) -> Callable[[Row], str]:
    """Tokens per round: the accepted ones, and the one that the target adds."""

    def text(row: Row) -> str:
        emitted, rounds = row[f"expected_emitted_{verifier}"], row["rounds"]
        return f"{emitted / rounds:.3f}" if is_known(emitted) and rounds else UNKNOWN

    return text


def gains(table: pd.DataFrame) -> str:
    """The extremes of the gain by block verification, how many are beyond chance, and what drafts without laws have of it."""
    known = table[table["block_gain"].notna()]
    rows = rows_of(known)
    if not rows:
        return "No gain is known."
    most, least = (pick(rows, key=lambda row: row["block_gain"]) for pick in (max, min))
    with_ends = [row for row in rows if is_known(row["block_gain_lo"])]
    above = sum(round(row["block_gain_lo"], 3) > 1 for row in with_ends)
    lines = [f"Largest gain: {gain_at(most)}; smallest: {gain_at(least)}."]
    if with_ends:
        lines.append(f"The interval lies above 1 in {above} of {len(with_ends)} rows.")
    lines += [lookup_gain(pair, part) for pair, part in known[known["draft"] == "lookup"].groupby("pair", sort=False)]
    return " ".join(lines)


def gain_at(row: Row) -> str:
    return f"{interval('block_gain', 3)(row)} at T = {row['temperature']:g}, `{row['pair']}`"


def lookup_gain(pair: Any, part: pd.DataFrame) -> str:
    """A copied token was drawn from no law, whose surplus block verification could pass on."""
    lowest, highest = (f"{value:.3f}" for value in (part["block_gain"].min(), part["block_gain"].max()))
    here = f"{lowest} at every T" if lowest == highest else f"from {lowest} to {highest}"
    return f"A draft without laws of its own leaves nothing to gain in theory; `{pair}` has {here}."


def stopping(by_confidence: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        K,
        ("threshold", lambda row: f"{row['confidence_threshold']:g}"),
        ("drafted / round", number("mean_drafted_per_round")),
        ("acceptance rate", interval("draft_acceptance_rate", 3)),
        ("α", interval("alpha", 3)),
        ("τ", interval("mean_acceptance_length")),
        ("drafted / emitted", lambda row: number("value")({"value": drafted_per_emitted(row)})),
    ]
    return markdown(by_confidence, columns)


def drafted_per_emitted(row: Row) -> float | None:
    drafted, tau = row["mean_drafted_per_round"], row["mean_acceptance_length"]
    return drafted / tau if is_known(drafted) and is_known(tau) else None


def stopping_findings(by_confidence: pd.DataFrame) -> str:
    """For each pair what the highest threshold makes of the work of draft and target, beside the lowest."""
    lines = []
    for pair, part in by_confidence.sort_values("confidence_threshold").groupby("pair", sort=False):
        first, last = rows_of(part)[0], rows_of(part)[-1]
        start = f"- `{pair}`, k = {first['k']}"
        if len(part) == 1:
            lines.append(f"{start}: measured at one threshold only.")
            continue
        ends = [(drafted_per_emitted(row), row["mean_acceptance_length"]) for row in (first, last)]
        drafted, tau = (change(before, after) for before, after in zip(*ends, strict=True))
        thresholds = f"from threshold {first['confidence_threshold']:g} to {last['confidence_threshold']:g}"
        lines.append(f"{start}, {thresholds}: drafted / emitted {drafted}, τ {tau}.")
    return "\n".join(lines)


def change(before: float | None, after: float | None) -> str:
    """In the digits that are printed, so that the verb agrees with them."""
    start, end = (number("value")({"value": value}) for value in (before, after))
    if UNKNOWN in (start, end):
        return f"goes from {start} to {end}"
    if start == end:
        return f"stays at {start}"
    return f"{'falls' if float(end) < float(start) else 'rises'} from {start} to {end}"


def identity(by_dtype: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        ("dtype", words("dtype")),
        ("prompts", number("prompts", 0)),
        ("identical", number("identical_prompts", 0)),
        ("near-ties", number("near_ties", 0)),
        ("faults", number("faults", 0)),
        ("largest gap, ulps", number("largest_ulps")),
        ("limit, ulps", lambda row: f"{row['limit_ulps']:g}"),
        (
            "within the limit, % of positions",
            lambda row: number("share", 1)({"share": 100 * row["share_within_limit"]}),
        ),
        ("farthest below the best, ulps", number("largest_emitted_ulps")),
    ]
    return markdown(by_dtype, columns)


def identity_findings(by_dtype: pd.DataFrame, benchmark: pd.DataFrame) -> str:
    """Where greedy output was compared, and what became of each divergence."""
    lines = []
    for dtype, part in benchmark.groupby("dtype", sort=False):
        compared = part[part["identical_prompts"].notna()]
        same, prompts = (int(compared[key].sum()) for key in ("identical_prompts", "prompts"))
        lines.append(
            f"In {dtype}, {len(compared)} of {len(part)} timed cells compare the two, and {same} of {prompts} prompts are "
            f'identical (column "{GREEDY_OUTPUT}" of the results).'
        )
    return " ".join([*lines, *divergences(by_dtype)])


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
        (f"lowest {OVERLAP} over temperatures", lowest_alpha(ordered), "0.27 near T = 0.2"),
        (
            f"{OVERLAP} at T = {coldest['temperature']:g}, its limit for T → 0 being how often the argmaxes agree",
            f"{coldest['alpha_overlap']:.3f}, limit {coldest['argmax_agreement']:.3f}",
            "towards about 0.97",
        ),
        (
            f"{OVERLAP} at T = {hottest['temperature']:g}, beside its limit for T → ∞",
            f"{hottest['alpha_overlap']:.3f}, limit {hottest['limit_high_temperature']:g}",
            "towards 1",
        ),
    ]
    table = pd.DataFrame(here_and_original, columns=["quantity", "here", "original"])
    return markdown(table, [(name, words(name)) for name in ("quantity", "here", "original")])


def geometric_finding(by_k: pd.DataFrame) -> str:
    rows = [row for row in rows_of(by_k) if is_known(row["difference"])]
    if not rows:
        return f"{UNKNOWN} (toy.k has no 1)"
    worst = max(rows, key=lambda row: abs(row["difference"]))
    side = "above" if worst["difference"] > 0 else "below"
    return f"at most {abs(worst['difference']):.2f} token apart, at k = {worst['k']}, where τ lies {side}"


def lowest_alpha(by_temperature: pd.DataFrame) -> str:
    """By both definitions, for the original's α was accepted / proposed."""

    def lowest(column: str) -> str:
        row = min(rows_of(by_temperature), key=lambda row: row[column])
        return f"{row[column]:.2f} at T = {row['temperature']:g}"

    return f"{lowest('alpha_overlap')}; acceptance rate {lowest('draft_acceptance_rate')}"


GAIN: Column = ("gain by block verification", interval("block_gain", 3))


def model(name: str, parameters: float) -> str:
    """A model and its size; a draft that copies text has none."""
    if not is_known(parameters) or parameters == 0:
        return name
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{name} ({float(f'{parameters / size:.3g}'):g}{unit})"
    return f"{name} ({parameters:.0f})"


def _range(values: pd.Series) -> str:
    return f"{values.min():.3f} to {values.max():.3f}" if values.notna().any() else UNKNOWN


if __name__ == "__main__":
    run(main)
