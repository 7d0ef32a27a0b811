"""The INT8 layer is the float product with rounded weights; copies change only what they say."""

import copy
from types import SimpleNamespace

import pytest
import torch
from stand_ins import tiny_gpt2, tiny_llama, tiny_mistral
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.cache import CachedModel
from specdec.quantize import Int8Linear, bfloat16_copy, int8_copy

BUILDERS = [tiny_gpt2, tiny_llama, tiny_mistral, lambda: tiny_llama(tie_word_embeddings=True)]
IDS = ["gpt2, tied", "llama", "mistral", "llama, tied"]


def random_layer(out=24, width=32, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) * torch.logspace(-2, 1, out)[:, None]  # rows of unequal size
    return weight, torch.randn(out, generator=generator) if bias else None


def inputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def dequantised(layer):
    return layer.weight.double() * layer.scales.double()[:, None]


def test_every_weight_is_off_by_at_most_half_a_step():
    weight, _ = random_layer()
    layer = Int8Linear(weight, None)
    assert layer.weight.dtype == torch.int8
    assert layer.weight.abs().amax(dim=1).eq(127).all()  # each row uses the whole range
    error = (dequantised(layer) - weight).abs() / layer.scales.double()[:, None]
    # The scale is stored in bfloat16; a step rounded by one part in 512 moves the largest weight by half a step more.
    assert error.max() <= 0.5 + 127 / 512


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 32), (1, 7, 32)])
def test_the_layer_is_the_product_with_the_dequantised_weights(shape, bias):
    weight, offset = random_layer(bias=bias)
    layer, x = Int8Linear(weight, offset), inputs(*shape)
    y = layer(x)
    exact = x.double() @ dequantised(layer).T + (0 if offset is None else offset.bfloat16().double())
    assert y.shape == (*shape[:-1], 24) and y.dtype == torch.bfloat16
    size = x.double().abs() @ dequantised(layer).abs().T + 1
    assert ((y.double() - exact).abs() / size).max() < 2**-7  # rounding of the result and of the sum


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
@pytest.mark.parametrize(("out", "width"), [(1, 16), (13, 48), (40, 5), (40, 24), (576, 96)])
def test_any_size_works(out, width, rows, monkeypatch):
    """Where rows are not multiples of 16 long, the kernel reads behind their ends: it crashes, or is quietly wrong."""
    kernel = torch.ops.aten._weight_int8pack_mm

    def guarded(x, *others):
        assert x.shape[1] % 16 == 0
        return kernel(x, *others)

    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", guarded)
    layer, x = Int8Linear(*random_layer(out, width)), inputs(rows, width)
    exact = x.double() @ dequantised(layer).T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


def test_a_row_of_zeros_stays_zero():
    weight, _ = random_layer()
    weight[3] = 0
    layer = Int8Linear(weight, None)
    assert layer(inputs(4, 32))[:, 3].eq(0).all()
    assert layer(inputs(4, 32)).isfinite().all()


def test_away_from_the_cpu_the_same_is_computed_without_the_kernel():
    layer, x = Int8Linear(*random_layer()), inputs(2, 3, 32)
    elsewhere = SimpleNamespace(
        shape=x.shape, dtype=x.dtype, device=SimpleNamespace(type="mps"), reshape=lambda *shape: x.reshape(*shape)
    )
    y = layer(x).float()
    torch.testing.assert_close(layer.forward(elsewhere).float(), y, rtol=0.02, atol=0.02 * float(y.abs().max()))


def test_a_conv1d_is_taken_as_the_transposed_linear_layer_that_it_is():
    conv = Conv1D(24, 32)
    conv.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    layer = int8_copy(nn.Sequential(conv))[0]
    assert isinstance(layer, Int8Linear) and layer.weight.shape == (24, 32)
    x = inputs(5, 32)
    torch.testing.assert_close(layer(x).float(), conv(x.float()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
@pytest.mark.parametrize("make_copy", [int8_copy, bfloat16_copy])
def test_the_model_itself_is_untouched(make_copy, build):
    model = build()
    before = copy.deepcopy(model.state_dict())
    clone = make_copy(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    assert torch.equal(next(model.parameters()), next(iter(before.values())))  # nothing is shared


@pytest.mark.parametrize("make_copy", [int8_copy, bfloat16_copy])
def test_no_second_copy_of_the_float_weights_is_made_on_the_way(make_copy, monkeypatch):
    """A model that barely fits into memory can be copied into fewer bits."""
    model = tiny_llama()
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda *_: pytest.fail("a parameter was copied as it is"))
    make_copy(model)


@pytest.mark.parametrize("make_copy", [int8_copy, bfloat16_copy])
@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
def test_a_copy_of_a_model_in_bfloat16_shares_nothing_with_it_either(make_copy, build):
    model = build().to(torch.bfloat16)
    own = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    clone = make_copy(model)
    assert not own & {tensor.data_ptr() for tensor in [*clone.parameters(), *clone.buffers()]}


@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
def test_an_int8_copy_has_no_float_layer_left(build):
    model, clone = build(), int8_copy(build())
    assert not any(isinstance(module, nn.Linear | Conv1D) for module in clone.modules())
    replaced = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    assert sum(isinstance(module, Int8Linear) for module in clone.modules()) == len(replaced)
    assert isinstance(clone.get_output_embeddings(), Int8Linear)
    assert all(parameter.dtype == torch.bfloat16 for parameter in clone.parameters())
    assert not clone.training


@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
def test_the_embedding_of_an_int8_copy_is_only_cast(build):
    """Also where the head is tied to it and is quantised."""
    model = build()
    clone = int8_copy(model)
    embedding = clone.get_input_embeddings().weight
    assert torch.equal(embedding, model.get_input_embeddings().weight.bfloat16())
    head = clone.get_output_embeddings()
    torch.testing.assert_close(
        dequantised(head).float(), model.get_output_embeddings().weight.data, rtol=0, atol=float(head.scales.max())
    )


@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
def test_a_bfloat16_copy_is_a_cast_and_stays_tied(build):
    model = build()
    clone = bfloat16_copy(model)
    for (name, value), (_, original) in zip(clone.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(value, original.bfloat16()), name
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (clone.get_output_embeddings().weight is clone.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("make_copy", [int8_copy, bfloat16_copy])
def test_rotary_frequencies_keep_their_precision(make_copy):
    model = tiny_llama()
    clone = make_copy(model)
    assert clone.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(clone.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("build", BUILDERS, ids=IDS)
@pytest.mark.parametrize("make_copy", [int8_copy, bfloat16_copy])
def test_a_copy_says_nearly_what_its_model_says(make_copy, build):
    model = build()
    tokens = torch.randint(40, (30,), generator=torch.Generator().manual_seed(0))
    logits, copied = (CachedModel(m).forward(tokens).float() for m in (model, make_copy(model)))
    cosine = nn.functional.cosine_similarity(logits, copied, dim=-1)
    assert cosine.min() > 0.95 and cosine.mean() > 0.99
