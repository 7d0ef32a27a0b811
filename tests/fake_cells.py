"""A study's cells made up from formulas, in a folder of their own: what tables, figures and report are tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import cells
from pipeline.standings import SPECULATIVE, Contestant, line_up
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
    timed_pairs: [small_int8, small_bf16, small_lookup]
    detail_pairs: [small_int8]
    confidence: [0.0, 0.4, 0.8]
    confidence_k: 8
    identity_dtypes: [bfloat16, float16]
    quantized_pairs: [small_int8]
    contexts: few
    variants: [bf16, w8-row-sym-rtn, w4-g64-rtn, w4-g64-gptq, w4-g64-awq, w3-row-rtn]
    loop_variants: [bf16, w4-g64-gptq]
    kernel_variants: [bf16, w8-row-sym-rtn, w4-g64-gptq]
    kernels_compared: [default, joined, packed]
    comparisons: [small_int8, small_lookup]
    llama_cpp_pairs: []
    prompts_per_category: 2
    max_new_tokens: 32
study: *fake
prompts: {file: prompts.jsonl, categories: [qa]}
context_prompts: context_prompts.jsonl
contexts:
  few:
    prompts_per_category: 2
    calibration_per_category: 1
    calibration_tokens: 16
    max_new_tokens: 32
    temperature: [0.7, 1.0]
    loop_prompts_per_category: 2
    loop_tokens: 32
comparisons:
  small_int8:
    {categories: [qa], prompts_per_category: 2, max_new_tokens: 32, kernels: [default, joined, packed], k: [2, 8, auto],
     expected_alpha: 0.8}
  small_lookup: {categories: [qa], prompts_per_category: 2, max_new_tokens: 32, kernels: [default, packed], k: [4],
     expected_alpha: 0.8}
decoding: {seed: 0, k: 4, temperature: 0.0, top_k: null, top_p: null, verifier: token}
timing: {runs: 5, warmup: 1, device: auto, dtype: float32, threads: null, kernels: default}
cost_curve: {rows: 16, contexts: [64, 512], runs: 9}
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
CATEGORIES = ("qa", "multi_turn")  # of the even and of the odd prompts
LOSS = {16: 0.001, 8: 0.004, 4: 0.08, 3: 0.3}  # of α, by rounding body and head to the nearest at T = 0
METHOD = {"cast": 1.0, "rtn": 1.0, "gptq": 0.5, "awq": 0.8}  # how much of it the method leaves
TIMED_C = {16: 0.7, 8: 0.45, 4: 0.35}
LAYER_WEIGHTS, HEAD_WEIGHTS = 106_168_320, 28_311_552
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
    for pair in study.timed_pairs:
        for k in study.benchmark_k:
            cells.write_json(cells.hf_benchmark(study.name, pair, k), benchmark(pair, k))
        cells.write_json(cells.cost_curve(study.name, pair), cost_curve(pair, params))
    for pair in study.comparisons:
        cells.write_json(cells.comparison(study.name, pair), comparison(pair, params))
    for pair in study.detail_pairs:
        for t in study.temperature:
            record = acceptance(pair, params.decoding.k, temperature=t, alpha=ALPHA[pair] * (1 - 0.09 * t))
            cells.write_json(cells.sweep_block(study.name, pair, t), record | {"verifier": "block"})
        for threshold in study.confidence:
            record = unsure(pair, params.study.confidence_k, threshold)
            cells.write_json(cells.sweep_confidence(study.name, pair, threshold), record)
        for dtype in study.identity_dtypes:
            cells.write_json(cells.greedy_identity(study.name, pair, dtype), identity(pair, params.decoding.k, dtype))
    for pair in study.quantized_pairs:
        for variant in study.variants:
            path = cells.quantized_alpha(study.contexts, pair, variant)
            cells.write_json(path, quantized_alpha(pair, variant))
        for variant in study.loop_variants:
            path = cells.quantized_loop(study.contexts, pair, variant)
            cells.write_json(path, quantized_loop(pair, variant, params.decoding.k))
        for variant in study.kernel_variants:
            path = cells.quantized_benchmark(study.name, pair, variant)
            cells.write_json(path, quantized_benchmark(pair, variant, params.decoding.k))
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


def variant_keys(pair: str, variant: str) -> dict[str, Any]:
    """What a variant's name says."""
    names = {"pair": pair, "target": "small", "draft": pair.removeprefix("small_"), "variant": variant}
    if variant in ("bf16", "fp16"):
        return {**names, "bits": 16, "group_size": None, "grid": None, "method": "cast"}
    bits, group, *kind, method = variant.split("-")
    group_size = None if group == "row" else int(group[1:])
    return {**names, "bits": int(bits[1:]), "group_size": group_size, "grid": (kind or ["zero"])[0], "method": method}


def bits_per_weight(keys: dict[str, Any]) -> float:
    if keys["method"] == "cast":
        return 16.0
    stored = {"zero": 16 + keys["bits"], "min": 32, "sym": 16}[keys["grid"]]
    return keys["bits"] + stored / (keys["group_size"] or 576)


def quantized_loss(keys: dict[str, Any], head: str, temperature: float) -> float:
    """Of α: less with a better method, with the head as it is, and at higher temperatures."""
    return LOSS[keys["bits"]] * METHOD[keys["method"]] * (1 if head == "in" else 0.75) * (1 - 0.4 * temperature)


def quantized_alpha(pair: str, variant: str) -> dict[str, Any]:
    keys = variant_keys(pair, variant)
    bits = bits_per_weight(keys)
    record = {
        **keys,
        "contexts": "few",
        "contexts_sha256": "1" * 64,
        "calibration_sha256": None if keys["method"] in ("cast", "rtn") else "2" * 64,
        "calibration_tokens": None if keys["method"] in ("cast", "rtn") else 960,
        "cpu": "Imaginary CPU 9000",
        "prompts": 12,
        "temperatures": [0.0, 0.7, 1.0],
        "quantisation_seconds": {"cast": 0.1, "rtn": 0.5, "gptq": 150.0, "awq": 90.0}[keys["method"]],
        "perplexity_unquantized_greedy": 1.4,
        "perplexity_unquantized_sampled": 4.0,
        "per_prompt": [
            {"question_id": i, "category": CATEGORIES[i % 2], "greedy": {}, "sampled": {}} for i in range(12)
        ],
    }
    for head, prefix in (("in", ""), ("out", "body_")):
        weights = LAYER_WEIGHTS + (HEAD_WEIGHTS if head == "in" else 0)
        record |= {
            f"{prefix}bits_per_weight": bits,
            f"{prefix}weights": weights,
            f"{prefix}weight_bytes": round(weights * bits / 8),
            f"{prefix}other_bytes": 2 * HEAD_WEIGHTS,  # the embedding; a head left as it is is tied to it
            f"{prefix}perplexity_greedy": 1.4 * (1 + quantized_loss(keys, head, 0.0)),
            f"{prefix}perplexity_sampled": 4.0 * (1 + quantized_loss(keys, head, 1.0)),
        }
        for end, t in (("0", 0.0), ("0_7", 0.7), ("1", 1.0)):
            loss = quantized_loss(keys, head, t)
            record |= {
                f"positions_{end}": 384,
                **interval(f"alpha_unquantized_{end}", 1.0, 0.0),
                **interval(f"{prefix}alpha_{end}", 1 - loss, 0.2 * loss),
                **interval(f"{prefix}alpha_change_{end}", -loss, 0.2 * loss),
                **interval(f"{prefix}argmax_agreement_{end}", 1 - quantized_loss(keys, head, 0.0), 0.01),
                **interval(f"{prefix}tv_{end}", loss, 0.2 * loss),
                f"{prefix}largest_excess_{end}": 1e-7 if t else -0.01,
            }
            set_changes(record, prefix, end, [-loss * (0.8 + 0.2 * (i % 3)) for i in range(12)])
    return record


def set_changes(record: dict[str, Any], prefix: str, end: str, changes: list[float]) -> None:
    """Give each prompt of an alpha cell, which has 32 positions and a self-draft, its mean change of α."""
    for prompt, change in zip(record["per_prompt"], changes, strict=True):
        sums = prompt["greedy" if end == "0" else "sampled"]
        sums |= {f"{prefix}change_{end}": 32 * change, f"positions_{end}": 32.0}
        sums |= {f"{prefix}overlap_{end}": 32 * (1 + change)}


def quantized_loop(pair: str, variant: str, k: int) -> dict[str, Any]:
    """α of the loop a little above that behind fixed contexts."""
    keys = variant_keys(pair, variant)
    record = {**keys, "contexts": "few", "k": k, "prompts": 12, "temperatures": [0.0, 1.0], "cpu": "Imaginary CPU 9000"}
    for end, t in (("0", 0.0), ("1", 1.0)):
        loss = quantized_loss(keys, "in", t)
        record |= {
            f"tested_{end}": 300,
            **interval(f"alpha_{end}", 1 - 0.95 * loss, 0.3 * loss),
            **interval(f"alpha_overlap_{end}", 1 - 0.9 * loss, 0.25 * loss),
            f"positions_{end}": 360,
            **interval(f"matched_alpha_{end}", 1 - 0.95 * loss, 0.3 * loss),
            **interval(f"difference_{end}", 0.05 * loss, 0.1 * loss),
        }
    return record


def quantized_benchmark(pair: str, variant: str, k: int) -> dict[str, Any]:
    """A timed cell of a variant: fewer bits, a cheaper and a worse draft."""
    keys = variant_keys(pair, variant)
    bits = bits_per_weight(keys)
    record = benchmark(pair, k, alpha=1 - quantized_loss(keys, "in", 0.0), c=TIMED_C[keys["bits"]])
    record |= {**keys, "bits_per_weight": bits, "draft_dtype": "bfloat16"}
    return {**record, "draft_bytes": round((LAYER_WEIGHTS + HEAD_WEIGHTS) * bits / 8) + 2 * HEAD_WEIGHTS}


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
        "per_prompt": [_prompt(i, k, [sum(n > r for n in accepted) for r in range(i, ROUNDS, 12)]) for i in range(12)],
        "expected_emitted_token": float(ROUNDS + sum(accepted)),
        "expected_emitted_block": float(ROUNDS + gained),
        **interval("block_gain", (ROUNDS + gained) / (ROUNDS + sum(accepted)), 0 if gained == sum(accepted) else 0.004),
    }


def _prompt(i: int, k: int, accepted: list[int]) -> dict[str, Any]:
    drafted = {f"per_round_{key}": [k] * len(accepted) for key in ("drafted", "proposed")}
    return {"question_id": i, "category": CATEGORIES[i % 2], "per_round_accepted": accepted, **drafted}


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


def benchmark(pair: str, k: int, *, alpha: float | None = None, c: float | None = None) -> dict[str, Any]:
    """A timed cell that agrees with itself: measured = ideal × the three factors."""
    record = {key: value for key, value in acceptance(pair, k, alpha=alpha).items() if key not in NOT_TIMED}
    v, overhead = 1.25, 0.95
    c = C[pair] if c is None else c
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
        "kernels": "default",
        "kernels_seconds": 0.5,
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
        "hf_assisted_tokens_per_second": None if pair == "toy" else 16.0,
        **interval("speedup_over_hf_assisted", speedup * 1.25, 0.06),
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
        "hf_assisted_identical_prompts": None if pair == "small_bf16" else 10,
        "unrepeatable_runs": 0,
        "peak_memory_bytes": 2 * 2**30,
        "samples": [_sample(i, speedup) for i in range(12)],
    }


def _sample(i: int, speedup: float) -> dict[str, Any]:
    """Plain decoding at 20 tokens per second; even prompts gain a little more than odd ones."""
    seconds = {"ar": [1.5, 1.6, 1.9], "spec": [1.6 / speedup * (0.95 + 0.1 * (i % 2))] * 3}
    tokens = dict.fromkeys(seconds, 32)
    return {"question_id": i, "category": CATEGORIES[i % 2], "decode_seconds": seconds, "new_tokens": tokens}


KERNEL_SECONDS = {"default": 0.05, "joined": 0.04, "packed": 0.03}  # T(1) of the target
WEIGHT_BYTES = 4 * (LAYER_WEIGHTS + HEAD_WEIGHTS)


def cost_curve(pair: str, params: Params) -> dict[str, Any]:
    """T(n) = T(1) + (n − 1) · T(1) / 10, and a little more behind a longer context; of a draft, C times as much."""
    copied = pair.endswith("lookup")
    bytes_per_second, operations_per_second = 20e9, 100e9
    curves = []
    for role, factor in (("target", 1.0), ("draft", C[pair])):
        for kernels in params.study.kernels_compared if role == "target" or not copied else ():
            for context in params.cost_curve.contexts:
                one = factor * (KERNEL_SECONDS[kernels] + context * 1e-6)
                seconds = [one * (1 + (n - 1) / 10) for n in range(1, params.cost_curve.rows + 1)]
                curves.append(
                    {
                        "role": role,
                        "model": "small" if role == "target" else pair.removeprefix("small_"),
                        "kernels": kernels,
                        "context": context,
                        "seconds": seconds,
                        "seconds_lo": [0.98 * value for value in seconds],
                        "seconds_hi": [1.02 * value for value in seconds],
                        "samples": [[value] * params.cost_curve.runs for value in seconds],
                        "roof_seconds": [
                            max(factor * WEIGHT_BYTES / bytes_per_second, WEIGHT_BYTES / 2 * n / operations_per_second)
                            for n in range(1, params.cost_curve.rows + 1)
                        ],
                        "refusal": None,
                    }
                )
    return {
        "study": "fake",
        "pair": pair,
        "target": "small",
        "draft": pair.removeprefix("small_"),
        "cpu": "Imaginary CPU 9000",
        "device": "cpu",
        "device_name": "cpu",
        "dtype": "float32",
        "draft_dtype": None if copied else "bfloat16",
        "threads": 2,
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "runs": params.cost_curve.runs,
        "target_weight_bytes": WEIGHT_BYTES,
        "draft_weight_bytes": None if copied else round(C[pair] * WEIGHT_BYTES),
        "bytes_per_second": bytes_per_second,
        "operations_per_second": operations_per_second,
        "curves": curves,
    }


PLAIN_SPEED = {"default": 20.0, "joined": 25.0, "packed": 30.0}  # tokens per second
SPEEDUP = {1: 1.2, 2: 1.3, 3: 1.4, 4: 1.5, 8: 1.1, "auto": 1.48}


def comparison(pair: str, params: Params) -> dict[str, Any]:
    """Faster kernels, and a k of 4 that is the best; Hugging Face's lie a little below the default kernels."""
    spec = params.comparisons[pair]
    run = [name for name in spec.kernels if name in PLAIN_SPEED]
    line = line_up(run, params.decoding.k, spec.k, assisted=True)
    speeds = {x.name: _compared_speed(x) for x in line}
    drafting = [x for x in line if x.method == SPECULATIVE]
    best, plain = max((x.name for x in drafting), key=speeds.__getitem__), f"ar {run[-1]}"
    fixed = max((x for x in drafting if x.kernels == run[-1] and x.k != "auto"), key=lambda x: speeds[x.name])
    auto = next((x.name for x in drafting if x.k == "auto"), None)
    over_fixed: dict[str, Any] = interval("auto_over_best_fixed_k", speeds[auto or best] / speeds[fixed.name], 0.02)
    surroundings = {key: benchmark(pair, params.decoding.k)[key] for key in SURROUNDINGS}
    return {
        **surroundings,
        "study": "fake",
        "top_k": None,
        "top_p": None,
        "max_new_tokens": spec.max_new_tokens,
        "fastest_plain": plain,
        "fastest_speculative": best,
        "best_over_same_kernels": best,
        "best_fixed_k": fixed.k if auto else None,
        **(over_fixed if auto else dict.fromkeys(over_fixed)),
        **interval("ar_over_hf", speeds[plain] / speeds["hf"], 0.02),
        **interval("noise_floor", 1.002, 0.01),
        "contestants": [_contestant(x, speeds, plain) for x in line],
        "kernels_run": [{"kernels": name, "cost_coefficient": C[pair]} for name in run],
        "refusals": [],
        "samples": [{"question_id": 1, "decode_seconds": {"hf": "0.100000 0.200000"}}],
    }


SURROUNDINGS = (
    *("pair", "target", "draft", "prompts", "temperature", "verifier", "runs", "cpu", "device", "device_name"),
    *("dtype", "draft_dtype", "threads", "torch", "transformers", "peak_memory_bytes"),
)


def _compared_speed(x: Contestant) -> float:
    if x.method in ("hf", "hf_assisted"):
        return {"hf": 18.0, "hf_assisted": 22.0}[x.method]
    return PLAIN_SPEED[x.kernels or ""] * (SPEEDUP[x.k] if x.k else 1)


def _contestant(x: Contestant, speeds: dict[str, float], plain: str) -> dict[str, Any]:
    speed, drafts = speeds[x.name], x.method == SPECULATIVE

    def over(key: str, slow: str | None) -> dict[str, Any]:
        return interval(key, speed / speeds[slow], 0.05) if slow else dict.fromkeys((key, f"{key}_lo", f"{key}_hi"))

    measured = interval("measured_over_predicted", 0.95, 0.02)
    assisted = next(name for name in speeds if name.startswith("hf_assisted"))
    return {
        "name": x.name,
        "method": x.method,
        "kernels": x.kernels,
        "k": x.k,
        "tokens_per_second": speed,
        "end_to_end_tokens_per_second": 0.8 * speed,
        "alpha": 0.9 if drafts else None,
        "mean_acceptance_length": 2 * SPEEDUP[x.k or 0] if drafts else None,
        "mean_drafted_per_round": 3.5 if drafts else None,
        **over("speedup", f"ar {x.kernels}" if drafts else None),
        **over("speedup_over_fastest", plain if drafts else None),
        **over("speedup_over_hf", "hf" if x.kernels else None),
        **over("speedup_over_hf_assisted", assisted if drafts else None),
        "predicted_speedup": SPEEDUP[x.k or 0] / 0.95 if drafts else None,
        **(measured if drafts else dict.fromkeys(measured)),
        "identical": "identical",
        "identical_prompts": 12,
        "ties": 0,
        "unrepeatable_runs": 0,
    }


def interval(key: str, value: float, half: float) -> dict[str, float]:
    return {key: value, f"{key}_lo": value - half, f"{key}_hi": value + half}


def rates(key: str, counts: list[int], of: list[int]) -> dict[str, list[float | None]]:
    """A position's rate, with an interval where anything stands behind it."""
    values = [ratio(n, m) for n, m in zip(counts, of, strict=True)]
    low = [None if value is None else max(0.0, value - 0.05) for value in values]
    high = [None if value is None else min(1.0, value + 0.05) for value in values]
    return {key: values, f"{key}_lo": low, f"{key}_hi": high}
