"""Where the time of one decode step goes: torch's operator table of a pass of a pair's target and of its draft. Not a stage.

python pipeline/profile_step.py --pair smollm2-135m_int8 --kernels packed --rows 5
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline import cells, cli, options
from pipeline.cost_curve import models_of
from pipeline.machine import run_with
from pipeline.steps import Step, context_for, passes
from pipeline.study import KERNELS, load_params, pair_spec
from pipeline.weights import load_pair
from specdec.models import resolve_dtype

WARM_UP = 3  # calls that are not profiled


def main() -> None:
    args = parse_arguments()
    params = load_params()
    pair = pair_spec(params, args.pair)
    device, dtype = options.placement(pair.device or params.timing.device), resolve_dtype(params.timing.dtype)
    if cells.HARDWARE.exists():  # as in timed cells
        torch.set_num_threads(cells.read_json(cells.HARDWARE)["fingerprint"]["threads"])
    loaded = load_pair(pair, params.models, device=device, dtype=dtype, manifest=cells.manifest(args.pair))
    models = models_of(loaded)
    context = context_for(models.values(), args.context)
    for role, model in models.items():
        step = passes(run_with(model, args.kernels, draft=role == "draft"), context, args.rows)[args.rows]
        print(f"{role} {getattr(pair, role)}, kernels {args.kernels}, {args.rows} behind {args.context} tokens")
        print(operator_table(step, args.top, loaded.target.device))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True, help="a pair of params.yaml")
    parser.add_argument("--kernels", default="default", choices=list(KERNELS), help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="tokens that the step feeds (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="tokens before them (default: %(default)s)")
    parser.add_argument("--top", type=int, default=20, help="operators shown (default: %(default)s)")
    args = parser.parse_args()
    for name in ("rows", "context", "top"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; allowed: integers of at least 1")
    return args


def operator_table(step: Step, top: int, device: torch.device) -> str:
    """The operators of one call, those with most time of their own first."""
    for _ in range(WARM_UP):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        step()
    return profiled.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=top)


if __name__ == "__main__":
    cli.run(main)
