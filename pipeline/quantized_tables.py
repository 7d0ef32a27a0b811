"""Rows of the tables on quantised drafts, from their cells: a cell holds several temperatures, and two treatments of the head.

A missing key is a KeyError here; `tables` knows whose file it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cells import label
from pipeline.prompt_tables import ALL
from specdec.stats import MIN_UNITS_FOR_INTERVAL, bootstrap_interval, ratio_of_sums
from specdec.theory import break_even_alpha, equal_speed_alpha

Record = dict[str, Any]

SIXTEEN_BITS = "bf16"  # the variant that the others of a timed pair are held against
HEADS = {"in": "", "out": "body_"}  # whether the LM head is rounded too, and how the cell's keys begin
ENDS = ("", "_lo", "_hi")

_VARIANT = ("pair", "target", "draft", "variant", "bits", "group_size", "grid", "method")
_SIZE = ("bits_per_weight", "weights", "weight_bytes", "other_bytes")
_ORIGIN = ("contexts", "contexts_sha256", "calibration_sha256", "calibration_tokens", "cpu")
_JUDGED = ("alpha", "alpha_change", "argmax_agreement", "tv")
_LOOPED = ("alpha", "alpha_overlap", "matched_alpha", "difference")


# Where a variant is judged (its head, a temperature), and how α changed there: the sum over positions, and how many, by prompt.
Place = tuple[str, float]
Changes = NDArray[np.float64]


def _ends(key: str) -> tuple[str, ...]:
    return tuple(f"{key}{end}" for end in ENDS)


ALPHA = (
    *_VARIANT,
    "head",
    *_SIZE,
    *("temperature", "prompts", "positions"),
    *_ends("alpha"),
    *_ends("alpha_unquantized"),
    *_ends("alpha_change"),
    *_ends("argmax_agreement"),
    *_ends("tv"),
    *("largest_excess", "perplexity", "perplexity_unquantized", "quantisation_seconds"),
    *_ORIGIN,
)
LOOP = (
    *("pair", "target", "draft", "variant", "temperature", "k", "prompts", "tested", "positions"),
    *(end for key in (*_LOOPED, "forced_alpha") for end in _ends(key)),
)
BY_CATEGORY = (
    *("pair", "target", "draft", "variant", "bits", "method", "temperature", "category", "prompts", "positions"),
    *_ends("alpha"),
)
# `difference` is the change of α of the first less that of the second, on the same prompts.
CONTRASTS = ("pair", "question", "variant", "other", "head", "temperature", *_ends("difference"))
METHOD, HEAD, TEMPERATURE = "method", "head", "temperature"  # the questions
# What a timed cell of a variant holds beside the keys of any other, and what is computed from the pair's rows together.
TIMED = ("variant", "bits", "group_size", "grid", "method", "bits_per_weight", "draft_bytes")
ALPHA_NEEDED = ("equal_speed_alpha", "break_even_alpha")


def alpha_rows(record: Record) -> list[Record]:
    """One row per treatment of the head and temperature.

    Raises:
        KeyError: the cell lacks a key.
    """
    common = {key: record[key] for key in (*_VARIANT, *_ORIGIN, "prompts", "quantisation_seconds")}
    rows = []
    for head, prefix in HEADS.items():
        size = {key: record[f"{prefix}{key}"] for key in _SIZE}
        rows += [
            {**common, "head": head, **size, "temperature": t, **_at(record, prefix, t)} for t in record["temperatures"]
        ]
    return rows


def _at(record: Record, prefix: str, temperature: float) -> Record:
    """What one variant is at one temperature."""
    end = label(temperature)
    texts = "greedy" if temperature == 0 else "sampled"  # which set of contexts is read at this temperature
    intervals = {
        **{f"{key}{e}": f"{prefix}{key}_{end}{e}" for key in _JUDGED for e in ENDS},
        **{f"alpha_unquantized{e}": f"alpha_unquantized_{end}{e}" for e in ENDS},
    }
    return {
        "positions": record[f"positions_{end}"],
        **{column: record[key] for column, key in intervals.items()},
        "largest_excess": record[f"{prefix}largest_excess_{end}"],
        "perplexity": record[f"{prefix}perplexity_{texts}"],
        "perplexity_unquantized": record[f"perplexity_unquantized_{texts}"],
    }


def category_rows(record: Record) -> list[Record]:
    """α behind the texts of each category of prompts, and of all of them, with the head rounded: a row per temperature too.

    Raises:
        KeyError: the cell lacks a key.
    """
    names = {key: record[key] for key in ("pair", "target", "draft", "variant", "bits", "method")}
    categories = [ALL, *dict.fromkeys(prompt["category"] for prompt in record["per_prompt"])]
    rows = []
    for t in record["temperatures"]:
        for category in categories:
            prompts = [prompt for prompt in record["per_prompt"] if category in (ALL, prompt["category"])]
            units = [_overlap(prompt, t) for prompt in prompts]
            value, (low, high) = ratio_of_sums(units), bootstrap_interval(units, ratio_of_sums)
            counts = {"prompts": len(units), "positions": int(sum(positions for _, positions in units))}
            alpha = {f"alpha{end}": v for end, v in zip(ENDS, (value, low, high), strict=True)}
            rows.append({**names, "temperature": t, "category": category, **counts, **alpha})
    return rows


def _overlap(prompt: Record, temperature: float) -> tuple[float, float]:
    """Σ min(p, q) summed over a prompt's positions, and how many these are."""
    sums, end = prompt["greedy" if temperature == 0 else "sampled"], label(temperature)
    return sums[f"overlap_{end}"], sums[f"positions_{end}"]


def forced(record: Record, temperatures: Sequence[float]) -> dict[float, Record]:
    """α behind the contexts of a variant's alpha cell, with the head rounded, by temperature.

    Raises:
        KeyError: the cell lacks a key, or was not measured at one of the temperatures.
    """
    return {t: {f"forced_alpha{e}": record[f"alpha_{label(t)}{e}"] for e in ENDS} for t in temperatures}


def loop_rows(record: Record, forced_alpha: dict[float, Record]) -> list[Record]:
    """One row per temperature, beside the α of the same variant behind the same prompts' texts, and behind all of them.

    Raises:
        KeyError: the cell lacks a key.
    """
    common = {key: record[key] for key in ("pair", "target", "draft", "variant", "k", "prompts")}
    rows = []
    for t in record["temperatures"]:
        values = {f"{key}{e}": record[f"{key}_{label(t)}{e}"] for key in _LOOPED for e in ENDS}
        counts = {key: record[f"{key}_{label(t)}"] for key in ("tested", "positions")}
        rows.append({**common, "temperature": t, **counts, **values, **forced_alpha[t]})
    return rows


def changes(record: Record) -> dict[Place, Changes]:
    """What a variant's α changed by, prompt by prompt.

    Raises:
        KeyError: the cell lacks a key.
    """
    return {
        (head, t): np.array([_change(prompt, prefix, t) for prompt in record["per_prompt"]], dtype=float)
        for head, prefix in HEADS.items()
        for t in record["temperatures"]
    }


def _change(prompt: Record, prefix: str, temperature: float) -> tuple[float, float]:
    sums, end = prompt["greedy" if temperature == 0 else "sampled"], label(temperature)
    return sums[f"{prefix}change_{end}"], sums[f"positions_{end}"]


def contrast_rows(records: Sequence[Record], changed: Sequence[dict[Place, Changes]]) -> list[Record]:
    """Of one pair's variants: a method against rounding to nearest on the same grid, the head as it is against rounded, and the
    lowest temperature against the highest.

    Args:
        records: cells of variants that were judged behind the same texts.
        changed: what `changes` gives for each.
    """
    rounded = {_grid(r): (r, c) for r, c in zip(records, changed, strict=True) if r["method"] == "rtn"}
    rows = []
    for record, change in zip(records, changed, strict=True):
        base, base_change = rounded.get(_grid(record), (record, change))
        for head, t in change if base is not record else ():
            rows.append(_contrast(METHOD, record, change, (head, t), base, base_change, (head, t)))
    for record, change in zip(records, changed, strict=True):
        temperatures = sorted({t for _, t in change})
        rows += [_contrast(HEAD, record, change, ("out", t), record, change, ("in", t)) for t in temperatures]
        if len(temperatures) > 1:
            first, last = temperatures[0], temperatures[-1]
            rows += [
                _contrast(TEMPERATURE, record, change, (head, first), record, change, (head, last)) for head in HEADS
            ]
    return rows


def _grid(record: Record) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("bits", "group_size", "grid"))


def _contrast(
    question: str, record: Record, change: dict[Place, Changes], place: Place, other: Record, its: Any, at: Place
) -> Record:
    value, low, high = paired_difference(change[place], its[at])
    names = {"pair": record["pair"], "question": question, "variant": record["variant"], "other": other["variant"]}
    head, temperature = place
    return {
        **names,
        "head": head,
        "temperature": temperature,
        "difference": value,
        "difference_lo": low,
        "difference_hi": high,
    }


def paired_difference(first: Changes, second: Changes) -> tuple[float | None, float | None, float | None]:
    """Mean change of the first less that of the second, and its interval by a bootstrap over their common prompts.

    The same draws as `specdec.stats.bootstrap_interval`, all at once: a study with every grid has hundreds of contrasts.

    Args:
        first, second: shape (prompts, 2), the change summed over a prompt's positions, and how many these are.
    """
    units = np.concatenate([first, second], axis=1)  # (prompts, 4)
    value = _difference(units.sum(axis=0))
    if len(units) < MIN_UNITS_FOR_INTERVAL or np.isnan(value):
        return None if np.isnan(value) else float(value), None, None
    draws = np.random.default_rng(0).integers(len(units), size=(2000, len(units)))
    low, high = np.nanquantile(_difference(units[draws].sum(axis=1)), [0.025, 0.975])
    return float(value), float(low), float(high)


def _difference(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shape (..., 4) to (...); NaN where there are no positions."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]


def with_alpha_needed(records: Sequence[Record]) -> list[Record]:
    """Timed cells and, by theory, the α that each would need: to be as fast as the pair's 16-bit draft, and to pay at all.

    v belongs to the target and k, so all rows of a pair share its mean. Empty where no α is enough, or there is nothing to
    compare with.
    """
    return [{**record, **_alpha_needed(record, _of_pair(records, record["pair"]))} for record in records]


def _of_pair(records: Sequence[Record], pair: str) -> list[Record]:
    return [record for record in records if record["pair"] == pair]


def _alpha_needed(record: Record, siblings: Sequence[Record]) -> Record:
    known_v = [other["verify_cost_ratio"] for other in siblings if other["verify_cost_ratio"] is not None]
    c, k = record["cost_coefficient"], record["k"]
    if c is None or not known_v:
        return dict.fromkeys(ALPHA_NEEDED)
    v = fmean(known_v)
    base = next((other for other in siblings if other["variant"] == SIXTEEN_BITS), None)
    equal = None
    if base is not None and base["alpha"] is not None and base["cost_coefficient"] is not None:
        equal = equal_speed_alpha(base["alpha"], k, base["cost_coefficient"], c, v)
    return {"equal_speed_alpha": equal, "break_even_alpha": break_even_alpha(k, c, v)}
