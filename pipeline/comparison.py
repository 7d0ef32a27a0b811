"""Stage `comparison`: kernels, k and baselines of a pair timed against each other, in one interleaved run on the same prompts.

How much faster is speculative decoding than plain decoding with the same kernels, with the fastest kernels, than Hugging Face's
`generate` and its assisted generation; and does k: auto find the best fixed k?
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline import cells, cli, options
from pipeline.bench import Bench, device_logit_errors, peak_memory_bytes
from pipeline.contest import compete
from pipeline.machine import surroundings
from pipeline.methods import TextPrompt
from pipeline.prompts import encode_prompt, load_prompts, select_prompts
from pipeline.settings import setting_of
from pipeline.study import Params, load_params, pair_spec
from pipeline.weights import load_pair
from specdec.errors import InputError
from specdec.models import count_parameters, resolve_dtype


def main() -> None:
    args = options.cell_parser(__doc__, "a pair that `comparisons` of params.yaml has").parse_args()
    params = load_params()
    torch.set_num_threads(cells.read_json(cells.HARDWARE)["fingerprint"]["threads"])
    cells.write_json(args.out, measure(params, args.pair))


def measure(params: Params, pair_name: str) -> dict[str, Any]:
    pair, comparisons = pair_spec(params, pair_name), params.comparisons
    if pair_name not in comparisons:
        raise InputError(f"comparisons of params.yaml has no {pair_name!r}; allowed: {', '.join(comparisons)}.")
    spec = comparisons[pair_name]
    chosen = select_prompts(load_prompts(params.context_prompts), spec.categories, spec.prompts_per_category)
    device, dtype = options.placement(pair.device or params.timing.device), resolve_dtype(params.timing.dtype)
    loaded = load_pair(pair, params.models, device=device, dtype=dtype, manifest=cells.manifest(pair_name))
    prompts = [TextPrompt(p.question_id, p.category, encode_prompt(loaded.tokenizer, p)) for p in chosen]
    setting = setting_of(params, params.decoding.k, spec.max_new_tokens, loaded.end_tokens)
    names = {
        "study": params.study.name,
        "pair": pair_name,
        "target": pair.target,
        "draft": pair.draft,
        "target_revision": loaded.target_revision,
        "draft_revision": loaded.draft_revision,
    }
    bench = Bench(names, loaded.target, loaded.drafter, loaded.draft_parameters, prompts, loaded.end_tokens)
    device_errors, alpha = device_logit_errors(bench), spec.expected_alpha
    measured = compete(loaded.target, loaded.drafter, prompts, setting, spec.kernels, spec.k, alpha, pair_name)
    return {
        **names,
        "k": setting.k,
        "expected_alpha": alpha,
        "temperature": setting.sampling.temperature,
        "top_k": setting.sampling.top_k,
        "top_p": setting.sampling.top_p,
        "verifier": setting.verifier,
        "seed": setting.seed,
        "categories": spec.categories,
        "max_new_tokens": setting.max_new_tokens,
        "runs": setting.runs,
        **surroundings(loaded.target, loaded.drafter),
        **device_errors,
        "target_parameters": count_parameters(loaded.target),
        "draft_parameters": loaded.draft_parameters,
        "peak_memory_bytes": peak_memory_bytes(loaded.target.device),
        **measured,
    }


if __name__ == "__main__":
    cli.run(main)
