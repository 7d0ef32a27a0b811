"""Stage `cost_curve`: T(n), the time of a pass over n tokens, of a pair's target and draft on each of the kernels compared.

What a verification of k drafted tokens costs is T(k + 1), and plain decoding is T(1). Beside them what this machine could do: its
memory bandwidth by a large sum, its arithmetic by a large product. All passes take turns, so that all are of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline import cells, cli, options
from pipeline.curves import curve, roof
from pipeline.machine import draft_model, run_with, surroundings
from pipeline.steps import MACHINE, Step, context_for, machine_steps, passes, sampled, weights_read
from pipeline.study import RESERVED_DRAFTS, Params, load_params, pair_spec
from pipeline.weights import LoadedPair, load_pair
from specdec.errors import InputError
from specdec.models import count_parameters, resolve_dtype
from specdec.stats import ratio

ROLES = ("target", "draft")


def main() -> None:
    args = options.cell_parser(__doc__).parse_args()
    params = load_params()
    torch.set_num_threads(cells.read_json(cells.HARDWARE)["fingerprint"]["threads"])
    cells.write_json(args.out, measure(params, args.pair))


def measure(params: Params, pair_name: str) -> dict[str, Any]:
    pair = pair_spec(params, pair_name)
    device, dtype = options.placement(pair.device or params.timing.device), resolve_dtype(params.timing.dtype)
    loaded = load_pair(pair, params.models, device=device, dtype=dtype, manifest=cells.manifest(pair_name))
    models = models_of(loaded)
    kernels, contexts, rows = params.study.kernels_compared, params.cost_curve.contexts, params.cost_curve.rows
    steps, refusals = steps_of(models, kernels, contexts, rows)
    here = loaded.target.device
    seconds = sampled(steps | machine_steps(here), params.cost_curve.runs, here, f"{pair_name} T(n)")
    speeds = {name: ratio(work, median(seconds[name])) for name, work in MACHINE.items()}
    weights = {role: weights_of(role, models, pair.draft in RESERVED_DRAFTS) for role in models}
    curves = [
        {
            "role": role,
            "model": getattr(pair, role),
            "kernels": name,
            "context": context,
            **curve([seconds.get(f"{role} {name} {context} {n}", []) for n in range(1, rows + 1)]),
            "roof_seconds": roof(rows, *weights[role], *speeds.values()),
            "refusal": refusals.get((role, name)),
        }
        for role in models
        for name in kernels
        for context in contexts
    ]
    return {
        "study": params.study.name,
        "pair": pair_name,
        "target": pair.target,
        "draft": pair.draft,
        "target_revision": loaded.target_revision,
        "draft_revision": loaded.draft_revision,
        **surroundings(loaded.target, loaded.drafter),
        "runs": params.cost_curve.runs,
        "rows": rows,
        "target_parameters": count_parameters(loaded.target),
        "draft_parameters": loaded.draft_parameters,
        **{f"{role}_weight_bytes": weights[role][0] if role in weights else None for role in ROLES},
        "bytes_per_second": speeds["sum"],
        "operations_per_second": speeds["product"],
        **{f"{name}_samples": seconds[name] for name in MACHINE},
        **summary(curves, kernels, contexts[0]),
        "curves": curves,
    }


def models_of(loaded: LoadedPair) -> dict[str, PreTrainedModel]:
    """The models of transformers by role; a draft that copies text has none."""
    draft = draft_model(loaded.drafter)
    return {"target": loaded.target} | ({} if draft is None else {"draft": draft})


def steps_of(
    models: Mapping[str, PreTrainedModel], kernels: list[str], contexts: list[int], rows: int
) -> tuple[dict[str, Step], dict[tuple[str, str], str]]:
    """Every pass by "role kernels context n", those to be compared next to each other; and of kernels that do not run, why not.

    Raises:
        InputError: no kernels run the target, or its positions do not reach as far as the contexts.
    """
    runners, refusals = {}, {}
    for role, model in models.items():
        for name in kernels:
            try:
                runners[role, name] = run_with(model, name, draft=role == "draft")
            except InputError as error:  # the list is the whole study's, and not every pair and machine can do all
                refusals[role, name] = str(error)
    if not any(role == "target" for role, _ in runners):
        raise InputError(f"study.kernels_compared has no kernels for this target: {next(iter(refusals.values()))}.")
    found = {
        f"{role} {name} {context} {n}": step
        for context in contexts
        for (role, name), model in runners.items()
        for n, step in passes(model, context_for(models.values(), context), rows).items()
    }
    in_turn = [
        f"{role} {name} {context} {n}" for n in range(1, rows + 1) for context in contexts for role, name in runners
    ]
    return {name: found[name] for name in in_turn}, refusals


def weights_of(role: str, models: Mapping[str, PreTrainedModel], is_self_draft: bool) -> tuple[int, int]:
    """Bytes that a pass reads, and weights that it multiplies with: of a copy, whose few bits may lie packed, the target's."""
    read = weights_read(models[role])
    multiplied = weights_read(models["target"]) if is_self_draft else read
    return sum(t.nbytes for t in read), sum(t.numel() for t in multiplied)


def summary(curves: list[dict[str, Any]], kernels: list[str], context: int) -> dict[str, float | None]:
    """T(1), T(rows) and c behind the first context, for `dvc metrics show`, which leaves lists out."""
    found = {(c["role"], c["kernels"]): c["seconds"] for c in curves if c["context"] == context}
    record: dict[str, float | None] = {}
    for name in kernels:
        target, draft = (found.get((role, name), [None]) for role in ROLES)
        record |= {f"target_seconds_1_{name}": target[0], f"target_seconds_rows_{name}": target[-1]}
        known = target[0] is not None and draft[0] is not None
        record |= {f"draft_seconds_1_{name}": draft[0]}
        record |= {f"cost_coefficient_{name}": ratio(draft[0], target[0]) if known else None}
    return record


if __name__ == "__main__":
    cli.run(main)
