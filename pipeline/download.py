"""Stage `download`: put a pair's weights into models/, and write down what they are.

Cells depend on this manifest, so other weights mean new measurements. It lies in git: on a fresh clone the stage is up to date
without any weights, and the first cell that needs them fetches them. To fetch them beforehand: `dvc repro -f -s download`.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeline import cli
from pipeline.cells import write_json
from pipeline.study import RESERVED_DRAFTS, HubModel, load_params, pair_spec
from pipeline.weights import check_recorded, describe, fetch_model, load_pair, pinned, read_manifest
from specdec.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetch, check and convert the weights of a pair, and write its manifest."
    )
    parser.add_argument("--pair", required=True, help="a pair of params.yaml")
    parser.add_argument("--out", type=Path, required=True, help="the manifest, a JSON file")
    args = parser.parse_args()
    params = load_params()
    pair = pair_spec(params, args.pair)
    recorded = read_manifest(args.out)
    # What another pair's manifest says of a branch holds for this one too.
    others = []
    for path in sorted(args.out.parent.glob("*.json")):
        with suppress(InputError):  # one that is broken is its own pair's fault
            others.append(read_manifest(path))
    models = pinned(params.models, recorded, *others)
    manifest: dict[str, dict[str, Any]] = {}
    for role, name in (("target", pair.target), ("draft", pair.draft)):
        manifest[role] = {"name": name}
        if name not in RESERVED_DRAFTS:
            path, record = fetch_model(name, models[name])
            check_recorded(record, recorded.get(role, {}), args.out)
            manifest[role] |= describe(path, record)
        if isinstance(params.models.get(name), HubModel):
            manifest[role]["source"] = params.models[name].model_dump()  # with the branch that was asked for
            if manifest[role]["revision"] == recorded.get(role, {}).get("revision"):
                # Without the hub the licence is not known: that is no news of the weights.
                manifest[role]["licence"] = manifest[role]["licence"] or recorded[role].get("licence")
    if pair.draft not in RESERVED_DRAFTS:
        # A draft that does not fit must stop here: DVC deletes the results of the cells behind before it runs them.
        load_pair(pair, models, device=torch.device("cpu"), dtype=torch.float32)
    write_json(args.out, {"pair": args.pair, **manifest})


if __name__ == "__main__":
    cli.run(main)
