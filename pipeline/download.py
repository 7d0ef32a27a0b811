"""Stage `download`: put a pair's weights into models/, and write down what they are.

Cells depend on this manifest, so other weights mean new measurements. It lies in git: on a fresh clone the stage is up to date
without any weights, and the first cell that needs them fetches them. To fetch them beforehand: `dvc repro -f -s download`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pipeline import cli
from pipeline.cells import write_json
from pipeline.study import RESERVED_DRAFTS, load_params, pair_spec
from pipeline.weights import describe, ensure_model, load_pair


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetch, check and convert the weights of a pair, and write its manifest."
    )
    parser.add_argument("--pair", required=True, help="a pair of params.yaml")
    parser.add_argument("--out", type=Path, required=True, help="the manifest, a JSON file")
    args = parser.parse_args()
    params = load_params()
    pair = pair_spec(params, args.pair)
    manifest = {
        role: {"name": name}
        if name in RESERVED_DRAFTS
        else {"name": name, **describe(ensure_model(name, params.models[name]))}
        for role, name in (("target", pair.target), ("draft", pair.draft))
    }
    if pair.draft not in RESERVED_DRAFTS:
        # A draft that does not fit must stop here: DVC deletes the results of the cells behind before it runs them.
        load_pair(pair, params.models, device=torch.device("cpu"), dtype=torch.float32)
    write_json(args.out, {"pair": args.pair, **manifest})


if __name__ == "__main__":
    cli.run(main)
