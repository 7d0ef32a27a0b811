"""Tiny models in the shape of the real hub's repositories, with all that such a repository holds beside the model."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from stand_ins import nearby
from sync_deps import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pipeline.prompts import load_prompts
from specdec.models import quiet_transformers

END = "<|endoftext|>"
CHAT = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Large for the greedy texts to be varied: with the usual one they repeat one token.
_INITIALIZER_RANGE = 0.5
_NOT_TO_FETCH = b"whoever fetches this wastes bandwidth, or runs a pickle\n"


def gpt2_files(
    seed: int = 0,
    noise: float = 0.0,
    context: int = 1024,
    words: int = 400,
    layers: int = 2,
    width: int = 32,
    prefix: str = "",
) -> dict[str, bytes]:
    """A GPT-2 as the real hub has it: the base model's names, a head that is tied and so absent, and the causal masks.

    Args:
        noise: makes a draft of the model with the same seed, see `nearby`. At 0.02 their likeliest tokens agree at about 0.8
            of the positions of the model's greedy text, at 0.1 at about 0.4.
        context: how many positions; each layer's mask has the square of it, in float32.
        words: tokens of the vocabulary.
        prefix: before every name of a tensor, "transformer." in some repositories.
    """
    end = words - 1
    model = gpt2_model(seed, noise, context, words, layers, width)
    tensors = {prefix + name: tensor for name, tensor in model.transformer.state_dict().items()}
    # The versions of transformers that wrote these files had the mask among a layer's buffers.
    for layer in range(layers):
        tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(context, context).tril()[None, None]
    config = _json(_gpt2_config(model.config))
    generation = {"bos_token_id": end, "eos_token_id": end, "transformers_version": "4.26.0.dev0"}
    return {
        "config.json": config,
        "generation_config.json": _json(generation | {"_from_model_config": True}),
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
        **_tokenizer_files(words, ()),
        "tokenizer_config.json": _json({"model_max_length": context}),
        **_surroundings("mit"),
        "64.tflite": _NOT_TO_FETCH,
        "flax_model.msgpack": _NOT_TO_FETCH,
        "onnx/config.json": config,
        "onnx/decoder_model.onnx": _NOT_TO_FETCH,
        "onnx/tokenizer.json": b"{}",
        "pytorch_model.bin": _NOT_TO_FETCH,
        "rust_model.ot": _NOT_TO_FETCH,
        "tf_model.h5": _NOT_TO_FETCH,
    }


def _gpt2_config(config: GPT2Config) -> dict[str, Any]:
    """config.json as the real one is, which is older than what transformers writes today."""
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": config.eos_token_id,
        "embd_pdrop": 0.1,
        "eos_token_id": config.eos_token_id,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": config.n_positions,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_layer": config.n_layer,
        "n_positions": config.n_positions,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": config.vocab_size,
    }


def gpt2_model(
    seed: int = 0, noise: float = 0.0, context: int = 1024, words: int = 400, layers: int = 2, width: int = 32
) -> GPT2LMHeadModel:
    """What the weights of `gpt2_files` are taken from: float32, in eval mode."""
    config = GPT2Config(
        vocab_size=words,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=words - 1,
        eos_token_id=words - 1,
    )
    return _build(GPT2LMHeadModel, config, seed, noise)


def llama_files(
    seed: int = 0,
    noise: float = 0.0,
    vocabulary: int | None = None,
    shards: int = 1,
    template: bool = True,
    context: int = 1024,
    words: int = 400,
) -> dict[str, bytes]:
    """A Llama with a tokenizer like Qwen's, whose head is its own, stored by today's transformers.

    Args:
        noise, context, words: see `gpt2_files`.
        vocabulary: tokens that the model knows, more than the tokenizer's `words`; as many if None.
        shards: 1 for model.safetensors, 2 for two files with an index.
        template: whether the tokenizer has a chat template.
    """
    model = llama_model(seed, noise, vocabulary, context, words)
    end = words - 1
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": CHAT[1],
        "errors": "replace",
        "model_max_length": context,
        "pad_token": END,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    generation = {"eos_token_id": [end, end - 2], "pad_token_id": end - 2, "transformers_version": "4.51.0"}
    return {
        **_saved(model, shards),
        "generation_config.json": _json(generation),
        **_tokenizer_files(words, CHAT),
        "tokenizer_config.json": _json(settings | ({"chat_template": TEMPLATE} if template else {})),
        **_surroundings("apache-2.0"),
        "LICENSE": b"Apache License\n",
        "consolidated.safetensors": _NOT_TO_FETCH,
        "original/consolidated.00.pth": _NOT_TO_FETCH,
        "original/params.json": b"{}",
        "runs/events.out.tfevents": _NOT_TO_FETCH,
    }


def llama_model(
    seed: int = 0, noise: float = 0.0, vocabulary: int | None = None, context: int = 1024, words: int = 400
) -> LlamaForCausalLM:
    """What the weights of `llama_files` are taken from: float32, in eval mode."""
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=words - 1,
    )
    model = _build(LlamaForCausalLM, config, seed, noise)  # equal weights whatever the padding
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(vocabulary or words, mean_resizing=False)
        # Tokens that pad the vocabulary are never the likeliest, as in a trained model.
        for matrix in (model.model.embed_tokens.weight, model.lm_head.weight):
            matrix[words:] = 0
    return model


def _build(architecture: type[PreTrainedModel], config: Any, seed: int, noise: float) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config).float().eval()
    return nearby(model, noise) if noise else model


def _saved(model: PreTrainedModel, shards: int) -> dict[str, bytes]:
    """Config and weights as `save_pretrained` writes them, in so many files."""
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        # A shard takes tensors until the next one does not fit, so it needs some room.
        copy.deepcopy(model).save_pretrained(folder, max_shard_size=size if shards == 1 else int(1.3 * size / shards))
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    found = sum(name.endswith(".safetensors") for name in files)
    if found != shards:
        raise ValueError(f"The weights lie in {found} files instead of {shards}.")
    return files


def _tokenizer_files(words: int, more: tuple[str, ...]) -> dict[str, bytes]:
    """Byte-level BPE in both formats. Its last tokens are special: <|endoftext|>, then `more`."""
    specials = (END, *more)
    vocabulary, merges = _trained(words - len(specials))
    # GPT-2's own end of text is in the vocabulary; what was added for chats later is in tokenizer.json only.
    vocabulary = vocabulary | {END: len(vocabulary)}
    tokenizer = Tokenizer(BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return {
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False).encode(),
    }


@cache
def _trained(words: int) -> tuple[dict[str, int], list[str]]:
    """So many tokens, by number, and the merges that make them, learnt on the prompts of the study."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=words, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    prompts = load_prompts(ROOT / "pipeline" / "prompts.jsonl")
    tokenizer.train_from_iterator([turn for prompt in prompts for turn in prompt.turns], trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    return learnt["vocab"], [" ".join(merge) for merge in learnt["merges"]]


def _surroundings(licence: str) -> dict[str, bytes]:
    """What lies in every repository."""
    lfs = "".join(
        f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in ("*.bin.*", "*.h5", "*.safetensors")
    )
    return {
        ".gitattributes": lfs.encode(),
        "README.md": f"---\nlanguage: en\nlicense: {licence}\n---\n\n# A tiny model\n".encode(),
    }


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
