"""What the cache gives after any feeding and rolling back is what the model says without a cache."""

import pytest
import torch
from stand_ins import ScriptedModel, random_table, tiny_gpt2, tiny_llama, tiny_mistral
from transformers import (
    BloomConfig,
    FalconH1Config,
    FalconH1ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from specdec.cache import CachedModel, context_length
from specdec.errors import InputError

MODELS = {
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "mistral, window 8, eager": lambda: tiny_mistral(window=8),
    "mistral, window 8, sdpa": lambda: tiny_mistral(window=8, attention="sdpa"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a05_a06_f07_cached_logits_equal_uncached_ones_after_any_rollback(name):
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(40, (5,), generator=generator)
    cached = CachedModel(model)
    cached.forward(text, keep=1)
    cached.rollback(len(text))
    for _ in range(25):  # as in decoding: a few tokens more, then some of them, all or none taken back
        fed = torch.randint(40, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator)
        logits = cached.forward(fed)
        text = torch.cat([text, fed])
        assert cached.length == len(text)
        with torch.inference_mode():
            uncached = model(text[None]).logits[0, -len(fed) :]
        torch.testing.assert_close(logits, uncached, rtol=0, atol=1e-4)
        text = text[: len(text) - int(torch.randint(0, len(fed) + 1, (), generator=generator))]
        cached.rollback(len(text))
        assert cached.length == len(text)
    assert len(text) > 16


def test_forward_returns_the_last_logits_asked_for():
    tokens = torch.tensor([1, 2, 3, 4])
    everything = CachedModel(tiny_gpt2()).forward(tokens)
    assert everything.shape == (4, 40)
    torch.testing.assert_close(CachedModel(tiny_gpt2()).forward(tokens, keep=2), everything[-2:])


def test_length_and_room_count_what_was_fed_and_not_taken_back():
    model = ScriptedModel(random_table(4, 0), context=10)
    cached = CachedModel(model)
    assert (cached.length, cached.room) == (0, 10)
    cached.forward(torch.tensor([1, 2, 3]))
    cached.rollback(1)
    assert (cached.length, cached.room) == (1, 9)
    cached.forward(torch.tensor([0, 2]))
    assert model.fed[-1].cached == (1,)
    cached.rollback(0)
    cached.forward(torch.tensor([3]))
    assert model.fed[-1].cached == ()


@pytest.mark.parametrize("length", [-1, 4])
def test_a_rollback_to_what_was_never_there_is_refused(length):
    cached = CachedModel(ScriptedModel(random_table(4, 0)))
    cached.forward(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=f"cannot roll a cache of 3 tokens back to {length}"):
        cached.rollback(length)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(InputError, match=r"GPT2LMHeadModel is in training mode; allowed: .*eval"):
        CachedModel(tiny_gpt2().train())


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def jamba():
    """A hybrid of layers: most are recurrent, some attend."""
    return JambaForCausalLM(JambaConfig(num_hidden_layers=8, num_experts=2, **SIZES)).eval()


def falcon_h1():
    """A hybrid in every layer, whose cache is an attention cache by inheritance."""
    recurrent = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
    return FalconH1ForCausalLM(FalconH1Config(num_hidden_layers=2, **SIZES, **recurrent)).eval()


@pytest.mark.parametrize("build", [mamba, jamba, falcon_h1])
def test_a06_a_recurrent_model_is_refused_by_name_of_its_cache(build):
    model = build()
    with pytest.raises(InputError, match=rf"{type(model).__name__} keeps a LinearAttention\w+ in its cache"):
        CachedModel(model)


def gpt1():
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()


def rwkv():
    return RwkvForCausalLM(
        RwkvConfig(vocab_size=40, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)
    ).eval()


@pytest.mark.parametrize("build", [gpt1, rwkv])
def test_a_model_that_does_not_use_the_cache_is_refused(build):
    """Such a model takes the argument and says nothing; every later token would be the continuation of one token."""
    model = build()
    with pytest.raises(InputError, match=type(model).__name__):
        CachedModel(model).forward(torch.tensor([1, 2, 3]))


def test_the_context_length_is_the_configured_number_of_positions():
    assert context_length(tiny_gpt2(context=77)) == 77
    assert context_length(tiny_llama(max_position_embeddings=99)) == 99
    unlimited = ScriptedModel(random_table(4, 0))
    unlimited.config = BloomConfig()  # ALiBi: no positions, so no limit
    assert context_length(unlimited) > 10**9
