"""Models: the built-in toy pair, checkpoints from a local folder, and whether two models fit together.

Device and dtype are always chosen by the caller. A default taken from elsewhere (transformers' has changed once already) would
turn a float32 result into something else without a word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from specdec.errors import InputError
from specdec.memory import DTYPES, SPREAD, Placement, require_memory

if TYPE_CHECKING:
    from specdec.cache import Model

# The toy pair. Each token has one successor, and the head's row of the successor is the token's own embedding: its logit stands
# out by the embedding's share in the residual stream, while attention and MLPs make the other logits a noise that depends on the
# context. The draft shares embeddings and head, but has mostly other noise. So both models nearly always find the successor most
# likely; at the temperature where the noise begins to outweigh it they agree least; and far above it both laws are uniform.
# Measured on the target's own text, seeds 0 to 4: argmax agreement 0.95 to 0.97; α = 0.95 to 0.97 at T = 0.02, 0.79 to 0.81 at
# 0.1, 0.44 to 0.46 at 0.2, 0.67 at 0.3, 0.84 at 0.5, 0.92 at 1, 0.98 at 5. Greedy text walks along the successors, a cycle
# through all tokens, so that it never repeats itself within the context; but it hardly depends on older tokens.
TOY_VOCABULARY = 1024
TOY_CONTEXT = 512
_WIDTH = 128
_LAYERS = 2
_HEADS = 4
_POSITION_STD = 0.6  # of position embeddings; token embeddings have 1
_ATTENTION_GAIN = 1.5  # standard deviation of an attention layer's output, if it looked at one token only
_MLP_GAIN = 0.7  # of both matrices of an MLP
_HEAD_STD = 0.02  # of the head's weights; scales all logits, and so places the least agreement at T = 0.2
_PERTURBATION = 0.8  # noise added to the draft's attention and MLP weights, in standard deviations of each matrix


def toy_target(seed: int = 0) -> GPT2LMHeadModel:
    """A tiny GPT-2 with random weights: float32, on the CPU, in eval mode, without an end token.

    Equal seeds give equal weights. The global random state is neither used nor changed.
    """
    return _toy_model(torch.Generator().manual_seed(seed))


def toy_draft(seed: int = 0) -> GPT2LMHeadModel:
    """A perturbed copy of `toy_target(seed)`: α is neither 0 nor 1, and U-shaped in temperature (see the constants above)."""
    generator = torch.Generator().manual_seed(seed)
    model = _toy_model(generator)
    for weight in _block_weights(model):
        weight.data += _PERTURBATION * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


@torch.no_grad()
def _toy_model(generator: torch.Generator) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=TOY_VOCABULARY,
        n_positions=TOY_CONTEXT,
        n_embd=_WIDTH,
        n_layer=_LAYERS,
        n_head=_HEADS,
        tie_word_embeddings=False,  # tied, the likeliest next token would be the last one again
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor fills the weights once from the global generator
        model = GPT2LMHeadModel(config).float().eval()

    def fill(weight: Tensor, std: float) -> None:
        weight.copy_(std * torch.randn(weight.shape, generator=generator))

    embedding = model.transformer.wte.weight
    fill(embedding, 1.0)
    fill(model.transformer.wpe.weight, _POSITION_STD)
    cycle = torch.randperm(TOY_VOCABULARY, generator=generator)
    model.lm_head.weight[cycle.roll(-1)] = _HEAD_STD * embedding[cycle]
    for block in model.transformer.h:
        fill(block.attn.c_attn.weight, 1 / math.sqrt(_WIDTH))
        fill(block.attn.c_proj.weight, _ATTENTION_GAIN / math.sqrt(_WIDTH))
        fill(block.mlp.c_fc.weight, _MLP_GAIN / math.sqrt(_WIDTH))
        fill(block.mlp.c_proj.weight, _MLP_GAIN / math.sqrt(4 * _WIDTH))
    return model


def _block_weights(model: GPT2LMHeadModel) -> list[Tensor]:
    """The matrices of attention and MLPs; norms and biases stay as they are."""
    return [parameter for parameter in model.transformer.h.parameters() if parameter.dim() == 2]


def random_prompt(model: PreTrainedModel, length: int, generator: torch.Generator) -> Tensor:
    """Uniformly random token ids, shape (1, length), int64, on the CPU: a prompt for a model that has no tokenizer."""
    return torch.randint(vocabulary_size(model), (1, length), generator=generator)


def load_model(path: str | Path, *, dtype: torch.dtype, device: Placement) -> PreTrainedModel:
    """Load a causal language model from a local folder, in eval mode. No network, no pickle, no code from the checkpoint.

    Args:
        path: a folder with config.json and model.safetensors (or its shards and their index).
        dtype: of all weights, whatever config.json says.
        device: "spread" lays the layers out over all GPUs and then main memory (accelerate's `device_map="auto"`); such a model
            stays where it is, and cannot be copied or moved.

    Raises:
        InputError: the device cannot run the dtype or has no room for the weights; the folder or a file is missing or broken; or
            the weights are not exactly those that config.json calls for (transformers would fill in random ones and only warn).
    """
    check_runs(device, dtype)
    path = Path(path)
    _check_files(path)
    parameters = _count_before_loading(path)
    if parameters is not None:
        require_memory(f"The model {path}", parameters, dtype, device)
        if (
            isinstance(device, torch.device) and device.type != "cpu"
        ):  # on their way there all weights lie in main memory
            require_memory(f"The model {path}", parameters, dtype, torch.device("cpu"))
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                device_map="auto" if device == SPREAD else None,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except Exception as error:  # a configuration can be wrong in any way, and asks for packages that are not here
        raise InputError(f"{path} cannot be loaded as a causal language model: {_reason(error)}.") from None
    model, info = loaded
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := sorted(str(key) for key in info[f"{kind}_keys"]):
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise InputError(f"{path}: the weights do not fit config.json ({kind}: {keys[0]}{more}).")
    if isinstance(device, torch.device):
        return model.to(device).eval()
    # From the disk every token would read them anew; tokens go to the device of the embedding, so it must be on one.
    if "disk" in getattr(model, "hf_device_map", {}).values() or model.device.type == "meta":
        raise InputError(
            f"{path} does not fit when spread: layers are left for the disk, or the embedding for no device; allowed: GPUs and "
            "main memory that hold them all."
        )
    return model.eval()


def _check_files(path: Path) -> None:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; allowed: a folder with config.json and model.safetensors.")
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; allowed: a folder as `save_pretrained` writes it.")
    index = path / "model.safetensors.index.json"
    if index.is_file() and not (path / "model.safetensors").is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{index} is broken; allowed: an index as `save_pretrained` writes it.") from None
        if absent := sorted(str(shard) for shard in shards if not (path / str(shard)).is_file()):
            raise InputError(f"{path} has no {absent[0]}; allowed: all {len(shards)} files that {index.name} lists.")


def _count_before_loading(path: Path) -> int | None:
    """Parameters that config.json calls for, tied ones counted once; None if it cannot be told.

    The model is built without memory for its weights, so that nothing is read and no random number drawn.
    """
    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            return count_parameters(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except Exception:  # whatever is wrong with the configuration, loading says it better
        return None


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and reports: whatever is wrong becomes one sentence of ours."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def vocabulary_size(model: Model) -> int:
    """How many token ids the model knows, V."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def count_parameters(model: torch.nn.Module) -> int:
    """Parameters that are stored, so weights shared by two layers (a tied head) count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first that is here of cuda, mps, cpu.

    Raises:
        InputError: an unknown device, or one that this machine does not have.
    """
    present = [
        *(["cuda"] if torch.cuda.is_available() else []),
        *(["mps"] if torch.backends.mps.is_available() else []),
        "cpu",
    ]
    if name == "auto":
        return torch.device(present[0])
    if name not in present:
        raise InputError(f"The device {name!r} is not available here; allowed: auto, {', '.join(present)}.")
    return torch.device(name)


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        InputError: none of DTYPES.
    """
    if name not in DTYPES:
        raise InputError(f"The dtype {name!r} is not known; allowed: {', '.join(DTYPES)}.")
    return DTYPES[name]


def check_runs(device: Placement, dtype: torch.dtype) -> None:
    """Refuse a dtype that the device has no kernels for, before a model is loaded in it. Takes milliseconds.

    Raises:
        InputError: naming what the device can do.
    """
    device = device if isinstance(device, torch.device) else resolve_device("auto")  # where spread layers run
    reason = _why_not(device, dtype)
    if reason is None:
        return
    others = [name for name, other in DTYPES.items() if other != dtype and _why_not(device, other) is None]
    allowed = f"{', '.join(others)} there, or another device" if others else "another device"
    raise InputError(
        f"{str(dtype).removeprefix('torch.')} does not run on the device {device} ({reason}); allowed: {allowed}."
    )


@torch.inference_mode()
def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a tiny layer of each kind that a language model has does not run; None if it does."""
    try:
        weight = torch.ones(8, 8, dtype=dtype, device=device)
        rows = torch.nn.functional.embedding(torch.zeros(4, dtype=torch.int64, device=device), weight)
        rows = torch.nn.functional.layer_norm(rows, (8,))
        torch.matmul(rows, weight).softmax(dim=-1).float().cpu()
    except (RuntimeError, TypeError, AssertionError) as error:  # assertion: a torch that was built without this device
        return _reason(error)
    return None


def check_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse a draft whose token ids do not mean what the target's mean.

    Such a pair runs without an error and only looks useless, since hardly a token is accepted. Vocabularies are compared by
    content; where the files lie plays no role. Special tokens must agree too. Models may pad one vocabulary to different sizes,
    as long as both have every token that the tokenizers know.

    Raises:
        InputError: naming what differs, on both sides.
    """
    size, draft_size = vocabulary_size(target), vocabulary_size(draft)
    sizes = f"The target has a vocabulary of {size} tokens and the draft one of {draft_size}"
    if target_tokenizer is None or draft_tokenizer is None:
        if size != draft_size:
            raise InputError(f"{sizes}; allowed: equal vocabularies, or tokenizers that tell what the two share.")
        return
    words, draft_words = ({i: w for w, i in t.get_vocab().items()} for t in (target_tokenizer, draft_tokenizer))
    unlike = [i for i in sorted(words.keys() | draft_words.keys()) if words.get(i) != draft_words.get(i)]
    fault = f"token {max(words, default=0)} is known to both tokenizers"
    if unlike:
        fault = f"token {unlike[0]} is {words.get(unlike[0])!r} to the target and {draft_words.get(unlike[0])!r} to the draft"
    if size != draft_size and (unlike or max(words, default=0) >= min(size, draft_size)):
        raise InputError(
            f"{sizes}, and {fault}; allowed: equal vocabularies, or one tokenizer for both whose tokens all lie below "
            f"{min(size, draft_size)}."
        )
    if unlike:
        raise InputError(f"{fault.replace('token', 'Token', 1)}; allowed: two models with one vocabulary.")
    _check_special_tokens(target_tokenizer, draft_tokenizer)


def _check_special_tokens(target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> None:
    specials, draft_specials = target_tokenizer.special_tokens_map, draft_tokenizer.special_tokens_map
    for name in sorted(specials.keys() | draft_specials.keys()):
        if specials.get(name) != draft_specials.get(name):
            raise InputError(
                f"The {name} is {specials.get(name)!r} to the target and {draft_specials.get(name)!r} to the draft; "
                "allowed: two models with the same special tokens."
            )
