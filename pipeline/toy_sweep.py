"""Acceptance of the toy pair at one k (greedy) or one temperature: one cell of `toy_sweep_k` or `toy_sweep_temperature`.

Each seed gives a random prompt and a generator for the draws; the two models stay the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline import cells, cli
from pipeline.acceptance import ComparingVerifier, PromptResult, acceptance_record, gain_record, prompt_generator
from pipeline.study import Params, load_params
from specdec.drafters import ModelDrafter
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.models import count_parameters, random_prompt, toy_draft, toy_target
from specdec.stats import ratio

PROMPTS_PER_SEED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    axis = parser.add_mutually_exclusive_group(required=True)
    axis.add_argument("--k", type=int, help="draft tokens per round, greedy")
    axis.add_argument("--temperature", type=float, help="sampling temperature, at toy.k_for_temperature")
    parser.add_argument("--out", type=Path, required=True, help="the cell's JSON file")
    args = parser.parse_args()
    params = load_params()
    torch.set_num_threads(1)  # on matrices this small a second thread costs more than it brings
    if args.k is not None:
        record = measure(params, args.k, 0.0)
    else:
        record = measure(params, params.toy.k_for_temperature, args.temperature)
    cells.write_json(args.out, record)


def measure(params: Params, k: int, temperature: float) -> dict[str, Any]:
    """Decode random prompts with the toy pair, and measure how often the two argmaxes agree on greedy text."""
    target, draft = toy_target(), toy_draft()
    drafter = ModelDrafter(draft)
    results: list[PromptResult] = []
    verifiers: list[ComparingVerifier] = []
    agreements: list[bool] = []
    first = params.decoding.seed
    draws = [(seed, i) for seed in range(first, first + params.toy.seeds) for i in range(PROMPTS_PER_SEED)]
    for seed, i in tqdm(draws, desc=f"toy k={k} T={temperature}", unit="prompt"):
        generator = prompt_generator(seed, i)
        prompt = random_prompt(target, params.toy.prompt_tokens, generator)
        tokens = params.toy.max_new_tokens
        verifiers.append(ComparingVerifier(params.decoding.verifier))
        result = speculative_generate(
            target,
            prompt,
            drafter=drafter,
            k=k,
            max_new_tokens=tokens,
            temperature=temperature,
            verify=verifiers[-1],
            generator=generator,
        )
        results.append(PromptResult(f"{seed}/{i}", "toy", result.stats))
        greedy = autoregressive_generate(target, prompt, max_new_tokens=tokens) if temperature > 0 else result
        agreements += argmax_agreement(target, draft, greedy.sequences, prompt.shape[1])
    return {
        "pair": "toy",
        "target": "toy-target",
        "draft": "toy-draft",
        "parameters": count_parameters(target),
        "k": k,
        "temperature": temperature,
        "top_k": None,
        "top_p": None,
        "verifier": params.decoding.verifier,
        "confidence_threshold": 0.0,
        "seed": params.decoding.seed,
        "seeds": params.toy.seeds,
        "max_new_tokens": params.toy.max_new_tokens,
        "argmax_agreement": ratio(sum(agreements), len(agreements)),  # the limit of α as T → 0
        "limit_high_temperature": 1.0,  # both laws become uniform
        "cpu": cells.cpu(),  # where this was measured; nothing is derived from it
        **acceptance_record(results, params.decoding.verifier),
        **gain_record(verifiers),
    }


@torch.inference_mode()
def argmax_agreement(target: PreTrainedModel, draft: PreTrainedModel, text: Tensor, prompt_length: int) -> list[bool]:
    """Per generated position of `text`, shape (1, T): do both models find the same token most likely there?"""
    best = [model(text).logits[0, prompt_length - 1 : -1].argmax(dim=-1) for model in (target, draft)]
    return (best[0] == best[1]).tolist()


if __name__ == "__main__":
    cli.run(main)
