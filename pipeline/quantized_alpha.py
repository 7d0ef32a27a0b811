"""Stage `quantized_alpha`: what a variant of a draft agrees on with the target, behind texts that the target wrote.

Every variant is judged behind the same texts, so that two of them differ by what they are, and not by where their own decoding
led them. Always float32 on the CPU with widened weights: nothing here is a speed. Each variant is judged twice, with its LM head
rounded like the rest, and (keys `body_...`) with the head left as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from pipeline import cells, cli
from pipeline.cells import label
from pipeline.study import Params, load_params, pair_spec
from pipeline.texts import Text, log_likelihood, read_contexts
from pipeline.variants import Unquantized, cell_parser, load_unquantized, parse
from specdec.errors import InputError
from specdec.lowbit import Cost, Rounded
from specdec.models import vocabulary_size
from specdec.sampling import SamplingConfig, to_probs
from specdec.stats import bootstrap_interval, ratio_of_sums
from specdec.verify import overlap

HEADS = ("", "body_")  # the LM head rounded, or as it is
POSITIONS = 64  # judged at once: laws of more are new memory each time, which costs more than the arithmetic
Sums = dict[str, float]  # of one text, by key


def main() -> None:
    args = cell_parser(__doc__).parse_args()
    params = load_params()
    cells.write_json(args.out, measure(params, args.contexts, args.pair, args.variant))


def measure(params: Params, contexts_name: str, pair_name: str, variant_name: str) -> dict[str, Any]:
    """Make the variant, read all texts with it, and compare its laws with those of target and unquantised draft."""
    variant, pair = parse(variant_name), pair_spec(params, pair_name)
    contexts = read_contexts(cells.contexts(contexts_name, pair_name))
    models = load_unquantized(params, pair_name, torch.device("cpu"), torch.float32)
    start = time.perf_counter()
    rounded = variant.of(models.draft, contexts.calibration)
    seconds = time.perf_counter() - start
    bodies = Bodies.of(models, rounded)
    bodies.check(contexts.greedy[0].prompt[:8])
    texts = [("greedy", text) for text in contexts.greedy] + [("sampled", text) for text in contexts.sampled]
    results: dict[str, list[Sums]] = {"greedy": [], "sampled": []}
    for kind, text in tqdm(texts, desc=f"{pair_name} {variant_name}", unit="text"):
        results[kind].append(judge(kind, text, bodies, contexts.temperatures))
    return {
        "contexts": contexts_name,
        "pair": pair_name,
        "target": pair.target,
        "draft": models.draft_name,
        **variant.keys(),
        **contexts.hashes,
        "calibration_tokens": sum(map(len, contexts.calibration)),
        "quantisation_seconds": seconds,
        "cpu": cells.cpu(),  # where this was measured
        **cost_record(rounded.cost, ""),
        **cost_record(rounded.body_cost, "body_"),
        **agreement_record(results["greedy"], results["sampled"], contexts.temperatures),
        "per_prompt": raw(contexts.greedy, results),
    }


class Body:
    """A model up to the states that its LM head makes logits of, and the heads that may stand on it.

    Args:
        heads: None for its own alone.
        vocabulary: how many ids the target knows; one of tokenizer's models may be padded to more or fewer.
    """

    def __init__(self, model: Any, vocabulary: int, heads: Sequence[Any] | None = None) -> None:
        self._model = model
        self._heads = heads or (model.get_output_embeddings(),)
        self._vocabulary = vocabulary

    @torch.inference_mode()
    def check(self, tokens: Tensor) -> None:
        """
        Raises:
            InputError: the model's logits are more than its head's output, so that no other head can take its place.
        """
        own = self.logits(self._states(tokens, 1))[0]
        if not torch.allclose(own, self._fit(self._model(tokens[None], use_cache=False).logits[0, -1:]), atol=1e-3):
            kind = type(self._model).__name__
            raise InputError(
                f"{kind} does more to its logits than its LM head; allowed: models of the Llama or GPT-2 kind."
            )

    def states(self, text: Text) -> Tensor:
        """Those that foretell each new token of the text, shape (n, width)."""
        return self._states(text.tokens[:-1], len(text.new_tokens))

    def logits(self, states: Tensor) -> list[Tensor]:
        """For each head, shape (n, V)."""
        return [self._fit(head(states)) for head in self._heads]

    def _states(self, tokens: Tensor, count: int) -> Tensor:
        states: Tensor = self._model.base_model(tokens[None], use_cache=False).last_hidden_state[0, -count:]
        return states

    def _fit(self, logits: Tensor) -> Tensor:
        """An id that the draft does not have has probability 0, as in the decoding loop."""
        missing = self._vocabulary - logits.shape[-1]
        return functional.pad(logits, (0, missing), value=-math.inf) if missing > 0 else logits[:, : self._vocabulary]


@dataclass(frozen=True)
class Bodies:
    """
    Args:
        draft: None where the draft is the target itself.
        variant: with two heads, in the order of HEADS.
    """

    target: Body
    draft: Body | None
    variant: Body

    @staticmethod
    def of(models: Unquantized, rounded: Rounded) -> Bodies:
        vocabulary = vocabulary_size(models.target)
        heads = [model.get_output_embeddings() for model in (rounded.model, models.draft)]
        draft = None if models.draft is models.target else Body(models.draft, vocabulary)
        return Bodies(Body(models.target, vocabulary), draft, Body(rounded.model, vocabulary, heads))

    def check(self, tokens: Tensor) -> None:
        for body in (self.target, self.draft, self.variant):
            if body is not None:
                body.check(tokens)


@torch.inference_mode()
def judge(kind: str, text: Text, bodies: Bodies, temperatures: Sequence[float]) -> Sums:
    """One text: sums over its new tokens. Greedy texts are judged at T = 0, sampled ones at every T above."""
    variant = bodies.variant.states(text)
    draft = None if bodies.draft is None else bodies.draft.states(text)
    target = None if kind == "greedy" else bodies.target.states(text)  # of greedy texts its argmax is known
    parts = []
    for start in range(0, len(text.new_tokens), POSITIONS):
        some = slice(start, start + POSITIONS)
        variants = dict(zip(HEADS, bodies.variant.logits(variant[some]), strict=True))
        base = None if bodies.draft is None or draft is None else bodies.draft.logits(draft[some])[0]
        new, best = text.new_tokens[some], text.best[some]
        sums: Sums = {f"{head}log_likelihood": log_likelihood(logits, new) for head, logits in variants.items()}
        if base is not None:
            sums["base_log_likelihood"] = log_likelihood(base, new)
        if target is None:
            base_best = best if base is None else base.argmax(dim=-1)
            sums |= greedy_sums({head: logits.argmax(dim=-1) for head, logits in variants.items()}, base_best, best)
        else:
            wanted = bodies.target.logits(target[some])[0]
            for temperature in temperatures:
                sampling = SamplingConfig(temperature)
                p = to_probs(wanted, sampling)
                q = p if base is None else to_probs(base, sampling)
                laws = {head: to_probs(logits, sampling) for head, logits in variants.items()}
                sums |= sampled_sums(laws, q, p, label(temperature))
        parts.append(sums)
    itself = {} if bodies.draft else {"base_log_likelihood": text.log_likelihood}
    return {key: (max if "excess_" in key else sum)(part[key] for part in parts) for key in parts[0]} | itself


def greedy_sums(variants: Mapping[str, Tensor], base: Tensor, best: Tensor) -> Sums:
    """At T = 0 a law is one token, its argmax.

    Args:
        variants: argmax of the variant by head, each of shape (n,).
        base, best: argmax of the unquantised draft and of the target.
    """
    return _sums(
        {head: (variant == best).double() for head, variant in variants.items()},
        (base == best).double(),
        {head: (variant != base).double() for head, variant in variants.items()},
        {head: (variant == best).double() for head, variant in variants.items()},
        label(0.0),
    )


def sampled_sums(variants: Mapping[str, Tensor], q: Tensor, p: Tensor, name: str) -> Sums:
    """
    Args:
        variants: laws of the variant by head; q, p: of the unquantised draft and of the target; each of shape (n, V).
        name: of the temperature.
    """
    best = p.argmax(dim=-1)
    overlaps = {head: overlap(p, law).double() for head, law in variants.items()}
    # Of a self-draft q is p, and one overlap tells both.
    distances = {head: 1 - (overlaps[head] if q is p else overlap(q, law).double()) for head, law in variants.items()}
    agreements = {head: (law.argmax(dim=-1) == best).double() for head, law in variants.items()}
    base = torch.ones(len(p), dtype=torch.float64) if q is p else overlap(p, q).double()
    return _sums(overlaps, base, distances, agreements, name)


def _sums(
    overlaps: Mapping[str, Tensor],
    base: Tensor,
    distances: Mapping[str, Tensor],
    agreements: Mapping[str, Tensor],
    name: str,
) -> Sums:
    sums = {f"positions_{name}": float(len(base)), f"base_overlap_{name}": float(base.sum())}
    for head in overlaps:
        change = overlaps[head] - base
        sums |= {
            f"{head}overlap_{name}": float(overlaps[head].sum()),
            f"{head}change_{name}": float(change.sum()),
            f"{head}tv_{name}": float(distances[head].sum()),
            f"{head}agreement_{name}": float(agreements[head].sum()),
            # |β(p, q̂) − β(p, q)| ≤ TV(q, q̂) at every position, but for rounding
            f"{head}excess_{name}": float((change.abs() - distances[head]).max()),
        }
    return sums


def cost_record(cost: Cost, head: str) -> dict[str, Any]:
    return {
        f"{head}bits_per_weight": cost.bits_per_weight,
        f"{head}weights": cost.weights,
        f"{head}weight_bytes": cost.bytes,
        f"{head}other_bytes": cost.other_bytes,
    }


def agreement_record(greedy: Sequence[Sums], sampled: Sequence[Sums], temperatures: Sequence[float]) -> dict[str, Any]:
    """Texts pooled; intervals are over prompts."""
    record: dict[str, Any] = {"prompts": len(greedy), "temperatures": [0.0, *temperatures]}
    for temperature in record["temperatures"]:
        texts, name = (greedy if temperature == 0 else sampled), label(temperature)
        record[f"positions_{name}"] = int(sum(text[f"positions_{name}"] for text in texts))
        mean = _means(record, texts, name)
        mean("alpha_unquantized", "base_overlap")
        for head in HEADS:
            mean(f"{head}alpha", f"{head}overlap")
            mean(f"{head}alpha_change", f"{head}change")
            mean(f"{head}tv", f"{head}tv")
            mean(f"{head}argmax_agreement", f"{head}agreement")
            record[f"{head}largest_excess_{name}"] = max(text[f"{head}excess_{name}"] for text in texts)
    for kind, texts, name in (("greedy", greedy, label(0.0)), ("sampled", sampled, label(temperatures[0]))):
        tokens = sum(text[f"positions_{name}"] for text in texts)
        for key, source in (("perplexity_unquantized", "base_"), *((f"{head}perplexity", head) for head in HEADS)):
            record[f"{key}_{kind}"] = math.exp(-sum(text[f"{source}log_likelihood"] for text in texts) / tokens)
    return record


def _means(record: dict[str, Any], texts: Sequence[Sums], name: str) -> Callable[[str, str], None]:
    """A function that adds the mean over positions of a summed quantity, with its interval."""

    def mean(key: str, summed: str) -> None:
        pairs = [(text[f"{summed}_{name}"], text[f"positions_{name}"]) for text in texts]
        record[f"{key}_{name}"] = ratio_of_sums(pairs)
        record[f"{key}_{name}_lo"], record[f"{key}_{name}_hi"] = bootstrap_interval(pairs, ratio_of_sums)

    return mean


def raw(texts: Sequence[Text], results: Mapping[str, Sequence[Sums]]) -> list[dict[str, Any]]:
    return [
        {"question_id": text.question_id, "category": text.category, "greedy": greedy, "sampled": sampled}
        for text, greedy, sampled in zip(texts, results["greedy"], results["sampled"], strict=True)
    ]


if __name__ == "__main__":
    cli.run(main)
