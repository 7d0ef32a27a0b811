"""The report's part on what keeps each speed-up below the ideal, and on whether the machine is a good place for speculation."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from pipeline.attribution import FACTORS, configurations, is_attributed, name_of
from pipeline.cost_report import is_noisy
from pipeline.wording import PAIR, Column, K, Row, is_known, markdown, number, rows_of, words

ATTRIBUTION = (
    "measured = ideal × i.i.d. × verification × overhead. The ideal is Leviathan's: the mean over rounds of "
    "(1 − α^(k_r+1)) / (1 − α), divided by k̄c + 1, where k_r is what round r drafted and k̄ its mean. There "
    "tokens are accepted independently and a verification costs no more than one step. The first two factors are what these two "
    "assumptions make of it, the third is everything else. c = T_draft(1) / T_target(1), v = T_target(k+1) / T_target(1)."
)
NAMES = dict(zip(FACTORS, ("acceptance that is not i.i.d.", "verification", "overhead"), strict=True))
ROWS = 5  # tokens of a verification at k = 4
CHEAP = 1.3  # v below it leaves most of the ideal
FLAT = 1.05  # a ratio below it is called none
NOISY = 2  # an interval whose ends are farther apart says nothing of factors near 1
PLACE = (
    "Is this machine a good place for speculation? It is one if a pass over a few tokens costs little more than a step, and a "
    "step of the draft little beside it. From the curves of T(n) behind the shortest context, medians over the pairs with the "
    f"same target; v below {CHEAP} is called cheap."
)


def attribution(benchmark: pd.DataFrame, quantized_benchmark: pd.DataFrame) -> str:
    """A row per timed configuration."""
    columns: list[Column] = [
        PAIR,
        ("draft's variant", words("variant")),
        K,
        ("kernels", words("kernels")),
        ("measured", number("speedup")),
        ("ideal", number("ideal_speedup")),
        ("i.i.d.", number("iid_factor", 3)),
        ("verification", number("verify_cost_factor", 3)),
        ("overhead", number("overhead_factor", 3)),
        ("c", number("cost_coefficient", 3)),
        ("v", number("verify_cost_ratio", 3)),
    ]
    return markdown(pd.DataFrame(configurations(benchmark, quantized_benchmark)), columns)


def attribution_findings(benchmark: pd.DataFrame, quantized_benchmark: pd.DataFrame) -> str:
    """A line per timed configuration: which factor costs most."""
    return "\n".join(f"- {costliest(row)}" for row in configurations(benchmark, quantized_benchmark))


def costliest(row: Row) -> str:
    """Which factor of a configuration costs most."""
    start = name_of(row)
    if not is_attributed(row):
        return f"{start}: not known."
    printed = {key: number(key, 3)(row) for key in FACTORS}  # so that no word contradicts the table
    least = min(printed.values(), key=float)
    if float(least) >= 1:
        found = f"no factor costs anything, the least of them being ×{least}"
    else:
        names = [NAMES[key] for key, text in printed.items() if text == least]
        found = f"{' and '.join(names)} {'costs' if len(names) == 1 else 'cost'} most, ×{least}"
        found += " each" if len(names) > 1 else ""
    ends = [row["speedup_lo"], row["speedup_hi"]]
    if all(map(is_known, ends)) and ends[1] > NOISY * ends[0]:
        found = f"too noisy to say which factor costs most, with a speed-up between {ends[0]:.2f} and {ends[1]:.2f}"
    ideal = number("ideal_speedup")(row)
    too_dear = f", and the ideal itself is no gain, {ideal}, at c = {number('cost_coefficient')(row)}"
    return f"{start}: {found}{too_dear if float(ideal) <= 1 else ''}."


def place_for_speculation(costs: pd.DataFrame) -> str:
    """What machine and kernels allow, a line per target and one for each of its kernels."""
    shortest = costs[costs["context"] == costs["context"].min()]
    targets = shortest[shortest["role"] == "target"]
    lines = [
        line
        for (model, device), part in targets.groupby(["model", "device"], sort=False)
        for line in _of_target(f"`{model}` on {device}", part, shortest[shortest["role"] == "draft"])
    ]
    return "\n".join(f"- {line}" for line in lines)


def _of_target(name: str, target: pd.DataFrame, drafts: pd.DataFrame) -> Iterator[str]:
    """What the roof does between one token and a few, then what each of the kernels makes of it."""
    n = min(ROWS, int(target["n"].max()))
    by_n = target.assign(noisy=is_noisy(target)).set_index(["kernels", "pair", "n"]).unstack("n")
    seconds, roofs, noisy = by_n["seconds"], by_n["roof_seconds"], by_n["noisy"]
    quiet = ~(noisy[1].eq(True) | noisy[n].eq(True))
    at_best = (roofs[n] / roofs[1]).median()
    if not is_known(at_best):
        yield f"{name}: what the machine could do at best is not known."
    elif at_best < FLAT:
        yield (
            f"{name}: memory is the limit of a pass over 1 token and of one over {n} alike, which read the same weights, so that "
            f"verifying {n - 1} drafted tokens could cost one step."
        )
    else:
        yield (
            f"{name}: arithmetic is a limit here, for at best a pass over {n} tokens takes {at_best:.2f} times as long as one "
            "over 1."
        )
    for kernels in dict.fromkeys(target["kernels"]):
        usable = quiet.loc[kernels]
        if not usable.any():
            yield f"{name}, {kernels} kernels: too noisy to say; the machine was busy, or its speed changed."
            continue
        one = seconds.loc[kernels, 1][usable]
        v = (seconds.loc[kernels, n] / one).median()
        if is_known(v):
            words_of_v = _of_kernels(n, v, at_best)
            steps = drafts[(drafts["kernels"] == kernels) & (drafts["n"] == 1) & ~is_noisy(drafts)]
            c = ", ".join(_costs(one, steps))
            above = (one / roofs.loc[kernels, 1]).median()
            over_roof = f" A step of the target takes {above:.2f} times its roof." if is_known(above) else ""
            yield f"{name}, {kernels} kernels: {words_of_v}{f' c is {c}.' if c else ''}{over_roof}"


def _of_kernels(n: int, ratio: float, at_best: float) -> str:
    """v, and who makes it."""
    v = f"{ratio:.2f}"
    if not is_known(at_best):
        cause = ""
    elif float(v) < FLAT:
        cause = ", next to nothing"
    elif at_best < FLAT:
        cause = "; what lies above 1 is the kernels' doing, for arithmetic asks for none of it"
    elif float(v) <= FLAT * at_best:
        cause = ", which is what arithmetic asks for"
    else:
        cause = f", of which arithmetic asks for {at_best:.2f} and the kernels for the rest"
    return f"verification is {'cheap' if float(v) < CHEAP else 'dear'}, v = T({n}) / T(1) = {v}{cause}."


def _costs(one: pd.Series, drafts: pd.DataFrame) -> Iterator[str]:
    """c of each draft, beside its own pair's target."""
    for row in rows_of(drafts):
        c = row["seconds"] / one.get(row["pair"], float("nan"))
        if is_known(c):
            yield f"{c:.2f} with {row['model']}"
