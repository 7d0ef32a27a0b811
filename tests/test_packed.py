"""A packed matrix gives the products of the plain one, and goes wherever a plain one goes."""

import copy
import pickle

import pytest
import torch
from stand_ins import tiny_gpt2, tiny_llama, tiny_mistral
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from specdec.cache import CachedModel
from specdec.errors import InputError
from specdec.kernels import stored_bytes
from specdec.packed import PackedLinear, packed_copy, packs
from specdec.quantize import bfloat16_copy, int8_copy

TEXT = torch.randint(40, (30,), generator=torch.Generator().manual_seed(0))
SHAPES = [(1, 1), (1, 7), (7, 1), (5, 3), (17, 33), (48, 16), (40, 100), (576, 64), (64, 576), (100, 1000)]
MODELS = {
    "gpt2, tied": tiny_gpt2,
    "llama": tiny_llama,
    "llama, tied": lambda: tiny_llama(tie_word_embeddings=True),
    "llama, biases": lambda: with_biases(tiny_llama(attention_bias=True, mlp_bias=True)),
    "mistral": tiny_mistral,
}
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_biases(model):
    """transformers starts biases at 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(normal(*parameter.shape))
    return model


def off(y, x, weight, bias=None):
    """The largest error of an entry of y = x Wᵀ + b, relative to the size of what was summed."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return float(((y.double() - exact).abs() / (x.double().abs() @ weight.double().abs().T + 1e-30)).max())


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_the_product_is_that_of_the_plain_matrix(out, width, bias):
    weight, offset = normal(out, width), normal(out, seed=1) if bias else None
    layer = PackedLinear(weight, offset)
    assert layer.weight.is_mkldnn == packs(weight) == torch.backends.mkldnn.is_available()
    assert layer.weight.shape == (out, width) and torch.equal(layer.dense(), weight)
    for rows in range(1, 10):
        x = normal(rows, width, seed=rows)
        y = layer(x)
        assert y.shape == (rows, out) and y.dtype == torch.float32
        assert off(y, x, weight, offset) < 1e-5
        torch.testing.assert_close(y, functional.linear(x, weight, offset), rtol=1e-5, atol=1e-5 * width**0.5)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_leading_dimensions(shape):
    weight, offset, x = normal(32, 64), normal(32, seed=1), normal(*shape, seed=2)
    layer = PackedLinear(weight, offset)
    torch.testing.assert_close(layer(x), functional.linear(x, weight, offset), rtol=1e-5, atol=1e-4)
    strided = normal(64, 5).T
    torch.testing.assert_close(layer(strided), functional.linear(strided, weight, offset), rtol=1e-5, atol=1e-4)


def test_the_packed_matrix_is_its_own():
    weight, x = normal(48, 64), normal(3, 64)
    layer = PackedLinear(weight, None)
    before = layer(x)
    weight.zero_()
    layer.dense().zero_()
    assert not packs(weight) or torch.equal(layer(x), before)


@needs_onednn
def test_what_a_packed_matrix_cannot_be_multiplied_with_is_refused():
    layer = PackedLinear(normal(48, 64), None)
    message = r"got {}; allowed: float32 of shape \(\.\.\., 64\) on the CPU$"
    for x, found in (
        (normal(3, 64).bfloat16(), r"bfloat16 of shape \(3, 64\) on cpu"),
        (normal(3, 63), r"float32 of shape \(3, 63\) on cpu"),
        (normal(3, 64).to("meta"), r"float32 of shape \(3, 64\) on meta"),
    ):
        with pytest.raises(InputError, match=message.format(found)):
            layer(x)


def test_copies_and_pickles_compute_the_same():
    layer, x = PackedLinear(normal(48, 64), normal(48, seed=1)), normal(3, 64)
    y = layer(x)
    for moved in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).to("cpu")):
        assert torch.equal(moved(x), y) and moved.weight.is_mkldnn == layer.weight.is_mkldnn
        moved.bias.zero_()
    assert torch.equal(layer(x), y)
    twice = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert twice[0] is twice[1]


def test_a_state_dict_holds_the_plain_matrix_and_loads_anywhere():
    weight, bias, x = normal(48, 64), normal(48, seed=1), normal(3, 64)
    layer, plain = PackedLinear(weight, bias), nn.Linear(64, 48)
    state = layer.state_dict()
    assert set(state) == {"weight", "bias"} and torch.equal(state["weight"], weight)
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-5, atol=1e-4)
    for assign in (False, True):
        other = PackedLinear(normal(48, 64, seed=5), normal(48, seed=6))
        other.load_state_dict(plain.state_dict(), assign=assign)
        assert torch.equal(other(x), layer(x)) and other.weight.is_mkldnn == layer.weight.is_mkldnn
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict(nn.Linear(64, 47).state_dict())


def test_moves_and_casts_unpack_and_pack_again():
    weight, bias, x = normal(48, 64), normal(48, seed=1), normal(3, 64)
    layer = PackedLinear(weight, bias)
    y = layer(x)
    for dtype in (torch.float64, torch.bfloat16):
        cast = copy.deepcopy(layer).to(dtype)
        assert not cast.weight.is_mkldnn and cast.weight.dtype == dtype
        assert torch.equal(cast(x.to(dtype)), functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)))
    back = copy.deepcopy(layer).double().float()
    assert back.weight.is_mkldnn == layer.weight.is_mkldnn and torch.equal(back(x), y)
    away = copy.deepcopy(layer).to("meta")
    assert away(x.to("meta")).shape == (3, 48)
    here = away.to_empty(device="cpu")
    here.load_state_dict(layer.state_dict())
    assert torch.equal(here(x), y)


def test_without_onednn_the_plain_product_runs_on_the_matrix_that_was_given(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, bias, x = normal(48, 64), normal(48, seed=1), normal(3, 64)
    layer = PackedLinear(weight, bias)
    assert torch.equal(layer(x), functional.linear(x, weight, bias))
    assert layer.weight.data_ptr() == weight.data_ptr()
    model = tiny_gpt2()
    assert torch.equal(CachedModel(packed_copy(model)).forward(TEXT), CachedModel(model).forward(TEXT))


# Whole models


def matrices(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def test_a_copy_says_what_the_model_says_with_every_matrix_packed(model):
    before = copy.deepcopy(model.state_dict())
    clone = packed_copy(model)
    packed = {name: layer for name, layer in clone.named_modules() if isinstance(layer, PackedLinear)}
    assert set(packed) == set(matrices(model)) and "lm_head" in packed and not matrices(clone)
    assert all(layer.weight.is_mkldnn == torch.backends.mkldnn.is_available() for layer in packed.values())
    assert not any(
        p.dim() > 1
        for n, p in clone.named_parameters()
        if "embed_tokens" not in n and ".wte" not in n and ".wpe" not in n
    )
    ours, theirs = CachedModel(clone), CachedModel(model)
    for part in TEXT.split([20, 1, 2, 5, 2]):
        torch.testing.assert_close(ours.forward(part), theirs.forward(part), rtol=0, atol=1e-4)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_copy_shares_nothing_with_the_model(model):
    clone = packed_copy(model)
    before = CachedModel(clone).forward(TEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(CachedModel(clone).forward(TEXT), before)


def test_copies_moves_and_states_of_a_copy_say_the_same(model):
    clone = packed_copy(model)
    before = CachedModel(clone).forward(TEXT)
    other = packed_copy(model)
    for layer in other.modules():
        if isinstance(layer, PackedLinear):
            layer.load_state_dict({name: torch.zeros_like(t) for name, t in layer.state_dict().items()})
    assert not torch.allclose(CachedModel(other).forward(TEXT), before)
    other.load_state_dict(clone.state_dict())
    for same in (copy.deepcopy(clone), copy.deepcopy(clone).to("cpu"), other, packed_copy(clone)):
        assert torch.equal(CachedModel(same).forward(TEXT), before)
    assert set(clone.state_dict()) == set(model.state_dict())


def test_a_tied_head_is_a_second_copy_of_the_embedding():
    model = tiny_llama(tie_word_embeddings=True)
    clone = packed_copy(model)
    assert torch.equal(clone.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(clone.lm_head.dense(), model.model.embed_tokens.weight)
    assert stored_bytes(clone) - stored_bytes(model) == model.model.embed_tokens.weight.numel() * 4
    untied = tiny_llama()
    assert stored_bytes(packed_copy(untied)) == stored_bytes(untied)


def test_a_model_of_16_bits_is_copied_unpacked():
    model = bfloat16_copy(tiny_llama())
    clone = packed_copy(model)
    assert not any(t.is_mkldnn for t in (*clone.parameters(), *clone.buffers()))
    assert torch.equal(CachedModel(clone).forward(TEXT), CachedModel(model).forward(TEXT))


def test_a_model_with_matrices_of_another_kind_is_refused_by_their_name():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    with pytest.raises(
        InputError, match=r"^MixtralForCausalLM has a matrix .*\(model\.layers\.0\.mlp\.\w+.*; allowed: m"
    ):
        packed_copy(MixtralForCausalLM(MixtralConfig(**sizes | heads)).eval())
    with pytest.raises(InputError, match=r"\(model\.layers\.0\.self_attn\.q_proj\.weight, of Int8Linear\)"):
        packed_copy(int8_copy(tiny_llama()))

    class Masked(nn.Linear):
        """A layer that computes something else than its base class."""

    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = Masked(16, 32, bias=False)
    with pytest.raises(
        InputError, match=r"\(model\.layers\.1\.mlp\.up_proj\.weight, of Masked\); allowed: matrices in nn"
    ):
        packed_copy(model)
