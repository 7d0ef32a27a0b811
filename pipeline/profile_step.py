"""Where the time of one decode step goes: what each kind of operator takes, then torch's table. Of a pair; not a stage.

The operators' times are those under the profiler, which slows everything down a little, small operators most.

python pipeline/profile_step.py --pair smollm2-135m_int8 --kernels packed --rows 5
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pipeline import cells, cli, options
from pipeline.cost_curve import models_of
from pipeline.machine import run_with
from pipeline.steps import Step, context_for, passes
from pipeline.study import KERNELS, load_params, pair_spec
from pipeline.weights import load_pair
from specdec.models import resolve_dtype
from specdec.timing import now

WARM_UP = 3  # calls that are not profiled
RUNS = 5  # of which the one of median length is told
# What an operator is by its name, the first that matches. Batched products are those of attention in models of one text.
KINDS = {
    "native code": r"specdec::native",
    "attention": r"attention|bmm|softmax",
    "matrix products": r"linear|::mm|addmm|_mm|matmul|::mv|gemm",
    "norms": r"norm|::(pow|mean|rsqrt)$",
    "copies and casts": r"copy|::(clone|contiguous|to|cat|stack|repeat|fill_|zero_)$",
    "compiled code": r"compiled|inductor|dynamo|cpp_fused|triton",
    "other operators": "",
}
OUTSIDE = "Python and overhead"


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
        print(described(step, args.top, loaded.target.device))


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


def described(step: Step, top: int, device: torch.device) -> str:
    """One call: its totals by kind, and the operators with most time of their own."""
    for _ in range(WARM_UP):
        step()
    plain = median(seconds(step, device) for _ in range(RUNS))
    wall, profiled = sorted((profiled_call(step, device) for _ in range(RUNS)), key=lambda call: call[0])[RUNS // 2]
    operators = profiled.key_averages()
    # On a GPU the time of an operator is that of the kernels it starts, which have rows of their own too.
    clock = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    called = [row for row in operators if row.device_type == DeviceType.CPU]
    times = [(row.key, getattr(row, clock) / 1e6) for row in called]
    count = sum(row.count for row in called)
    lines = [f"{1000 * plain:9.2f} ms  a step without the profiler, median of {RUNS}"]
    lines += [f"{1000 * wall:9.2f} ms  under it, median of {RUNS}, {count} calls of operators; of this"]
    lines += [f"{1000 * value:9.2f} ms  {value / wall:4.0%}  {kind}" for kind, value in by_kind(times, wall).items()]
    return "\n".join([*lines, operators.table(sort_by=f"self_{device.type}_time_total", row_limit=top)])


def profiled_call(step: Step, device: torch.device) -> tuple[float, profile]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        wall = seconds(step, device)
    return wall, profiled


def seconds(step: Step, device: torch.device) -> float:
    start = now(device)
    step()
    return now(device) - start


def by_kind(times: Iterable[tuple[str, float]], wall: float) -> Mapping[str, float]:
    """Seconds by kind of operator, and those of `wall` that no operator accounts for."""
    totals = dict.fromkeys(KINDS, 0.0)
    for name, value in times:
        totals[kind_of(name)] += value
    return totals | {OUTSIDE: wall - sum(totals.values())}


def kind_of(operator: str) -> str:
    return next(kind for kind, names in KINDS.items() if re.search(names, operator, re.IGNORECASE))


if __name__ == "__main__":
    cli.run(main)
