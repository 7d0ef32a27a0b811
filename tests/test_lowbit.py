"""Whole models on a grid: nothing is left out, folding changes nothing, calibrated methods come nearer."""

import copy

import pytest
import torch
from stand_ins import tiny_gpt2, tiny_llama, tiny_mistral
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec import awq
from specdec.awq import fold, scaled_inputs, search_scales, weight_of
from specdec.errors import InputError
from specdec.grid import Grid, round_to_nearest
from specdec.lowbit import METHODS, Recipe, decoder_blocks, linear_layers, lowbit_copy

MODELS = {
    "llama": tiny_llama(),
    "llama, all heads": tiny_llama(num_key_value_heads=2, tie_word_embeddings=True),
    "mistral": tiny_mistral(),
    "gpt2": tiny_gpt2(),
}
TEXTS = [torch.randint(40, (48,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.fixture(params=MODELS)
def model(request):
    return copy.deepcopy(MODELS[request.param])


@torch.inference_mode()
def logits(model):
    return torch.cat([model(text[None]).logits[0] for text in TEXTS])


def scale_some_channels(model):
    """As trained models are: a few channels of a norm are far larger than the others."""
    for block in decoder_blocks(model):
        for place in scaled_inputs(block):
            if not isinstance(place.source, nn.Linear | Conv1D):
                place.source.weight.data[::7] *= 20
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("head", [True, False])
def test_no_layer_is_left_out_and_the_model_is_left_alone(model, method, head):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clone, cost = lowbit_copy(model, Recipe(Grid(4), method, head), TEXTS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    linear = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    assert set(cost.layers) == (linear if head else linear - {"lm_head"}) and "lm_head" in linear
    for name, layer in clone.named_modules():
        if name in cost.layers:
            for row in weight_of(layer):  # 16 levels a row
                assert len(row.unique()) <= 16, name
    weights = {name: weight_of(layer).numel() for name, layer in model.named_modules() if name in cost.layers}
    assert cost.weights == sum(weights.values()) > 0
    assert 4 < cost.bits_per_weight < 6
    assert cost.other_bytes == 2 * sum(
        p.numel() for n, p in clone.named_parameters() if n.removesuffix(".weight") not in cost.layers
    )


def test_a_tied_head_is_rounded_on_a_copy_of_its_own():
    model = copy.deepcopy(MODELS["llama, all heads"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    clone, cost = lowbit_copy(model, Recipe(Grid(3)))
    assert torch.equal(clone.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(clone.lm_head.weight, round_to_nearest(model.lm_head.weight, Grid(3)).dequantised())
    kept, cost_without = lowbit_copy(model, Recipe(Grid(3), head=False))
    assert kept.lm_head.weight is kept.model.embed_tokens.weight
    assert cost.weights - cost_without.weights == model.lm_head.weight.numel()
    assert cost.other_bytes == cost_without.other_bytes  # the embedding stays either way


def test_bits_and_bytes_by_hand():
    """Four columns of two heads… of a tiny GPT-2: width 16, so c_attn 16 → 48, c_proj 16 → 16, c_fc 16 → 64, c_proj 64 → 16."""
    _, cost = lowbit_copy(tiny_gpt2(), Recipe(Grid(4, 16), head=False))
    weights = 2 * (16 * 48 + 16 * 16 + 16 * 64 + 64 * 16)
    assert cost.weights == weights
    assert cost.bytes == weights * (4 + 20 / 16) / 8 and cost.bits_per_weight == 5.25


def test_folding_changes_no_output(model):
    before = logits(model)
    generator = torch.Generator().manual_seed(0)
    folded = 0
    for block in decoder_blocks(model):
        for place in scaled_inputs(block):
            columns = weight_of(place.layers[0]).shape[1]
            fold(place, torch.rand(columns, generator=generator) * 4 + 0.25)
            folded += 1
    assert folded >= 3 * len(decoder_blocks(model))
    after = logits(model)
    assert float((after - before).abs().max()) < 1e-5 * max(1.0, float(before.abs().max()))


@pytest.mark.parametrize(("name", "places"), [("llama", 3), ("llama, all heads", 4), ("gpt2", 3)])
def test_scales_are_not_folded_where_the_shapes_forbid_it(name, places):
    """Two query heads share one head of values: o_proj has twice the inputs that v_proj puts out."""
    assert [len(scaled_inputs(block)) for block in decoder_blocks(MODELS[name])] == [places] * 2


def test_the_search_finds_the_power_by_its_output(model, monkeypatch):
    """Large channels get a scale above 1; with no large ones, and at power 0 alone, nothing is scaled."""
    scale_some_channels(model)
    block = decoder_blocks(model)[0]
    place = scaled_inputs(block)[0]
    columns = weight_of(place.layers[0]).shape[1]
    inputs = torch.randn(256, columns, generator=torch.Generator().manual_seed(0))
    inputs[:, 2] *= 50
    layer = place.layers[0]

    def judge():
        return [inputs @ weight_of(layer).T]

    before = weight_of(layer).clone()
    scales, power = search_scales(place, inputs, Grid(3), judge)
    assert torch.equal(weight_of(layer), before)
    assert power > 0 and int(scales.argmax()) == 2 and float(scales[2]) > 1

    def error(weight):
        return float((inputs @ (weight - before).T).norm())

    rounded = round_to_nearest(before * scales, Grid(3)).dequantised() / scales
    assert error(rounded) < error(round_to_nearest(before, Grid(3)).dequantised())
    monkeypatch.setattr(awq, "POWERS", 1)
    scales, power = search_scales(place, inputs, Grid(3), judge)
    assert power == 0 and torch.equal(scales, torch.ones(columns))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("grid", [Grid(3), Grid(4, 8)])
def test_calibrated_methods_come_nearer_to_the_model(model, method, grid):
    scale_some_channels(model)
    want = logits(model)

    def distance(recipe):
        clone, _ = lowbit_copy(model, recipe, TEXTS)
        return float((logits(clone) - want).norm())

    assert distance(Recipe(grid, method, head=False)) < distance(Recipe(grid, "rtn", head=False))


def test_each_block_is_calibrated_on_what_the_rounded_blocks_before_it_put_out(model, monkeypatch):
    from specdec import lowbit

    seen = []
    hessian = lowbit.Hessian

    class Spy(hessian):
        def add(self, inputs):
            seen.append(inputs.clone())
            super().add(inputs)

    monkeypatch.setattr(lowbit, "Hessian", Spy)
    clone, _ = lowbit_copy(model, Recipe(Grid(2), "gptq", head=False), TEXTS[:1])
    first_of_second = next(iter(linear_layers(decoder_blocks(clone)[1]).values()))
    given = []
    first_of_second.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    with torch.inference_mode():
        clone(TEXTS[0][None])
    assert any(x.shape == given[0].shape and torch.allclose(x, given[0], atol=1e-5) for x in seen)


def test_more_bits_are_nearer(model):
    want = logits(model)
    errors = [float((logits(lowbit_copy(model, Recipe(Grid(bits)))[0]) - want).norm()) for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)


def test_equal_calibration_gives_equal_weights(model):
    for method in ("gptq", "awq"):
        one, other = (lowbit_copy(model, Recipe(Grid(4), method), TEXTS)[0] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_what_cannot_be_done_is_refused(model):
    for method in ("gptq", "awq"):
        with pytest.raises(InputError, match=f"{method} has no calibration data; allowed: at least one text"):
            lowbit_copy(model, Recipe(Grid(4), method))
    with pytest.raises(InputError, match="method is 'hqq'; allowed: rtn, gptq, awq"):
        Recipe(Grid(4), "hqq")
    with pytest.raises(InputError, match="group_size is 5, which does not divide"):
        lowbit_copy(model, Recipe(Grid(4, 5)))
