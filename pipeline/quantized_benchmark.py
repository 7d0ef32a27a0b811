"""Stage `quantized_benchmark`: time a variant of a draft whose weights a low-bit kernel reads. One cell a variant.

Only such variants have a speed: widened weights are as slow as the draft was.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline import cells, cli, options
from pipeline.bench import Bench, measure
from pipeline.methods import TextPrompt
from pipeline.prompts import encode_prompt, load_prompts, select_prompts
from pipeline.settings import setting_of
from pipeline.study import Params, load_params, pair_spec
from pipeline.texts import read_contexts
from pipeline.variants import cell_parser, load_unquantized, parse
from specdec.drafters import ModelDrafter
from specdec.kernels import kernel_copy, stored_bytes
from specdec.models import count_parameters, resolve_dtype, vocabulary_size
from specdec.quantize import bfloat16_copy


def main() -> None:
    args = cell_parser(__doc__).parse_args()
    params = load_params()
    torch.set_num_threads(cells.read_json(cells.HARDWARE)["fingerprint"]["threads"])
    cells.write_json(args.out, time_variant(params, args.contexts, args.pair, args.variant))


def time_variant(params: Params, contexts_name: str, pair_name: str, variant_name: str) -> dict[str, Any]:
    """A cell of `hf_benchmark` with the variant as the draft, at decoding.k."""
    pair, variant = pair_spec(params, pair_name), parse(variant_name)
    device, dtype = options.placement(pair.device or params.timing.device), resolve_dtype(params.timing.dtype)
    contexts = read_contexts(cells.contexts(contexts_name, pair_name))
    models = load_unquantized(params, pair_name, device, dtype)
    rounded = variant.of(models.draft, contexts.calibration)
    draft = bfloat16_copy(models.draft) if variant.recipe is None else kernel_copy(rounded)
    bits_per_weight = rounded.cost.bits_per_weight
    del rounded  # a model of float weights, which need not lie in memory while the draft is timed
    chosen = select_prompts(
        load_prompts(params.prompts.file), params.prompts.categories, params.study.prompts_per_category
    )
    prompts = [TextPrompt(p.question_id, p.category, encode_prompt(models.tokenizer, p)) for p in chosen]
    names = {
        "study": params.study.name,
        "pair": pair_name,
        "target": pair.target,
        "draft": models.draft_name,
        "target_revision": models.loaded.target_revision,
        "draft_revision": models.loaded.draft_revision,
    }
    drafter = ModelDrafter(draft, vocabulary=vocabulary_size(models.target))
    bench = Bench(names, models.target, drafter, count_parameters(models.draft), prompts, models.end_tokens)
    # Hugging Face with the draft is a question of stage `comparison`.
    k, tokens = params.decoding.k, params.study.max_new_tokens
    setting = setting_of(params, k, tokens, models.end_tokens, kernels=params.timing.kernels, hf_assisted=False)
    return {
        **measure("hf", bench, setting),
        **variant.keys(),
        "contexts": contexts_name,
        "bits_per_weight": bits_per_weight,
        "draft_bytes": stored_bytes(draft),
    }


if __name__ == "__main__":
    cli.run(main)
