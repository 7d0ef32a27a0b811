"""Stage `llama_cpp`: our plain and speculative decoding, Hugging Face's generate and llama.cpp's plain decoding, interleaved.

All decode the same weights greedily on the CPU in float32, at decoding.k and timing.kernels. llama.cpp reads the GGUF file that
the weights come from, widened to float32. It is an optional extra (requirements-llama-cpp.txt), which no other stage needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline import cells, cli, options
from pipeline.bench import Bench, measure
from pipeline.llamacpp import LlamaCpp, float32_gguf, library, llama_cpp_method, package_version
from pipeline.methods import Setting, TextPrompt
from pipeline.prompts import encode_prompt, load_prompts, select_prompts
from pipeline.study import Params, load_params, pair_spec
from pipeline.timed import Rival
from pipeline.weights import load_pair, resolve_model
from specdec.cache import open_cache
from specdec.errors import InputError
from specdec.models import resolve_dtype
from specdec.sampling import SamplingConfig
from specdec.timing import StepClock, cached_step

NAME = "llama_cpp"
ROWS = (1, 5)  # tokens of the passes that are timed: plain decoding's, and a verification's at k = 4
CHECKED_TOKENS = 8


def main() -> None:
    args = options.cell_parser(__doc__, "a pair of params.yaml whose target has source: wheel").parse_args()
    params = load_params()
    torch.set_num_threads(cells.read_json(cells.HARDWARE)["fingerprint"]["threads"])
    cells.write_json(args.out, time_pair(params, args.pair))


def time_pair(params: Params, pair_name: str) -> dict[str, Any]:
    """The keys of a cell of `hf_benchmark`, and those of llama.cpp.

    Raises:
        InputError: the package or a GGUF file is missing, or the pair is not timed on the CPU in float32.
    """
    pair, api = pair_spec(params, pair_name), library()
    device, dtype = options.placement(pair.device or params.timing.device), resolve_dtype(params.timing.dtype)
    if device != torch.device("cpu") or dtype != torch.float32:
        raise InputError(
            f"The pair {pair_name} is timed on {device} in {params.timing.dtype}; allowed beside llama.cpp: cpu and float32."
        )
    gguf = float32_gguf(api, pair.target, resolve_model(pair.target, params.models))
    chosen = select_prompts(
        load_prompts(params.prompts.file), params.prompts.categories, params.study.prompts_per_category
    )
    loaded = load_pair(pair, params.models, device=device, dtype=dtype, manifest=cells.manifest(pair_name))
    prompts = [TextPrompt(p.question_id, p.category, encode_prompt(loaded.tokenizer, p)) for p in chosen]
    setting = Setting(
        k=max(params.study.benchmark_k),
        sampling=SamplingConfig(),
        max_new_tokens=params.study.max_new_tokens,
        end_tokens=loaded.end_tokens,
        seed=0,  # nothing is drawn
        runs=params.timing.runs,
        warmup=params.timing.warmup,
        verifier=params.decoding.verifier,
        kernels=params.timing.kernels,
        hf_assisted=False,  # a question of stage `comparison`
    )
    longest = max(p.input_ids.shape[1] for p in prompts)
    context = longest + max(setting.max_new_tokens, *ROWS)
    theirs = LlamaCpp(api, gguf, loaded.target.config, torch.get_num_threads(), context)
    error = logit_error(theirs, loaded.target, prompts[0].input_ids)
    costs = step_clock(theirs, prompts)
    names = {
        "study": params.study.name,
        "pair": pair_name,
        "target": pair.target,
        "draft": pair.draft,
        "target_revision": loaded.target_revision,
        "draft_revision": loaded.draft_revision,
    }
    bench = Bench(names, loaded.target, loaded.drafter, loaded.draft_parameters, prompts, loaded.end_tokens)
    record = measure("hf", bench, setting, Rival(NAME, llama_cpp_method(theirs, setting), costs))
    return {
        **record,
        "llama_cpp_python": package_version(),
        "llama_cpp_gguf_sha256": sha256(gguf),
        "llama_cpp_logit_error": error,
        **{f"llama_cpp_seconds_{rows}": seconds for rows, seconds in costs.medians().items()},
    }


def step_clock(decoder: LlamaCpp, prompts: Sequence[TextPrompt]) -> StepClock:
    """Of llama.cpp's T(n), n in ROWS, behind the prompt of median length, as `timed.cost_clock` has ours."""
    context = sorted((p.input_ids[0] for p in prompts), key=len)[len(prompts) // 2]
    return StepClock({str(n): cached_step(decoder, context, n) for n in ROWS}, decoder.device)


def logit_error(decoder: LlamaCpp, model: PreTrainedModel, input_ids: Tensor) -> float:
    """The largest difference of two logits behind the last tokens of a prompt, shape (1, T)."""
    keep = min(CHECKED_TOKENS, input_ids.shape[1])
    with torch.inference_mode():
        expected = model(input_ids, logits_to_keep=keep).logits[0].double()
    return float((open_cache(decoder).forward(input_ids[0], keep).double() - expected).abs().max())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    cli.run(main)
