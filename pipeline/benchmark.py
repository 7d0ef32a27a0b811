"""Time speculative decoding against plain decoding and against Hugging Face generate, on one machine.

    python pipeline/benchmark.py --backend toy
    python pipeline/benchmark.py --backend hf --target smollm2-135m --draft int8 --k 4

As a stage of the study (--cell) everything but the pair and k comes from params.yaml and metrics/hardware.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from pipeline import cells, cli, options
from pipeline.acceptance import prompt_generator
from pipeline.bench import Bench, measure
from pipeline.methods import Setting, TextPrompt
from pipeline.prompts import encode_prompt, load_prompts, select_prompts
from pipeline.settings import setting_of
from pipeline.study import AUTO, Pair, Params, load_params, pair_spec
from pipeline.weights import load_pair
from specdec.drafters import ModelDrafter
from specdec.memory import SPREAD, Placement
from specdec.models import count_parameters, random_prompt, resolve_device, resolve_dtype, toy_draft, toy_target
from specdec.sampling import SamplingConfig

TOY_PROMPTS = 12
TOY_THREADS = 1  # on matrices this small a second thread costs more than it brings


def main() -> None:
    args = parse_arguments()
    params = load_params()
    if args.cell:
        threads = cells.read_json(cells.HARDWARE)["fingerprint"]["threads"]
        torch.set_num_threads(TOY_THREADS if args.backend == "toy" else threads)
        record = toy_cell(params) if args.backend == "toy" else hf_cell(params, args.pair, args.k)
    else:
        torch.set_num_threads(args.threads or (TOY_THREADS if args.backend == "toy" else torch.get_num_threads()))
        record = alone(params, args)
    print(render(record))
    if args.json is not None:
        cells.write_json(args.json, record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["toy", "hf"], default="toy", help="random toy models, or real weights")
    options.add_decoding_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each method and prompt (default: 5)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's; 1 for the toy pair)")
    parser.add_argument(
        "--prompts-per-category", type=int, default=2, help="of the prompts file that params.yaml names (default: 2)"
    )
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--cell", action="store_true", help="measure a cell of the study: settings from params.yaml")
    parser.add_argument("--pair", help="with --cell --backend hf: a pair of params.yaml")
    parser.set_defaults(kernels=AUTO)
    args = parser.parse_args()
    options.check_decoding_options(parser, args, least_k=1)  # at k = 0 there would be nothing to compare
    if args.cell:
        for name, value in vars(args).items():
            if name not in ("cell", "backend", "pair", "k", "json") and value != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} is {value} with --cell; allowed: only what params.yaml says")
    for name, least in (("runs", 2), ("threads", 1), ("prompts_per_category", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; allowed: integers of at least {least}")
    if args.backend == "toy":
        for name in ("target", "draft"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} is {getattr(args, name)} with the toy pair; allowed: only with --backend hf")
        if args.kernels == AUTO:  # models so small have nothing to read, and toy cells of the study run so
            args.kernels = "default"
    args.target = args.target or options.DEFAULT_TARGET
    args.draft = args.draft or options.DEFAULT_DRAFT
    if args.cell and args.backend == "hf" and args.pair is None:
        parser.error("--cell --backend hf needs --pair, a pair of params.yaml")
    return args


def toy_cell(params: Params) -> dict[str, Any]:
    toy = params.toy
    k, tokens = toy.k_for_temperature, toy.max_new_tokens
    setting = setting_of(params, k, tokens, [], sampling=SamplingConfig(), runs=toy.runs)
    device, dtype = toy_device(params.timing.device), resolve_dtype(params.timing.dtype)
    return measure("toy", toy_bench(device, dtype, params.toy.prompt_tokens, params.decoding.seed), setting)


def hf_cell(params: Params, pair_name: str, k: int) -> dict[str, Any]:
    pair = pair_spec(params, pair_name)
    device, dtype = options.placement(pair.device or params.timing.device), resolve_dtype(params.timing.dtype)
    names = {"study": params.study.name, "pair": pair_name}
    per_category, manifest = params.study.prompts_per_category, cells.manifest(pair_name)
    bench = hf_bench(names, pair, params, per_category, device, dtype, manifest=manifest)
    # Hugging Face with the draft is a question of stage `comparison`.
    setting = setting_of(
        params, k, params.study.max_new_tokens, bench.end_tokens, kernels=params.timing.kernels, hf_assisted=False
    )
    return measure("hf", bench, setting)


def alone(params: Params, args: argparse.Namespace) -> dict[str, Any]:
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p)
    dtype = resolve_dtype(args.dtype)
    if args.backend == "toy":
        device = toy_device(args.device)
        bench = toy_bench(device, dtype, params.toy.prompt_tokens, args.seed, args.confidence)
    else:
        pair = Pair.model_construct(target=args.target, draft=args.draft)  # unlike in params.yaml, folders are allowed
        names = {"study": None, "pair": f"{args.target} + {args.draft}"}
        placed = options.placement(args.device)
        bench = hf_bench(names, pair, params, args.prompts_per_category, placed, dtype, args.confidence)
    setting = Setting(
        args.k,
        sampling,
        args.max_new_tokens,
        bench.end_tokens,
        args.seed,
        args.runs,
        warmup=1,
        verifier=args.verifier,
        kernels=args.kernels,
    )
    return measure(args.backend, bench, setting)


def toy_device(name: str) -> torch.device:
    """There is nothing to spread."""
    return resolve_device("auto" if name == SPREAD else name)


def toy_bench(
    device: torch.device, dtype: torch.dtype, prompt_tokens: int, seed: int, confidence: float = 0.0
) -> Bench:
    target, draft = (cast(PreTrainedModel, Module.to(m, device, dtype)) for m in (toy_target(), toy_draft()))
    prompts = [
        TextPrompt(i, "toy", random_prompt(target, prompt_tokens, prompt_generator(seed, i)))
        for i in range(TOY_PROMPTS)
    ]
    names = {"study": None, "pair": "toy", "target": "toy-target", "draft": "toy-draft"}
    names |= {"target_revision": None, "draft_revision": None}
    return Bench(names, target, ModelDrafter(draft, confidence), count_parameters(draft), prompts, [])


def hf_bench(
    names: dict[str, Any],
    pair: Pair,
    params: Params,
    per_category: int,
    device: Placement,
    dtype: torch.dtype,
    confidence: float = 0.0,
    manifest: Path | None = None,
) -> Bench:
    chosen = select_prompts(load_prompts(params.prompts.file), params.prompts.categories, per_category)
    loaded = load_pair(
        pair, params.models, device=device, dtype=dtype, confidence_threshold=confidence, manifest=manifest
    )
    prompts = [TextPrompt(p.question_id, p.category, encode_prompt(loaded.tokenizer, p)) for p in chosen]
    names = {**names, "target": pair.target, "draft": pair.draft}
    names |= {"target_revision": loaded.target_revision, "draft_revision": loaded.draft_revision}
    return Bench(names, loaded.target, loaded.drafter, loaded.draft_parameters, prompts, loaded.end_tokens)


def render(record: dict[str, Any]) -> str:
    """The record as lines that a person reads."""

    def number(key: str, digits: int = 3) -> str:
        value = record[key]
        return "–" if value is None else f"{value:.{digits}f}"

    def interval(key: str) -> str:
        low, high = record[f"{key}_lo"], record[f"{key}_hi"]
        bounds = "" if low is None else f"   95 % interval {low:.3f} to {high:.3f}"
        return f"{number(key)}{bounds}"

    draft_size = f"{record['draft_parameters']:,} parameters" if record["draft_parameters"] else "no model"
    sampling = "greedy" if record["temperature"] == 0 else f"temperature {record['temperature']}"
    dtypes = record["dtype"]
    if record["draft_dtype"] not in (None, record["dtype"]):
        dtypes += f" (draft: {record['draft_dtype']})"
    threshold = record["confidence_threshold"]
    stopped = f", stopped below a confidence of {threshold:g}" if threshold > 0 else ""
    rows = [
        ("target", f"{record['target']} ({record['target_parameters']:,} parameters)"),
        ("draft", f"{record['draft']} ({draft_size})"),
        ("backend", f"{record['backend']}, {record['device']}, {dtypes}, CPU threads: {record['threads']}"),
        ("kernels", record["kernels"]),
        ("decoding", f"k = {record['k']}, {sampling}, {record['prompts']} prompts, {record['new_tokens']} new tokens"),
        ("verifier", record["verifier"]),
        ("drafted per round", number("mean_drafted_per_round", 2) + stopped),
        ("alpha, accepted / tested", interval("alpha")),
        ("alpha, mean overlap of p and q", interval("alpha_overlap")),
        ("acceptance rate, accepted / proposed", interval("draft_acceptance_rate")),
        ("accepted per round", number("mean_accepted_per_round")),
        ("tokens per round, tau", interval("mean_acceptance_length")),
        ("plain decoding, tokens/s", number("ar_tokens_per_second", 1)),
        ("speculative decoding, tokens/s", number("spec_tokens_per_second", 1)),
        ("Hugging Face generate, tokens/s", number("hf_tokens_per_second", 1)),
        ("Hugging Face generate with the draft, tokens/s", number("hf_assisted_tokens_per_second", 1)),
        ("speed-up over plain decoding", interval("speedup")),
        (f"speed-up over the fastest ({record['fastest_baseline']})", interval("speedup_over_fastest")),
        ("speed-up over Hugging Face with the draft", interval("speedup_over_hf_assisted")),
        ("speed-up, prompt included", interval("speedup_end_to_end")),
        ("predicted speed-up, tau / (kc + v)", number("predicted_speedup")),
        ("cost coefficient c, verify cost ratio v", f"{number('cost_coefficient')}, {number('verify_cost_ratio')}"),
        ("noise floor, plain against plain", interval("noise_floor")),
        ("greedy output against plain decoding", record["identical"]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


if __name__ == "__main__":
    cli.run(main)
