"""A study's cells made up from formulas, in a folder of their own: what tables, figures and report are tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import cells
from pipeline.study import Params, load_params
from specdec.stats import ratio
from specdec.theory import expected_tokens_per_round

PARAMS = """
models:
  small: {source: local, path: small, format: safetensors}
pairs:
  small_int8: {target: small, draft: int8}
  small_bf16: {target: small, draft: bf16}
  small_lookup: {target: small, draft: lookup}
studies:
  fake: &fake
    name: fake
    pairs: [small_int8, small_bf16, small_lookup]
    k: [1, 2, 4, 8]
    temperature: [0.3, 1.0, 1.5]
    benchmark_k: [4]
    detail_pairs: [small_int8]
    confidence: [0.0, 0.4, 0.8]
    confidence_k: 8
    identity_dtypes: [bfloat16, float16]
    prompts_per_category: 2
    max_new_tokens: 32
study: *fake
prompts: {file: prompts.jsonl, categories: [qa]}
decoding: {seed: 0, k: 4, temperature: 0.0, top_k: null, top_p: null, verifier: token}
timing: {runs: 5, warmup: 1, device: auto, dtype: float32, threads: null}
toy:
  k: [1, 2, 3, 4, 5, 6, 7, 8]
  temperature: [0.02, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
  seeds: 8
  k_for_temperature: 4
  max_new_tokens: 64
  prompt_tokens: 8
  runs: 5
"""
ALPHA = {"small_int8": 0.95, "small_bf16": 0.99, "small_lookup": 0.4, "toy": 0.96}
TOY_ALPHA = {0.02: 0.96, 0.1: 0.71, 0.2: 0.33, 0.5: 0.41, 1.0: 0.66, 2.0: 0.87, 5.0: 0.98}
C = {"small_int8": 0.45, "small_bf16": 0.7, "small_lookup": 0.01, "toy": 0.5}
ROUNDS = 120
NOT_TIMED = {
    *("expected_emitted_token", "expected_emitted_block"),
    *("block_gain", "block_gain_lo", "block_gain_hi"),
}


def write(root: Path, params_text: str = PARAMS) -> Params:
    """Write params.yaml and every cell that its study declares below `root`, which must be the working directory."""
    (root / "params.yaml").write_text(params_text, encoding="utf-8")
    params = load_params()
    study = params.study
    for pair in study.pairs:
        for k in study.k:
            cells.write_json(cells.sweep_k(study.name, pair, k), acceptance(pair, k))
        for t in study.temperature:
            record = acceptance(pair, params.decoding.k, temperature=t, alpha=ALPHA[pair] * (1 - 0.1 * t))
            cells.write_json(cells.sweep_temperature(study.name, pair, t), record)
        for k in study.benchmark_k:
            cells.write_json(cells.hf_benchmark(study.name, pair, k), benchmark(pair, k))
    for pair in study.detail_pairs:
        for t in study.temperature:
            record = acceptance(pair, params.decoding.k, temperature=t, alpha=ALPHA[pair] * (1 - 0.09 * t))
            cells.write_json(cells.sweep_block(study.name, pair, t), record | {"verifier": "block"})
        for threshold in study.confidence:
            record = unsure(pair, params.study.confidence_k, threshold)
            cells.write_json(cells.sweep_confidence(study.name, pair, threshold), record)
        for dtype in study.identity_dtypes:
            cells.write_json(cells.greedy_identity(study.name, pair, dtype), identity(pair, params.decoding.k, dtype))
    for k in params.toy.k:
        cells.write_json(cells.toy_k(k), acceptance("toy", k))
    for t in params.toy.temperature:
        record = acceptance("toy", params.toy.k_for_temperature, temperature=t, alpha=TOY_ALPHA[t])
        record |= {"argmax_agreement": 0.97, "limit_high_temperature": 1.0}
        cells.write_json(cells.toy_temperature(t), record)
    cells.write_json(cells.toy_benchmark(), benchmark("toy", params.toy.k_for_temperature))
    return params


def edit(path: Path, **values: Any) -> None:
    """Change keys of a cell."""
    cells.write_json(path, cells.read_json(path) | values)


def without_intervals(path: Path) -> None:
    """As a cell of few prompts is: the ends of every interval are null, in the lists of positions too."""
    ends = {key: value for key, value in cells.read_json(path).items() if key.endswith(("_lo", "_hi"))}
    edit(path, **{key: [None] * len(value) if isinstance(value, list) else None for key, value in ends.items()})


def acceptance(pair: str, k: int, *, temperature: float = 0.0, alpha: float | None = None) -> dict[str, Any]:
    """Rounds whose acceptance falls a little faster than i.i.d."""
    alpha = ALPHA[pair] if alpha is None else alpha
    accepted = [round(ROUNDS * (alpha * 0.99 ** (j - 1)) ** j) for j in range(1, k + 1)]
    tested = [ROUNDS, *accepted[:-1]]
    counted = sum(accepted) / sum(tested)
    tau = 1 + sum(accepted) / ROUNDS
    gained = sum(accepted) * (1 if pair == "small_lookup" else 1 + 0.02 * temperature)
    toy = pair == "toy"
    return {
        **({} if toy else {"study": "fake"}),
        "pair": pair,
        "target": "toy-target" if toy else "small",
        "draft": "toy-draft" if toy else pair.removeprefix("small_"),
        "k": k,
        "temperature": temperature,
        "top_k": None,
        "top_p": None,
        "verifier": "token",
        "confidence_threshold": 0.0,
        "seed": 0,
        "prompts": 12,
        "max_new_tokens": 32,
        "new_tokens": ROUNDS + sum(accepted),
        "rounds": ROUNDS,
        "proposed": ROUNDS * k,
        "accepted": sum(accepted),
        "tested": sum(tested),
        **interval("draft_acceptance_rate", sum(accepted) / (ROUNDS * k), 0.02),
        **interval("alpha", counted, 0.02),
        **interval("alpha_overlap", alpha, 0.01),
        **interval("mean_acceptance_length", tau, 0.2),
        "mean_accepted_per_round": sum(accepted) / ROUNDS,
        "mean_drafted_per_round": float(k),
        "iid_acceptance_length": expected_tokens_per_round(counted, k),
        **rates("acceptance_per_position", accepted, [ROUNDS] * k),
        **rates("conditional_acceptance_per_position", accepted, tested),
        "proposed_per_position": [ROUNDS] * k,
        "tested_per_position": tested,
        "per_prompt": [{"question_id": 1, "category": "qa", "per_round_drafted": [k] * ROUNDS}],
        "expected_emitted_token": float(ROUNDS + sum(accepted)),
        "expected_emitted_block": float(ROUNDS + gained),
        **interval("block_gain", (ROUNDS + gained) / (ROUNDS + sum(accepted)), 0 if gained == sum(accepted) else 0.004),
    }


def unsure(pair: str, k: int, threshold: float) -> dict[str, Any]:
    """A draft that stops early: it drafts less, and what it drafts is better."""
    drafted = max(1, round(k * (1 - 0.7 * threshold)))
    alpha = ALPHA[pair] + (1 - ALPHA[pair]) * threshold / 2
    return acceptance(pair, drafted, alpha=alpha) | {"k": k, "confidence_threshold": threshold}


def identity(pair: str, k: int, dtype: str) -> dict[str, Any]:
    """Two near-ties in 12 prompts of bfloat16, and none in any other format."""
    near_ties = 2 if dtype == "bfloat16" else 0
    ulps = [1.0, 2.5][:near_ties] + [None] * (12 - near_ties)
    return {
        "study": "fake",
        "pair": pair,
        "target": "small",
        "draft": pair.removeprefix("small_"),
        "k": k,
        "dtype": dtype,
        "max_new_tokens": 32,
        "cpu": "Imaginary CPU 9000",
        "device_logit_error": 0.004,
        "prompts": 12,
        "new_tokens": 384,
        "identical_prompts": 12 - near_ties,
        "near_ties": near_ties,
        "faults": 0,
        "limit_ulps": 4.0,
        "largest_gap": 0.3125 if near_ties else None,
        "largest_ulps": 2.5 if near_ties else None,
        "largest_emitted_ulps": 3.0 if near_ties else 0.0,
        "share_within_limit": 0.0546875 if near_ties else 0.01,
        "first_divergences": [None if gap is None else 7 for gap in ulps],
        "divergence_gaps": [None if gap is None else gap / 8 for gap in ulps],
        "divergence_ulps": ulps,
    }


def benchmark(pair: str, k: int) -> dict[str, Any]:
    """A timed cell that agrees with itself: measured = ideal × the three factors."""
    record = {key: value for key, value in acceptance(pair, k).items() if key not in NOT_TIMED}
    c, v, overhead = C[pair], 1.25, 0.95
    tau, iid = record["mean_acceptance_length"], record["iid_acceptance_length"]
    predicted, ideal = tau / (k * c + v), iid / (k * c + 1)
    speedup = predicted * overhead
    lookup = pair.endswith("lookup")
    return {
        **record,
        "backend": "toy" if pair == "toy" else "hf",
        "cpu": "Imaginary CPU 9000",
        "os": "Linux",
        "device": "cpu",
        "device_logit_error": 0.0,
        "device_name": "cpu",
        "dtype": "float32",
        "draft_dtype": None if lookup else "float32",
        "threads": 2,
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "runs": 5,
        "target_parameters": 41088 if pair == "toy" else 134_515_008,
        "draft_parameters": None if lookup else 134_515_008,
        "ar_tokens_per_second": 20.0,
        "spec_tokens_per_second": 20.0 * speedup,
        "hf_tokens_per_second": None if pair == "toy" else 22.2,
        **interval("speedup", speedup, 0.4 if lookup else 0.05),
        **interval("speedup_over_fastest", speedup * 0.9, 0.3 if lookup else 0.05),
        **interval("speedup_end_to_end", speedup * 0.97, 0.05),
        "fastest_baseline": "Hugging Face generate",
        **interval("ar_over_hf", 0.9, 0.02),
        **interval("noise_floor", 1.004, 0.01),
        "predicted_speedup": predicted,
        "ideal_speedup": ideal,
        "iid_factor": tau / iid,
        "verify_cost_factor": (k * c + 1) / (k * c + v),
        "overhead_factor": overhead,
        "cost_coefficient": c,
        "verify_cost_ratio": v,
        "identical": "identical" if pair != "small_bf16" else "identical but for 2 ties",
        "ties": 0,
        "identical_prompts": 12,
        "hf_identical_prompts": None if pair == "small_bf16" else 11,
        "unrepeatable_runs": 0,
        "peak_memory_bytes": 2 * 2**30,
        "samples": [{"question_id": 1, "seconds": [0.1, 0.2]}],
    }


def interval(key: str, value: float, half: float) -> dict[str, float]:
    return {key: value, f"{key}_lo": value - half, f"{key}_hi": value + half}


def rates(key: str, counts: list[int], of: list[int]) -> dict[str, list[float | None]]:
    """A position's rate, with an interval where anything stands behind it."""
    values = [ratio(n, m) for n, m in zip(counts, of, strict=True)]
    low = [None if value is None else max(0.0, value - 0.05) for value in values]
    high = [None if value is None else min(1.0, value + 0.05) for value in values]
    return {key: values, f"{key}_lo": low, f"{key}_hi": high}
