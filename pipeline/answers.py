"""The three questions of the study, answered in sentences whose numbers and verdicts come from the tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import pandas as pd

from pipeline.attribution import configurations, is_attributed, name_of, product
from pipeline.attribution_report import costliest
from pipeline.comparison_figures import label
from pipeline.wording import Row, comparison, interval, is_known, number, rows_of, words
from specdec.theory import expected_tokens_per_round, optimal_k, predicted_speedup

FASTER, SLOWER = ": faster", ": slower"  # how `wording.comparison` ends where interval and noise allow it
OVER = "speedup_over_fastest"


def answers(
    benchmark: pd.DataFrame,
    quantized_benchmark: pd.DataFrame,
    compared: pd.DataFrame,
    by_dtype: pd.DataFrame,
    costs: pd.DataFrame,
) -> str:
    """A point per question; the third has two parts."""
    timed = configurations(benchmark, quantized_benchmark)
    drafting = compared[(compared["method"] == "spec") & compared["refusal"].isna()]
    with_prompt = compared.set_index(["pair", "name"])["end_to_end_tokens_per_second"].to_dict()
    contestants = [_as_configuration(row, with_prompt) for row in rows_of(drafting)]
    fair = list(_against_the_fastest(timed, compared))
    points = {
        "Is it lossless here?": _output([benchmark, quantized_benchmark, drafting], by_dtype),
        "What does it gain?": _gain([*fair, *contestants], left_out=len(timed) - len(fair)),
        "Why not more?": _loss(timed),
        "Which draft and k?": _choice([*fair, *contestants], costs, benchmark),
    }
    return "\n".join(f"- **{question}** {answer}" for question, answer in points.items())


def divergences(by_dtype: pd.DataFrame) -> Iterator[str]:
    """A sentence per number format: how many greedy texts part from plain decoding's, and why."""
    for dtype, part in by_dtype.groupby("dtype", sort=False):
        prompts, ties, faults = (int(part[key].sum()) for key in ("prompts", "near_ties", "faults"))
        apart = prompts - int(part["identical_prompts"].sum())
        start = f"In {dtype}, {apart} of {prompts} prompts {'diverges' if apart == 1 else 'diverge'}"
        if apart == 0:
            yield f"{start}."
        elif faults == 0:
            yield f"{start}, {'at a near-tie' if apart == 1 else 'all of them at near-ties'}."
        else:
            yield f"{start}, {ties} at near-ties and {faults} by a fault."


def _as_configuration(contestant: Row, with_prompt: Mapping[Hashable, Any]) -> Row:
    """A contestant of a comparison with the keys of a timed cell; what its cell does not know stays away.

    Args:
        with_prompt: tokens per second, the pass over the prompt counted, by pair and contestant.
    """
    own, base = (
        with_prompt.get((contestant["pair"], contestant[key]), float("nan")) for key in ("name", "fastest_plain")
    )
    end_to_end = own / base if is_known(own) and is_known(base) and base > 0 else None
    plain = f"{label(contestant['fastest_plain']).replace(',', ' decoding,')} kernels"
    k = contestant["name"].partition("k=")[2]  # the column holds floats where no k is auto
    known = {"variant": None, "k": k, "fastest_baseline": plain, "speedup_end_to_end": end_to_end}
    return {**contestant, **known, "speedup_end_to_end_lo": None, "speedup_end_to_end_hi": None}


def _against_the_fastest(timed: list[Row], compared: pd.DataFrame) -> Iterator[Row]:
    """The cells but for those whose own plain decoding lost, in a comparison, to plain decoding on other kernels."""
    plain = compared[(compared["method"] == "ar") & compared["refusal"].isna()]
    slower = plain[plain["name"] != plain["fastest_plain"]]
    lost = {*zip(slower["target"], slower["kernels"], strict=True)}
    yield from (row for row in timed if (row["target"], row["kernels"]) not in lost)


def _output(tables: list[pd.DataFrame], by_dtype: pd.DataFrame) -> str:
    """What comparing greedy outputs showed. That sampled ones follow the right law, no measurement of this size could show."""
    rows = pd.concat([table[["dtype", "identical_prompts", "prompts", "ties"]] for table in tables if not table.empty])
    compared = rows[rows["identical_prompts"].notna()]
    sentences = []
    for dtype, part in compared.groupby("dtype", sort=False):
        same, prompts = int(part["identical_prompts"].sum()), int(part["prompts"].sum())
        plural = "configuration" if len(part) == 1 else "configurations"
        sentences.append(
            f"In {dtype}, {same} of {prompts} greedy texts by {len(part)} timed {plural} are plain decoding's, token by token."
        )
    apart = int((compared["prompts"] - compared["identical_prompts"]).sum())
    if compared.empty:
        verdict = "Not checked: no timed configuration compares greedy outputs."
    elif by_dtype["faults"].sum() > 0:
        verdict = "Not to the letter."
    elif apart == 0:
        verdict = "Yes, as far as greedy output shows."
    elif apart == int(compared["ties"].sum()):
        verdict = "Yes, up to ties, where rounding decides between two tokens."
    else:
        verdict = "Not to the letter."
    law = "That sampled text follows the target's law is shown by the tests, which enumerate it."
    return " ".join([verdict, *sentences, *divergences(by_dtype), law])


def _gain(rows: list[Row], *, left_out: int) -> str:
    """Whether the best configuration beats the fastest decoding without a draft, and what a round yields and costs there."""
    known = [row for row in rows if is_known(row[OVER])]
    if not known:
        return "Not known: nothing was compared with decoding without a draft."
    best, faster = _best(known), sum(map(_is_faster, known))
    told = comparison(best, OVER, f"the fastest decoding without a draft ({words('fastest_baseline')(best)})")
    reason, there = _reason(best), ""
    if told.endswith((FASTER, SLOWER)):
        pays = "pays" if told.endswith(FASTER) else "does not pay"
        pays += f", because {reason}" if reason else ""
    else:  # what a round yields and costs is no reason for an interval
        pays, there = "is not known to pay", f" There {reason}." if reason else ""
    are = "is" if faster == 1 else "are"
    others = (
        f" Cells left out, for plain decoding is faster with other kernels than theirs: {left_out}." if left_out else ""
    )
    end_to_end = ""
    if is_known(best["speedup_end_to_end"]):
        how = interval if is_known(best["speedup_end_to_end_lo"]) else number
        end_to_end = (
            f" With the pass over the prompt counted, which a draft makes longer: {how('speedup_end_to_end')(best)}."
        )
    return (
        f"On this machine speculative decoding {pays}. Best measured configuration: {name_of(best)}, {told}.{there}{end_to_end} "
        f"Those of the comparison included, {faster} of {len(known)} timed configurations {are} faster than the "
        f"fastest without.{others}"
    )


def _is_faster(row: Row) -> bool:
    return comparison(row, OVER, "").endswith(FASTER)


def _best(known: list[Row]) -> Row:
    """The fastest of those that are faster beyond their interval and the noise, or else of all."""
    return max([row for row in known if _is_faster(row)] or known, key=lambda row: row[OVER])


def _reason(row: Row) -> str | None:
    """What a round yields and what it costs, by c and v; and what stands in the way where that alone would pay."""
    tau, predicted = row["mean_acceptance_length"], row["predicted_speedup"]
    if not is_known(tau) or not is_known(predicted) or predicted <= 0:
        return None
    cost = number("cost")({"cost": tau / predicted})
    tokens = number("mean_acceptance_length")(row)
    yields = f"a round yields τ = {tokens} tokens and costs, by c and v, {cost} steps of plain decoding"
    if row[OVER] > 1:
        return yields if predicted > 1 else None  # a gain that c and v do not explain
    if round(predicted, 2) <= 1:
        return yields
    if is_known(row["speedup"]) and row["speedup"] > 1:
        return f"{yields}, but these are not the steps of the fastest decoding without a draft"
    return f"{yields}, but overhead takes more than the difference"


def _loss(rows: list[Row]) -> str:
    """The factors of the best configuration that a timed cell explains."""
    explained = [row for row in rows if is_attributed(row) and is_known(row[OVER])]
    if not explained:
        return "Not known: no timed cell says what separates it from the ideal."
    best = max(explained, key=lambda row: row[OVER])
    return (
        f"The best cell whose factors are known is {costliest(best)} Measured = ideal × i.i.d. × verification × overhead: "
        f"{product(best)}. Overhead is what neither c nor v holds, such as draws and bookkeeping, and what the clock of T(n) "
        "misses."
    )


def _choice(rows: list[Row], costs: pd.DataFrame, benchmark: pd.DataFrame) -> str:
    """The best of what was measured, and the best of what α and T(n) predict for any k that T(n) reaches."""
    known = [row for row in rows if is_known(row[OVER])]
    start = ""
    if known:
        best = _best(known)
        start = f"Of what was timed, {name_of(best)}. "
        if not _is_faster(best):
            start = f"Nothing that was timed is known to be faster than no draft; the nearest is {name_of(best)}. "
        return start + _optimum(costs, benchmark, best)
    return _optimum(costs, benchmark, None)


def _optimum(costs: pd.DataFrame, benchmark: pd.DataFrame, timed: Row | None) -> str:
    """The best k by prediction, and what the same prediction has for the k that was timed: it is of other runs than those."""
    found = list(_predictions(costs, benchmark))
    if not found:
        return "The predicted optimum is not known."
    best = max(found, key=lambda row: row["over_fastest"])
    if best["k"] == 0:
        look_up = " What a look-up gains is not predicted." if (benchmark["draft"] == "lookup").any() else ""
        return f"Predicted optimum: no draft model, for by α and T(n) no k of theirs gains.{look_up}"
    end = ", the largest that T(n) was measured for" if best["k"] == best["largest"] else ""
    beside = ""
    if (
        timed is not None
        and timed["pair"] == best["pair"]
        and str(timed["k"]) in best["by_k"].keys() - {str(best["k"])}
    ):
        beside = f"; the same prediction for k = {timed['k']} is {best['by_k'][str(timed['k'])]:.2f}"
    return (
        "Predicted optimum, from the α of the timed cells, taken as independent of position, and from the measured T(n): "
        f"`{best['pair']}`, k = {best['k']}{end}, {best['kernels']} kernels, {best['over_fastest']:.2f} times the "
        f"speed of plain decoding with the fastest kernels whose T(n) was measured ({best['fastest']}){beside}."
    )


def _predictions(costs: pd.DataFrame, benchmark: pd.DataFrame) -> Iterator[Row]:
    """The best k of each pair whose draft is a model, and of each of the kernels, behind the shortest context."""
    alphas = benchmark.groupby("pair", sort=False)["alpha"].mean().dropna()
    shortest = costs[costs["context"] == costs["context"].min()]
    for pair, part in shortest.groupby("pair", sort=False):
        curves = {key: curve["seconds"].tolist() for key, curve in part.groupby(["role", "kernels"], sort=False)}
        targets = {kernels: curve for (role, kernels), curve in curves.items() if role == "target" and _positive(curve)}
        for kernels, target in targets.items():
            draft = curves.get(("draft", kernels), [])
            if not _positive(draft[:1]) or pair not in alphas:
                continue
            alpha = float(alphas[pair])
            v, c = [seconds / target[0] for seconds in target], draft[0] / target[0]
            k = optimal_k(alpha, c, v)
            fastest = min(targets, key=lambda name: targets[name][0])
            over_fastest = [
                predicted_speedup(expected_tokens_per_round(alpha, n), n, c, v[n]) * targets[fastest][0] / target[0]
                for n in range(len(v))
            ]
            by_k = {str(n): value for n, value in enumerate(over_fastest)}
            found = {"pair": pair, "kernels": kernels, "k": k, "largest": len(v) - 1, "fastest": fastest, "by_k": by_k}
            yield found | {"over_fastest": over_fastest[k]}


def _positive(seconds: list[float]) -> bool:
    return bool(seconds) and all(is_known(value) and value > 0 for value in seconds)
