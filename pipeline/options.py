"""The command-line options of benchmark.py and chat.py that say what decodes and how, and those of a stage's cell."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.study import AUTO, DEVICES, KERNELS
from specdec.memory import SPREAD, Placement
from specdec.models import resolve_device
from specdec.sampling import SamplingConfig
from specdec.verify import VERIFIERS

DEFAULT_TARGET, DEFAULT_DRAFT = "smollm2-135m", "int8"


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; a target or draft that is not given is None."""
    kinds = "a model of params.yaml, a local folder, organisation/name@revision on the hub"
    parser.add_argument("--target", help=f"{kinds} (default: {DEFAULT_TARGET})")
    parser.add_argument("--draft", help=f"{kinds}, int4, int8, bf16 or lookup (default: {DEFAULT_DRAFT})")
    parser.add_argument("--k", type=int, default=4, help="draft tokens per round (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, help="keep the K likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens up to this probability (default: all)")
    parser.add_argument("--verifier", default="token", choices=list(VERIFIERS), help="(default: %(default)s)")
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.0,
        help="stop a draft behind a token less probable than this (default: never)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--device",
        default="auto",
        choices=list(DEVICES),
        help="auto is the first one here of cuda, mps, cpu; spread lays a large target over all (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--kernels",
        default="default",
        choices=[AUTO, *KERNELS],
        help="how matrices run, see timing.kernels in params.yaml (default: %(default)s)",
    )


def cell_parser(description: str | None, pair: str = "a pair of params.yaml") -> argparse.ArgumentParser:
    """Options of a stage whose cells are pairs; `pair` says which."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True, help=pair)
    parser.add_argument("--out", type=Path, required=True, help="the cell's JSON file")
    return parser


def placement(device: str) -> Placement:
    """What `load_pair` calls the device of that name in params.yaml or on a command line."""
    return SPREAD if device == SPREAD else resolve_device(device)


def check_decoding_options(parser: argparse.ArgumentParser, args: argparse.Namespace, least_k: int) -> None:
    """Refuse numbers out of range, before anything is loaded.

    Raises:
        InputError: temperature, top_k or top_p; the other options exit with 2 and one sentence, as argparse does.
    """
    for name, least in (("k", least_k), ("max_new_tokens", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: integers of at least {least}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed is {args.seed}; allowed: integers from 0 to 2^63 - 1")
    if not 0 <= args.confidence <= 1:
        parser.error(f"--confidence is {args.confidence}; allowed: a number from 0 to 1")
    SamplingConfig(args.temperature, args.top_k, args.top_p)
