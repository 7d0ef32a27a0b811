"""The report's part on quantised drafts: their α behind fixed contexts and in the loop, and the speed of those with a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from pipeline.prompt_tables import ALL
from pipeline.quantized_tables import HEAD, METHOD, SIXTEEN_BITS, TEMPERATURE
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

ALPHA = (
    "The draft's weights in fewer bits; where the pair's draft is itself a copy of the target, those of the target. A "
    "variant's name gives bits, group and method: `row` has one scale for each output channel, `g64` one for 64 columns "
    "of it; `min` stores a group's smallest value instead of a zero point, `sym` neither; rtn rounds to nearest, gptq and "
    "awq look at calibration texts as well. Head: whether the LM head is rounded too (in), or left as it is (out). Bits "
    "per weight are those of the rounded layers, scales and zero points included. Here α is the mean of Σ min(p, q̂), p "
    "the target's law and q̂ that of the rounded draft, at the same positions for every variant: for T = 0 behind the "
    "target's own greedy text, for every T > 0 behind its text at T = 1. The change is against the draft as it was (q), "
    "paired on these positions, in points (hundredths of α); agreement is how often both argmaxes are one; TV is the mean "
    "total variation between q and q̂; perplexity is the variant's, of the same text. In brackets, 95 % intervals over "
    "prompts."
)
COMPARED = (
    "Two rows are compared by the difference of their changes, in points, paired over prompts; it is clear where its 95 % "
    "interval leaves out 0. Methods, and treatments of the head, are judged on the same positions; T = 0 has other texts "
    "than T > 0, of the same prompts."
)
BY_CATEGORY = (
    "By category of prompts, head rounded, of the variants that also draft in the loop below. The lowest and the highest "
    "category are said to differ where their 95 % intervals, over the prompts of each, do not overlap; as these two are "
    "picked afterwards, a narrow gap says little."
)
LOOP = (
    "The same variants, head rounded, while they draft: the loop writes its own texts and tests every position but those "
    "of bonus tokens. Its mean Σ min(p, q̂) is held against α behind fixed contexts, of the same prompts and as many "
    "tokens (their difference is paired over prompts) and of all of them: inside says whether it lies in the interval of "
    "the latter."
)
SPEED = (
    "Timed with kernels that read the low-bit weights themselves, those of the LM head among them. α = accepted / tested "
    "draft tokens of these runs, c = T_draft(1) / T_target(1), v = T_target(k+1) / T_target(1), τ = tokens per target "
    "forward, predicted = τ / (k̄c + v). Draft: its weights with scales and zero points, and in 16 bits what is not "
    "rounded. The last two α are theory, for i.i.d. acceptance, at the mean v of the pair's rows: what a draft of this c "
    "needs to be as fast as the 16-bit draft, and to be as fast as plain decoding (–: no α is enough, or there is nothing "
    "to compare with)."
)
LIMITS = (0.5, 1.0)  # points of α
ROUNDING = 1e-4  # of float32 sums over a vocabulary of some 50,000, each of which should be 1
HEADS = {"in": "head rounded", "out": "head left as it is"}
METHODS = {"gptq": "GPTQ", "awq": "AWQ"}


def acceptance(table: pd.DataFrame) -> list[str]:
    """What was read, then a heading and a table per temperature."""
    texts, cpu, tokens = (_all_of(table[key]) for key in ("contexts", "cpu", "calibration_tokens"))
    blocks = [f"Contexts {texts}, read on CPU {cpu}; calibration tokens: {tokens}."]
    for t, part in table.groupby("temperature"):
        blocks += [f"### α at T = {t:g}", unquantized(part), markdown(part, _alpha_columns())]
    return blocks


def by_category(table: pd.DataFrame) -> str:
    """A line per variant and temperature: the categories where a draft does worst and best."""
    lines = []
    for (pair, variant, t), part in table.groupby(["pair", "variant", "temperature"], sort=False):
        known = part[part["alpha"].notna() & (part["category"] != ALL)].sort_values("alpha", kind="stable")
        ends = [f"{interval('alpha', 3)(row)} ({row['category']})" for row in rows_of(known)]
        if len(ends) > 1:
            low, high = known["alpha_hi"].iloc[0], known["alpha_lo"].iloc[-1]
            apart = (
                "they differ" if low < high else "not distinguishable" if is_known(low) else "too few prompts to tell"
            )
            lines.append(f"- `{pair}`, {variant}, T = {t:g}: α from {ends[0]} to {ends[-1]}: {apart}.")
    return "\n".join(lines) or "No prompts of two categories."


def _all_of(values: pd.Series) -> str:
    return (
        " / ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values.dropna().unique())
        or UNKNOWN
    )


def unquantized(part: pd.DataFrame) -> str:
    """What each pair's draft was before, at one temperature."""
    lines = []
    for _, of_pair in part.groupby("pair", sort=False):
        row = rows_of(of_pair)[0]
        lines.append(
            f"- `{row['pair']}`, draft as it was: α {interval('alpha_unquantized', 3)(row)}, perplexity "
            f"{number('perplexity_unquantized', 3)(row)}, {number('positions', 0)(row)} positions of "
            f"{number('prompts', 0)(row)} prompts."
        )
    return "\n".join(lines)


def _alpha_columns() -> list[Column]:
    return [
        PAIR,
        VARIANT,
        ("head", words("head")),
        BITS,
        ("α", interval("alpha", 3)),
        ("change, points", points("alpha_change")),
        ("argmax agreement", interval("argmax_agreement", 3)),
        ("TV", interval("tv", 4)),
        ("perplexity", number("perplexity", 3)),
    ]


def points(key: str) -> Callable[[Row], str]:
    """A difference in α, and its interval, in hundredths."""

    def text(row: Row) -> str:
        scaled = {f"x{end}": 100 * row[f"{key}{end}"] for end in ("", "_lo", "_hi") if is_known(row[f"{key}{end}"])}
        value, low, high = (f"{scaled[name]:+z.2f}" if name in scaled else UNKNOWN for name in ("x", "x_lo", "x_hi"))
        return f"{value} [{low}, {high}]" if low != UNKNOWN else f"{value} [{UNKNOWN}]"

    return text


def findings(table: pd.DataFrame, contrasts: pd.DataFrame) -> str:
    """What the tables say, a line per question and pair."""
    lines = []
    for pair, part in table.groupby("pair", sort=False):
        of_pair = rows_of(contrasts[contrasts["pair"] == pair])
        lines += [f"- `{pair}`, {line}" for line in _findings_of_pair(part, of_pair)]
    return "\n".join([*lines, f"- {bound(table)}", f"- {effort(table)}"])


def _findings_of_pair(part: pd.DataFrame, contrasts: Sequence[Row]) -> list[str]:
    lines = [losing_little(rows_of(of_head), str(head)) for head, of_head in part.groupby("head")]
    methods = dict(zip(part["variant"], part["method"], strict=True))
    for method, name in METHODS.items():
        against = [row for row in contrasts if row["question"] == METHOD and methods[row["variant"]] == method]
        lines.append(f"{name} against rounding to nearest on the same grid: {summary(against, 'variant', 'head', 'T')}")
    left = [row for row in contrasts if row["question"] == HEAD]
    lines.append(f"LM head left as it is against rounded: {summary(left, 'variant', 'T')}{size_of_head(part)}")
    fragile = [row for row in contrasts if row["question"] == TEMPERATURE]
    if fragile:
        ends = f"T = {part['temperature'].min():g} against T = {part['temperature'].max():g}"
        lines.append(f"{ends}: {summary(fragile, 'variant', 'head')}{named_lower(fragile)}")
    return lines


def losing_little(rows: Sequence[Row], head: str) -> str:
    """Which variants lose at most so many points at every temperature, as measured and with the whole interval."""
    parts = []
    intervals = any(is_known(row["alpha_change_lo"]) for row in rows)
    for limit in LIMITS:
        few, surely = (_within(rows, limit, key) for key in ("alpha_change", "alpha_change_lo"))
        line = f"at most {limit:g} {'point is' if limit == 1 else 'points are'} lost at every T by {listed(few)}"
        if few and intervals:
            line += ", intervals included" if surely == few else f", intervals included by {listed(surely)}"
        parts.append(line)
    return f"{HEADS[head]}: {'; '.join(parts)}."


def _within(rows: Sequence[Row], limit: float, key: str) -> list[str]:
    """Variants none of whose rows lies below −limit, in the digits that are printed."""
    lowest: dict[str, float] = {}
    for row in rows:
        value = round(100 * row[key], 2) if is_known(row[key]) else float("-inf")
        lowest[row["variant"]] = min(value, lowest.get(row["variant"], value))
    return [variant for variant, value in lowest.items() if value >= -limit]


def listed(variants: Sequence[str]) -> str:
    return ", ".join(f"`{variant}`" for variant in variants) or "none"


def summary(contrasts: Sequence[Row], *shown: str) -> str:
    """How often the first has the higher and the lower α, how often clearly, and the two extremes.

    Args:
        shown: what tells a contrast from the others.
    """
    rows = [row for row in contrasts if is_known(row["difference"])]
    if not rows:
        return "nothing to compare."
    higher, lower = ([row for row in rows if sign * round(100 * row["difference"], 2) > 0] for sign in (1, -1))
    counts = f"α higher in {_with_clear(higher)} and lower in {_with_clear(lower)} of {len(rows)} comparisons"
    extremes = (pick(rows, key=lambda row: row["difference"]) for pick in (min, max))
    least, most = (f"{points('difference')(row)} ({_place(row, shown)})" for row in extremes)
    return f"{counts}; {most}." if len(rows) == 1 else f"{counts}; from {least} to {most}."


def _place(row: Row, shown: Sequence[str]) -> str:
    words = {"variant": f"`{row['variant']}`", "head": f"head {row['head']}", "T": f"T = {row['temperature']:g}"}
    return ", ".join(words[name] for name in shown)


def _with_clear(rows: Sequence[Row]) -> str:
    with_ends = [row for row in rows if is_known(row["difference_lo"])]
    return f"{len(rows)} ({sum(map(is_clear, with_ends))} clearly)" if with_ends else f"{len(rows)}"


def is_clear(row: Row) -> bool:
    """Whether the interval of a difference leaves out 0, in the digits that are printed; no without one."""
    low, high = row["difference_lo"], row["difference_hi"]
    return is_known(low) and is_known(high) and (round(100 * low, 2) > 0 or round(100 * high, 2) < 0)


def named_lower(contrasts: Sequence[Row]) -> str:
    """The variants that clearly lose more at the first temperature; nothing where that is all of them, or none."""
    named = [row for row in contrasts if is_clear(row) and row["difference"] < 0]
    if len(named) in (0, len(contrasts)):
        return ""
    by_head = {words: [row["variant"] for row in named if row["head"] == head] for head, words in HEADS.items()}
    told = "; ".join(f"{words}, {listed(variants)}" for words, variants in by_head.items() if variants)
    return f" Clearly more is lost at the lower T: {told}."


def size_of_head(part: pd.DataFrame) -> str:
    """What leaving the head does to the draft's size: a tied head that is rounded is a second copy of the embedding."""
    sizes = part.drop_duplicates(["variant", "head"]).assign(bytes=lambda t: t["weight_bytes"] + t["other_bytes"])
    wide = sizes.pivot(index="variant", columns="head", values="bytes")
    if not {"in", "out"} <= {*wide.columns}:
        return ""
    change = ((wide["out"] - wide["in"]) / 1e6).dropna()
    if change.empty:
        return ""
    ends = " to ".join(dict.fromkeys(f"{value:+.1f}" for value in (change.min(), change.max())))
    return f" It changes the draft's size by {ends} MB."


def by_method(contrasts: pd.DataFrame) -> str:
    """What a method has more than rounding to nearest on the same grid, a column per temperature."""
    found: dict[tuple[str, str, str], Row] = {}
    compared = contrasts[contrasts["question"] == METHOD]
    for row in rows_of(compared):
        place = {key: row[key] for key in ("pair", "variant", "head")}
        found.setdefault(tuple(place.values()), place)[f"{row['temperature']:g}"] = points("difference")(row)
    if not found:
        return "No grid was rounded to by another method than to nearest, and to nearest as well."
    columns: list[Column] = [PAIR, VARIANT, ("head", words("head"))]
    columns += [(f"T = {t:g}", words(f"{t:g}")) for t in sorted(compared["temperature"].unique())]
    return f"Points of α beyond rounding to nearest.\n\n{markdown(pd.DataFrame(list(found.values())), columns)}"


def bound(table: pd.DataFrame) -> str:
    """Whether α moved by more than the draft's own law did."""
    known = [row for row in rows_of(table) if is_known(row["largest_excess"])]
    rows = [row for row in known if row["draft"] != row["target"]]
    start = "|Δβ| ≤ TV(q, q̂) at every position, where β = Σ min(p, q) there"
    if not rows:
        none = "not tested: of a draft that is the target itself both sides are one number" if known else "not measured"
        return f"{start}: {none}."
    worst = max(rows, key=lambda row: row["largest_excess"])
    where = f"`{worst['variant']}`, head {worst['head']}, T = {worst['temperature']:g}, `{worst['pair']}`"
    holds = "so the bound holds" if worst["largest_excess"] <= 0 else "which is rounding, so the bound holds"
    conclusion = holds if worst["largest_excess"] <= ROUNDING else "so the bound does not hold"
    return (
        f"{start}: the largest excess of |Δβ| over TV(q, q̂) is {worst['largest_excess']:.1e} ({where}), {conclusion}."
    )


def effort(table: pd.DataFrame) -> str:
    """What rounding the weights took."""
    longest = table.groupby("method", sort=False)["quantisation_seconds"].max().dropna()
    told = ", ".join(f"{seconds:.1f} s by {method}" for method, seconds in longest.items())
    return f"Rounding a draft took at most {told}." if told else "How long rounding took is unknown."


def in_loop(loop: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        VARIANT,
        T,
        K,
        ("prompts", number("prompts", 0)),
        ("tested", number("tested", 0)),
        ("α in the loop", interval("alpha", 3)),
        ("as mean Σ min(p, q̂)", interval("alpha_overlap", 3)),
        ("α behind contexts, same prompts", interval("matched_alpha", 3)),
        ("difference, points", points("difference")),
        ("α behind contexts, all", interval("forced_alpha", 3)),
        ("inside", inside),
    ]
    return markdown(loop, columns)


def inside(row: Row) -> str:
    """Where the loop's α lies, seen from the interval behind fixed contexts."""
    value, low, high = row["alpha_overlap"], row["forced_alpha_lo"], row["forced_alpha_hi"]
    if not all(map(is_known, (value, low, high))):
        return UNKNOWN
    return "above" if value > high else "below" if value < low else "yes"


def loop_findings(loop: pd.DataFrame) -> str:
    """In how many rows both agree, and whether the intervals overlap where they do not."""
    rows = [row for row in rows_of(loop) if inside(row) != UNKNOWN]
    if not rows:
        return "Too few prompts for an interval to lie in."
    outside = [row for row in rows if inside(row) != "yes"]
    line = f"The loop's α lies inside in {len(rows) - len(outside)} of {len(rows)} rows."
    if not outside:
        return line
    told = [
        f"`{row['variant']}` at T = {row['temperature']:g}, `{row['pair']}`, lies {inside(row)}; on the same prompts the "
        f"difference is {points('difference')(row)} points{_on_same_prompts(row)}"
        for row in outside
    ]
    return f"{line} {'. '.join(told)}."


def _on_same_prompts(row: Row) -> str:
    """Whether other prompts and texts explain that the loop's α lies outside."""
    if not is_known(row["difference_lo"]):
        return ""
    return ", clearly not 0" if is_clear(row) else ", not distinguishable from 0: these prompts are others than all"


def speed(benchmark: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        VARIANT,
        K,
        BITS,
        ("draft, MB", lambda row: number("mb", 1)({"mb": row["draft_bytes"] / 1e6})),
        ("c", number("cost_coefficient", 3)),
        ("v", number("verify_cost_ratio", 3)),
        ("τ", number("mean_acceptance_length")),
        ("α", interval("alpha", 3)),
        ("speed-up", interval("speedup")),
        ("predicted", number("predicted_speedup")),
        ("α to equal the 16-bit draft", number("equal_speed_alpha", 3)),
        ("α to pay", number("break_even_alpha", 3)),
        PEAK_MEMORY,
        ("greedy output against plain", words("identical")),
    ]
    return markdown(benchmark, columns)


def speed_verdicts(benchmark: pd.DataFrame) -> str:
    """A line per row: against plain decoding, and against the pair's 16-bit draft."""
    lines = []
    for row, base in _with_base(benchmark):
        line = f"- {verdict(row, 'pair', 'variant')}"
        lines.append(line if row["variant"] == SIXTEEN_BITS else f"{line} {against_sixteen_bits(row, base)}")
    return "\n".join(lines)


def _with_base(benchmark: pd.DataFrame) -> Iterator[tuple[Row, Row | None]]:
    """Each row with the 16-bit draft of its pair, if that was timed."""
    rows = rows_of(benchmark)
    for row in rows:
        yield row, next((r for r in rows if r["pair"] == row["pair"] and r["variant"] == SIXTEEN_BITS), None)


def against_sixteen_bits(row: Row, base: Row | None) -> str:
    """Whether fewer bits paid: by theory from c and α, and as measured."""
    if base is None:
        return "No 16-bit draft was timed beside it."
    return f"Against the 16-bit draft: {_by_theory(row, base)}; {_as_measured(row, base)}."


def _by_theory(row: Row, base: Row) -> str:
    needed = row["equal_speed_alpha"]
    if not all(map(is_known, (row["alpha"], base["alpha"], row["cost_coefficient"], base["cost_coefficient"]))):
        return "by theory unknown"
    if not is_known(needed):
        return "by theory no α is enough at this c"
    start = f"α {interval('alpha', 3)(row)} where {needed:.3f} is needed"
    if not is_known(row["alpha_lo"]):
        return f"{start}, too few prompts for an interval"
    if row["alpha_lo"] <= needed <= row["alpha_hi"]:
        return f"{start}, not distinguishable"
    return f"{start}, so by theory {'faster' if row['alpha'] > needed else 'slower'}"


def _as_measured(row: Row, base: Row) -> str:
    if not is_known(row["speedup"]) or not is_known(base["speedup"]):
        return "not compared as measured"
    start = f"measured {interval('speedup')(row)} beside {interval('speedup')(base)}"
    if not is_known(row["speedup_lo"]) or not is_known(base["speedup_lo"]):
        return f"{start}, too few prompts for an interval"
    if row["speedup_lo"] <= base["speedup_hi"] and base["speedup_lo"] <= row["speedup_hi"]:
        return f"{start}, intervals overlapping"
    return f"{start}, so {'faster' if row['speedup'] > base['speedup'] else 'slower'}"


def without_speed(alpha: pd.DataFrame, benchmark: pd.DataFrame) -> str:
    timed = {*benchmark["variant"]}
    others = [variant for variant in dict.fromkeys(alpha["variant"]) if variant not in timed]
    if not others:
        return "Every variant above was timed."
    return (
        f"Not timed with a low-bit kernel here, and so without a speed: {listed(others)}. Their α was measured with weights "
        "rounded and widened again, whose speed would be that of the draft as it was."
    )


VARIANT: Column = ("variant", words("variant"))
BITS: Column = ("bits / weight", number("bits_per_weight"))
