"""The report's part on llama.cpp; nothing for a study without such a pair."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from pipeline.wording import PAIR, UNKNOWN, Column, K, Row, interval, is_known, markdown, number, rows_of

LLAMA_CPP = (
    "Greedy decoding of the same weights in float32 on the same threads, in one interleaved run: plain decoding by llama.cpp, "
    "called through its low-level interface without samplers, beside plain and speculative decoding by us and HF generate. "
    "Ratios are of decoding alone, llama.cpp = 1. Output equal: prompts whose greedy text is that of our own plain decoding; its "
    "sums have another order, so two logits closer than a tie may swap. T(n): a pass over n tokens behind the same prompt."
)


def llama_cpp_section(table: pd.DataFrame) -> list[str]:
    """Blocks of text; none of an empty table."""
    if table.empty:
        return []
    return ["## Beside llama.cpp", LLAMA_CPP, _machine(table), _speeds(table), _passes(table), _findings(table)]


def _machine(table: pd.DataFrame) -> str:
    cpu, threads, package, kernels, torch = (
        " / ".join(str(value) for value in table[key].dropna().unique()) or UNKNOWN
        for key in ("cpu", "threads", "llama_cpp_python", "kernels", "torch")
    )
    return f"CPU {cpu}, threads {threads}; llama-cpp-python {package}; ours with {kernels} kernels, torch {torch}."


def _speeds(table: pd.DataFrame) -> str:
    columns: list[Column] = [
        PAIR,
        K,
        ("llama.cpp tok/s", number("llama_cpp_tokens_per_second", 1)),
        ("plain tok/s", number("ar_tokens_per_second", 1)),
        ("speculative tok/s", number("spec_tokens_per_second", 1)),
        ("HF generate tok/s", number("hf_tokens_per_second", 1)),
        ("plain / llama.cpp", interval("ar_over_llama_cpp")),
        ("speculative / llama.cpp", interval("spec_over_llama_cpp")),
        ("HF / llama.cpp", interval("hf_over_llama_cpp")),
    ]
    return markdown(table, columns)


def _passes(table: pd.DataFrame) -> str:
    def milliseconds(key: str) -> Callable[[Row], str]:
        return lambda row: number(key, 1)({key: 1000 * row[key]})

    columns: list[Column] = [
        PAIR,
        ("llama.cpp T(1), ms", milliseconds("llama_cpp_seconds_1")),
        ("llama.cpp T(5), ms", milliseconds("llama_cpp_seconds_5")),
        ("our T(1), ms", milliseconds("target_seconds_1")),
        ("our T(k+1), ms", milliseconds("target_seconds_k1")),
        ("llama.cpp output equal", lambda row: f"{row['llama_cpp_identical_prompts']} of {row['prompts']}"),
        ("differences that are ties", number("llama_cpp_ties", 0)),
        ("largest difference of logits", lambda row: f"{row['llama_cpp_logit_error']:.2g}"),
    ]
    return markdown(table, columns)


def _findings(table: pd.DataFrame) -> str:
    return "\n".join(_finding(row) for row in rows_of(table))


def _finding(row: Row) -> str:
    """Faster or slower is said only where the interval leaves out 1."""
    parts = []
    for key, name in (("ar", "our plain decoding"), ("spec", "our speculative decoding"), ("hf", "HF generate")):
        value, low, high = (row[f"{key}_over_llama_cpp{end}"] for end in ("", "_lo", "_hi"))
        if not is_known(low):
            verdict = "too few prompts for an interval"
        elif low <= 1 <= high:
            verdict = "not distinguishable from it"
        else:
            verdict = "faster" if value > 1 else "slower"
        parts.append(f"{name} {interval(f'{key}_over_llama_cpp')(row)}, {verdict}")
    return f"- `{row['pair']}`, speed over llama.cpp's plain decoding: {'; '.join(parts)}."
