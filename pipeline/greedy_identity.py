"""Is greedy speculative output plain greedy output in a coarser number format, and if not, was it a near-tie?

In float32 every timed cell compares the two, and a difference that is no tie fails it. In bfloat16 one pass over k + 1 tokens and
k + 1 passes over one often round two good tokens to another order. Each such divergence is told with its gap, and so is how much
of the text lies within the limit that makes it a near-tie: a limit that most positions pass would excuse anything. CPU only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pipeline import cells, cli
from pipeline.prompts import encode_prompt, load_prompts, select_prompts
from pipeline.study import Params, load_params, pair_spec
from pipeline.weights import load_pair
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.identity import NEAR_TIE_ULPS, check_device, check_greedy_identity, emitted_gaps
from specdec.models import resolve_dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", required=True, help="a pair of params.yaml")
    parser.add_argument(
        "--dtype", required=True, choices=["bfloat16", "float16"], help="the number format of the target"
    )
    parser.add_argument("--out", type=Path, required=True, help="the cell's JSON file")
    args = parser.parse_args()
    params = load_params()
    cells.write_json(args.out, measure(params, args.pair, args.dtype))


def measure(params: Params, pair_name: str, dtype: str) -> dict[str, Any]:
    """Decode every prompt twice and compare."""
    pair = pair_spec(params, pair_name)
    chosen = select_prompts(
        load_prompts(params.prompts.file), params.prompts.categories, params.study.prompts_per_category
    )
    cpu, manifest = torch.device("cpu"), cells.manifest(pair_name)
    loaded = load_pair(pair, params.models, device=cpu, dtype=resolve_dtype(dtype), manifest=manifest)
    prompts = [encode_prompt(loaded.tokenizer, prompt) for prompt in chosen]
    device_error = check_device(loaded.target, prompts[0])
    rows = []
    for prompt in tqdm(prompts, desc=f"{pair_name} {dtype}", unit="prompt"):
        options: dict[str, Any] = {
            "max_new_tokens": params.study.max_new_tokens,
            "eos_token_id": loaded.end_tokens,
        }
        plain = autoregressive_generate(loaded.target, prompt, **options).new_tokens
        speculative = speculative_generate(
            loaded.target, prompt, drafter=loaded.drafter, k=params.decoding.k, **options
        ).new_tokens
        rows.append(compare(loaded.target, prompt, plain, speculative))
    return {
        "study": params.study.name,
        "pair": pair_name,
        "target": pair.target,
        "draft": pair.draft,
        "k": params.decoding.k,
        "dtype": dtype,
        "max_new_tokens": params.study.max_new_tokens,
        "cpu": cells.cpu(),  # where this was measured; nothing is derived from it
        "device_logit_error": device_error,
        **identity_record(rows),
    }


def compare(target: Any, prompt: torch.Tensor, plain: tuple[int, ...], speculative: tuple[int, ...]) -> dict[str, Any]:
    """One prompt: where the two texts part, how far apart the two tokens were, and how near the best every token was."""
    report = check_greedy_identity(target, prompt, plain, speculative)
    gaps = emitted_gaps(target, prompt, speculative)
    at = report.first_divergence
    stopped = report.top2_gap == float("inf")  # one text is the beginning of the other
    gap = None if stopped else report.top2_gap
    return {
        "new_tokens": len(speculative),
        "matches": report.matches,
        "first_divergence": at,
        "gap": gap,
        "ulps": None if gap is None or at is None else gap / float(gaps.ulp[at]),
        "emitted_ulps": float((gaps.below_best / gaps.ulp).max()),
        "within_limit": int((gaps.top2 <= NEAR_TIE_ULPS * gaps.ulp).sum()),
    }


def identity_record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts pooled. A divergence is a near-tie up to NEAR_TIE_ULPS, else a fault."""
    matching = sum(row["matches"] for row in rows)
    near_ties = sum(row["ulps"] is not None and row["ulps"] <= NEAR_TIE_ULPS for row in rows)
    new_tokens = sum(row["new_tokens"] for row in rows)
    return {
        "prompts": len(rows),
        "new_tokens": new_tokens,
        "identical_prompts": matching,
        "near_ties": near_ties,
        "faults": len(rows) - matching - near_ties,
        "limit_ulps": NEAR_TIE_ULPS,
        "largest_gap": max((row["gap"] for row in rows if row["gap"] is not None), default=None),
        "largest_ulps": max((row["ulps"] for row in rows if row["ulps"] is not None), default=None),
        "largest_emitted_ulps": max(row["emitted_ulps"] for row in rows),
        "share_within_limit": sum(row["within_limit"] for row in rows) / new_tokens,
        "first_divergences": [row["first_divergence"] for row in rows],
        "divergence_gaps": [row["gap"] for row in rows],
        "divergence_ulps": [row["ulps"] for row in rows],
    }


if __name__ == "__main__":
    cli.run(main)
