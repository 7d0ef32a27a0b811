"""Acceptance of a real pair at one k, temperature or confidence threshold: one cell of one of the `sweep_` stages.

Always float32 on the CPU: what is measured here is a property of the two models, not of the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pipeline import cells, cli
from pipeline.acceptance import ComparingVerifier, PromptResult, acceptance_record, gain_record, prompt_generator
from pipeline.prompts import encode_prompt, load_prompts, select_prompts
from pipeline.study import Params, load_params, pair_spec
from pipeline.weights import load_pair
from specdec.generate import speculative_generate
from specdec.sampling import SamplingConfig
from specdec.verify import VERIFIERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", required=True, help="a pair of params.yaml")
    axis = parser.add_mutually_exclusive_group(required=True)
    axis.add_argument("--k", type=int, help="draft tokens per round, at decoding.temperature")
    axis.add_argument("--temperature", type=float, help="sampling temperature, at decoding.k")
    axis.add_argument("--confidence", type=float, help="threshold that stops a draft, at study.confidence_k")
    parser.add_argument("--verifier", choices=list(VERIFIERS), help="default: decoding.verifier")
    parser.add_argument("--out", type=Path, required=True, help="the cell's JSON file")
    args = parser.parse_args()
    params = load_params()
    verifier = args.verifier or params.decoding.verifier
    if args.k is not None:
        record = measure(params, args.pair, args.k, params.decoding.temperature, verifier)
    elif args.temperature is not None:
        record = measure(params, args.pair, params.decoding.k, args.temperature, verifier)
    else:
        k, temperature = params.study.confidence_k, params.decoding.temperature
        record = measure(params, args.pair, k, temperature, verifier, args.confidence)
    cells.write_json(args.out, record)


def measure(
    params: Params, pair_name: str, k: int, temperature: float, verifier: str, confidence: float = 0.0
) -> dict[str, Any]:
    """Decode the study's prompts and describe the rounds."""
    pair = pair_spec(params, pair_name)
    sampling = SamplingConfig(temperature, params.decoding.top_k, params.decoding.top_p)
    chosen = select_prompts(
        load_prompts(params.prompts.file), params.prompts.categories, params.study.prompts_per_category
    )
    loaded = load_pair(
        pair,
        params.models,
        device=torch.device("cpu"),
        dtype=torch.float32,
        confidence_threshold=confidence,
        manifest=cells.manifest(pair_name),
    )
    results, verifiers = [], []
    for prompt in tqdm(chosen, desc=f"{pair_name} k={k} T={temperature}", unit="prompt"):
        verifiers.append(ComparingVerifier(verifier, loaded.end_tokens))
        result = speculative_generate(
            loaded.target,
            encode_prompt(loaded.tokenizer, prompt),
            drafter=loaded.drafter,
            k=k,
            max_new_tokens=params.study.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eos_token_id=loaded.end_tokens,
            verify=verifiers[-1],
            generator=prompt_generator(params.decoding.seed, prompt.question_id),
        )
        results.append(PromptResult(prompt.question_id, prompt.category, result.stats))
    return {
        "study": params.study.name,
        "pair": pair_name,
        "target": pair.target,
        "draft": pair.draft,
        "k": k,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "verifier": verifier,
        "confidence_threshold": confidence,
        "seed": params.decoding.seed,
        "max_new_tokens": params.study.max_new_tokens,
        "cpu": cells.cpu(),  # where this was measured; nothing is derived from it
        **acceptance_record(results, verifier),
        **gain_record(verifiers),
    }


if __name__ == "__main__":
    cli.run(main)
