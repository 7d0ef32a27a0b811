"""Stage `quantized_loop`: does the decoding loop accept a variant's tokens as often as teacher forcing says?

The variant drafts for the target in the real loop, behind the prompts of a few of the contexts, and its acceptance there is set
beside that behind the beginnings of the same contexts. Greedily both see the same tokens; at T = 1 other ones of the same law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from pipeline import cells, cli
from pipeline.acceptance import prompt_generator
from pipeline.cells import label
from pipeline.context_sizes import contexts_spec
from pipeline.quantized_alpha import Bodies, Sums, judge
from pipeline.study import Params, load_params, pair_spec
from pipeline.texts import Text, first_per_category, read_contexts
from pipeline.variants import cell_parser, load_unquantized, parse
from specdec.drafters import ModelDrafter
from specdec.generate import speculative_generate
from specdec.models import vocabulary_size
from specdec.stats import AcceptanceStats, bootstrap_interval, ratio_of_sums

TEMPERATURES = (0.0, 1.0)  # those that the contexts were written at

Counts = tuple[
    float, float, float, float
]  # overlap and tested positions in the loop, overlap and positions by teacher forcing


def main() -> None:
    args = cell_parser(__doc__).parse_args()
    params = load_params()
    cells.write_json(args.out, measure(params, args.contexts, args.pair, args.variant))


def measure(params: Params, contexts_name: str, pair_name: str, variant_name: str) -> dict[str, Any]:
    """Decode and judge the first texts of each category, greedily and at T = 1."""
    variant, pair, spec = parse(variant_name), pair_spec(params, pair_name), contexts_spec(params, contexts_name)
    contexts = read_contexts(cells.contexts(contexts_name, pair_name))
    models = load_unquantized(params, pair_name, torch.device("cpu"), torch.float32)
    rounded = variant.of(models.draft, contexts.calibration)
    bodies = Bodies.of(models, rounded)
    record: dict[str, Any] = {
        "contexts": contexts_name,
        "pair": pair_name,
        "target": pair.target,
        "draft": models.draft_name,
        **variant.keys(),
        **contexts.hashes,
        "k": params.decoding.k,
        "verifier": "token",
        "seed": params.decoding.seed,
        "max_new_tokens": spec.loop_tokens,
        "temperatures": list(TEMPERATURES),
        "cpu": cells.cpu(),  # where this was measured
    }
    for temperature, kind in zip(TEMPERATURES, ("greedy", "sampled"), strict=True):
        texts = first_per_category(getattr(contexts, kind), spec.loop_prompts_per_category)
        looped, judged = [], []
        for text in tqdm(texts, desc=f"{pair_name} {variant_name} T={temperature:g}", unit="text"):
            looped.append(
                speculative_generate(
                    models.target,
                    text.prompt[None],
                    drafter=ModelDrafter(rounded.model, vocabulary=vocabulary_size(models.target)),
                    k=params.decoding.k,
                    max_new_tokens=spec.loop_tokens,
                    temperature=temperature,
                    eos_token_id=models.end_tokens,
                    generator=prompt_generator(params.decoding.seed, text.question_id),
                ).stats
            )
            judged.append(judge(kind, beginning(text, spec.loop_tokens), bodies, [1.0]))
        record |= {"prompts": len(texts), **comparison_record(looped, judged, label(temperature))}
    return record


def beginning(text: Text, count: int) -> Text:
    """Its first new tokens; how likely they are is not asked here."""
    return replace(text, new_tokens=text.new_tokens[:count], best=text.best[:count], log_likelihood=0.0)


def comparison_record(looped: Sequence[AcceptanceStats], judged: Sequence[Sums], name: str) -> dict[str, Any]:
    """α in the loop, counted and as mean overlap, that by teacher forcing, and the difference of the latter two.

    Args:
        looped, judged: one of each per prompt.
        name: of the temperature.
    """
    pooled = sum(looped, AcceptanceStats())
    counts: list[Counts] = [
        (stats.overlap, stats.tested, sums[f"overlap_{name}"], sums[f"positions_{name}"])
        for stats, sums in zip(looped, judged, strict=True)
    ]
    record: dict[str, Any] = {
        f"tested_{name}": pooled.tested,
        f"mean_acceptance_length_{name}": pooled.mean_acceptance_length,
        f"positions_{name}": int(sum(positions for *_, positions in counts)),
    }
    pairs: dict[str, list[tuple[float, float]]] = {
        "alpha": [(stats.accepted, stats.tested) for stats in looped],
        "alpha_overlap": [(overlap, tested) for overlap, tested, _, _ in counts],
        "matched_alpha": [(overlap, positions) for _, _, overlap, positions in counts],
    }
    for key, units in pairs.items():
        record[f"{key}_{name}"] = ratio_of_sums(units)
        record[f"{key}_{name}_lo"], record[f"{key}_{name}_hi"] = bootstrap_interval(units, ratio_of_sums)
    record[f"difference_{name}"] = difference(counts)
    record[f"difference_{name}_lo"], record[f"difference_{name}_hi"] = bootstrap_interval(counts, difference)
    return record


def difference(counts: Sequence[Counts]) -> float | None:
    """α of the loop less α by teacher forcing; the prompts are the same."""
    loop = ratio_of_sums([(overlap, tested) for overlap, tested, _, _ in counts])
    forced = ratio_of_sums([(overlap, positions) for _, _, overlap, positions in counts])
    return None if loop is None or forced is None else loop - forced


if __name__ == "__main__":
    cli.run(main)
