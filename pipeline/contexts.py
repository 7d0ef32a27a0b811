"""Stage `contexts`: let a pair's target write the texts behind which its draft's variants are judged.

Greedy and at T = 1, with Hugging Face's batched `generate`, because texts are all that is wanted. Always float32 on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pipeline import cells, cli
from pipeline.context_sizes import contexts_spec
from pipeline.prompts import Prompt, encode_prompt, load_prompts, select_prompts
from pipeline.study import Params, load_params, pair_spec
from pipeline.texts import Text, hashes, join, log_likelihood
from pipeline.weights import LoadedPair, load_pair
from specdec.cache import context_length
from specdec.errors import InputError

BATCH = 42  # texts written together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", required=True, help="contexts of params.yaml")
    parser.add_argument("--pair", required=True, help="a pair of params.yaml")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    args = parser.parse_args()
    params = load_params()
    cells.write_json(args.out, write(params, args.contexts, args.pair))


def write(params: Params, name: str, pair_name: str) -> dict[str, Any]:
    """All texts of a pair's target, as the record of the file."""
    spec = contexts_spec(params, name)
    count, calibrating = spec.prompts_per_category, spec.calibration_per_category
    prompts = load_prompts(params.context_prompts)
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    chosen = select_prompts(prompts, categories, count + calibrating)
    own_place = {prompt.question_id: place for place, prompt in enumerate(chosen)}
    judged = [p for p in chosen if own_place[p.question_id] % (count + calibrating) < count]
    others = [p for p in chosen if p not in judged]
    pair = pair_spec(params, pair_name)
    # Nothing of the draft is needed, and `lookup` loads none.
    loaded = load_pair(
        pair.model_copy(update={"draft": "lookup"}),
        params.models,
        device=torch.device("cpu"),
        dtype=torch.float32,
        manifest=cells.manifest(pair_name),
    )
    seed, new = params.decoding.seed, spec.max_new_tokens
    greedy = judged_texts(loaded, judged, answers(loaded, judged, new, None))
    sampled = judged_texts(loaded, judged, answers(loaded, judged, new, seed))
    calibration = [torch.cat(parts) for parts in answers(loaded, others, spec.calibration_tokens, seed + 1)]
    record: dict[str, Any] = {
        "contexts": name,
        "pair": pair_name,
        "target": pair.target,
        "seed": seed,
        "max_new_tokens": new,
        "temperatures": spec.temperature,
        "cpu": cells.cpu(),
        "greedy": [text.record() for text in greedy],
        "sampled": [text.record() for text in sampled],
        "calibration": [join(text[: spec.calibration_tokens]) for text in calibration],
        "greedy_positions": sum(len(text.new_tokens) for text in greedy),
        "sampled_positions": sum(len(text.new_tokens) for text in sampled),
        # Batches and single passes round differently, so that a near-tie may be decided otherwise.
        "greedy_not_best": sum(int((text.new_tokens != text.best).sum()) for text in greedy),
    }
    return record | hashes(record)


def answers(loaded: LoadedPair, prompts: Sequence[Prompt], new: int, seed: int | None) -> list[tuple[Tensor, Tensor]]:
    """Each prompt and the target's answer, in the order of the prompts: at T = 1 drawn from `seed`, or greedy ones.

    Raises:
        InputError: a prompt leaves no room for `new` tokens.
    """
    ids = [encode_prompt(loaded.tokenizer, prompt)[0] for prompt in prompts]
    longest, room = max(map(len, ids)), context_length(loaded.target)
    if longest + new > room:
        raise InputError(
            f"{new} new tokens behind a prompt of {longest} are more than the {room} that the target can read; "
            "allowed: fewer (contexts.max_new_tokens), or shorter prompts."
        )
    by_length = sorted(range(len(ids)), key=lambda place: len(ids[place]))  # so that little is padded
    found: dict[int, Tensor] = {}
    with torch.random.fork_rng(devices=[]):  # `generate` draws from the global generator
        if seed is not None:
            torch.manual_seed(seed)
        batches = [by_length[start : start + BATCH] for start in range(0, len(by_length), BATCH)]
        for places in tqdm(batches, desc="greedy" if seed is None else "T = 1", unit="batch"):
            rows = generate(loaded.target, [ids[place] for place in places], new, loaded.end_tokens, seed is not None)
            found |= dict(zip(places, rows, strict=True))
    return [(prompt, found[place]) for place, prompt in enumerate(ids)]


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Tensor], new: int, ends: list[int], sample: bool) -> list[Tensor]:
    """New tokens of each prompt, shape (T,), up to and with the first end token."""
    longest, padding = max(map(len, prompts)), (ends or [0])[0]
    ids = torch.full((len(prompts), longest), padding)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    rows = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        eos_token_id=ends or None,
        pad_token_id=padding,
        **({"do_sample": False} | options),
    )[:, longest:]
    return [row[: next((n + 1 for n, token in enumerate(row.tolist()) if token in ends), len(row))] for row in rows]


@torch.inference_mode()
def judged_texts(loaded: LoadedPair, prompts: Sequence[Prompt], texts: Sequence[tuple[Tensor, Tensor]]) -> list[Text]:
    """The texts with what the target makes of each in a single pass."""
    found = []
    for prompt, (ids, new) in tqdm(list(zip(prompts, texts, strict=True)), desc="judging", unit="text"):
        logits = loaded.target(torch.cat([ids, new[:-1]])[None], logits_to_keep=len(new)).logits[0]
        best = logits.argmax(dim=-1)
        found.append(Text(prompt.question_id, prompt.category, ids, new, best, log_likelihood(logits, new)))
    return found


if __name__ == "__main__":
    cli.run(main)
