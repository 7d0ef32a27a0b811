"""Small models for the tests: one that reads its laws from a table, and tiny random ones of real architectures."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from specdec.drafters import Draft, Drafter


@dataclass(frozen=True)
class Fed:
    """One forward call: what the cache held, and what was fed."""

    cached: tuple[int, ...]
    tokens: tuple[int, ...]


class ScriptedModel(nn.Module):
    """A causal LM whose next-token law is `table[previous token, last token]`, shape (V, V, V).

    It takes the arguments of a real model and writes the tokens into a real cache, the only place where it reads the text: with a
    cache that is one token off it says something else. Before the text stands a token 0.
    """

    device = torch.device("cpu")

    def __init__(self, table: Tensor, context: int = 4096) -> None:
        super().__init__()
        self.table = table
        self.config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=context)
        self.fed: list[Fed] = []
        self.eval()

    def forward(
        self, tokens: Tensor, cache: DynamicCache | None = None, use_cache: bool = True, logits_to_keep: int = 0
    ):
        cache = DynamicCache(config=self.config) if cache is None else cache
        known = cache.get_seq_length()
        entries = tokens[:, None, :, None].double()
        text = cache.update(entries, entries, 0)[0].flatten().long()
        self.fed.append(Fed(tuple(text[:known].tolist()), tuple(text[known:].tolist())))
        previous = torch.cat([text.new_zeros(1), text[:-1]])
        laws = self.table[previous, text][-logits_to_keep:]
        return SimpleNamespace(logits=laws.log()[None])


def random_table(vocabulary: int, seed: int, *, zeros: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Laws for a `ScriptedModel`; with `zeros`, one token of each is impossible."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(vocabulary, vocabulary, vocabulary, generator=generator, dtype=dtype) + 0.05
    if zeros:
        table.scatter_(-1, torch.randint(vocabulary, (vocabulary, vocabulary, 1), generator=generator), 0)
    return table / table.sum(dim=-1, keepdim=True)


# `initializer_range` is large for the greedy texts to be varied: with the usual one they repeat one token.


def tiny_gpt2(seed: int = 0, context: int = 256, vocabulary: int = 40) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _build(GPT2LMHeadModel, config, seed)


_LLAMA_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    return _build(LlamaForCausalLM, LlamaConfig(**_LLAMA_SIZES | changes), seed)


def tiny_mistral(seed: int = 0, window: int = 16, attention: str = "eager", **changes) -> MistralForCausalLM:
    config = MistralConfig(**_LLAMA_SIZES | {"sliding_window": window} | changes)
    model = _build(MistralForCausalLM, config, seed)
    model.set_attn_implementation(attention)
    return model


def tiny_gemma3(seed: int = 0, window: int = 16, attention: str = "eager", **changes) -> Gemma3ForCausalLM:
    """Layers of two kinds: sliding windows, and full attention between them."""
    sizes = _LLAMA_SIZES | {"num_hidden_layers": 3, "head_dim": 8, "pad_token_id": None, "tie_word_embeddings": False}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**sizes | {"sliding_window": window, "layer_types": kinds} | changes)
    model = _build(Gemma3ForCausalLM, config, seed)
    model.set_attn_implementation(attention)
    return model


def _build(architecture: type[PreTrainedModel], config, seed: int):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture(config).eval()


def nearby(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A copy that agrees with the model often, not always: noise, relative to each weight's spread, is added."""
    generator = torch.Generator().manual_seed(seed)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for weight in clone.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return clone


def disagreeing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose best token is never the model's: the rows of its head are rotated by one."""
    clone = copy.deepcopy(model)
    clone.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(1, 0))
    return clone


@dataclass
class Spy:
    """A drafter that records what passes through it."""

    drafter: Drafter
    asked: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # context, max_tokens
    drafts: list[Draft] = field(default_factory=list)

    def begin(self, prompt, sampling) -> None:
        self.drafter.begin(prompt, sampling)

    def propose(self, context, max_tokens, chooser) -> Draft:
        self.asked.append((tuple(context.tolist()), max_tokens))
        self.drafts.append(self.drafter.propose(context, max_tokens, chooser))
        return self.drafts[-1]

    def rollback(self, length) -> None:
        self.drafter.rollback(length)

    def check(self, text) -> None:
        self.drafter.check(text)
