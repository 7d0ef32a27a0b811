"""Whole models on a grid: nothing is left out, folding changes nothing, calibrated methods come nearer."""

import copy

import pytest
import torch
from stand_ins import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_mistral
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec import awq
from specdec.awq import fold, scaled_inputs, search_scales, weight_of
from specdec.errors import InputError
from specdec.grid import Grid, round_to_nearest
from specdec.lowbit import METHODS, Recipe, cast_copy, decoder_blocks, linear_layers, lowbit_copy

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


def names_of_linear_layers(model):
    return {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("grid", [Grid(4), Grid(3, 8, "min"), Grid(2, 8, "sym")], ids=str)
def test_no_layer_is_left_out_and_the_model_is_left_alone(model, method, head, grid):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = lowbit_copy(model, Recipe(grid, method, head), TEXTS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    linear = names_of_linear_layers(model)
    assert names_of_linear_layers(found.model) == linear
    rounded = linear if head else linear - {"lm_head"}
    assert set(found.weights) == set(found.cost.layers) == rounded and "lm_head" in linear
    assert set(found.body_cost.layers) == linear - {"lm_head"}
    for name in rounded:
        weight = weight_of(found.model.get_submodule(name))
        assert torch.equal(weight, found.weights[name].dequantised()), name
        for group in weight.split(grid.width(weight.shape[1]), dim=1):
            assert max(len(row.unique()) for row in group) <= 2**grid.bits, name
    sizes = {name: weight_of(model.get_submodule(name)).numel() for name in rounded}
    assert found.cost.weights == sum(sizes.values()) > 0
    assert grid.bits < found.cost.bits_per_weight <= grid.bits + 4
    assert found.cost.other_bytes == 2 * sum(
        p.numel() for n, p in found.model.named_parameters() if n.removesuffix(".weight") not in rounded
    )


def test_costs_of_the_body_are_those_of_a_head_left_as_it_is(model):
    found, kept = (lowbit_copy(model, Recipe(Grid(3, 8), head=head)) for head in (True, False))
    assert found.body_cost == kept.body_cost == kept.cost
    assert found.cost.weights - kept.cost.weights == model.lm_head.weight.numel()
    for name, weight in kept.weights.items():
        assert torch.equal(weight.levels, found.weights[name].levels)
    assert torch.equal(kept.model.lm_head.weight, model.lm_head.weight)


def test_a_tied_head_is_rounded_on_a_copy_of_its_own():
    model = copy.deepcopy(MODELS["llama, all heads"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = lowbit_copy(model, Recipe(Grid(3)))
    assert torch.equal(found.model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(found.model.lm_head.weight, round_to_nearest(model.lm_head.weight, Grid(3)).dequantised())
    kept = lowbit_copy(model, Recipe(Grid(3), head=False))
    assert kept.model.lm_head.weight is kept.model.model.embed_tokens.weight
    assert found.cost.other_bytes == found.body_cost.other_bytes  # the embedding stays either way


def test_an_untied_head_that_is_left_counts_in_16_bits():
    model = copy.deepcopy(MODELS["llama"])
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    found = lowbit_copy(model, Recipe(Grid(3)))
    assert found.body_cost.other_bytes - found.cost.other_bytes == 2 * model.lm_head.weight.numel()


@pytest.mark.parametrize(("kind", "beside"), [("zero", 20), ("min", 32), ("sym", 16)])
def test_bits_and_bytes_by_hand(kind, beside):
    """A tiny GPT-2 has width 16 and two blocks: c_attn 16 → 48, c_proj 16 → 16, c_fc 16 → 64, c_proj 64 → 16; 40 tokens."""
    found = lowbit_copy(tiny_gpt2(), Recipe(Grid(4, 16, kind)))
    weights = 2 * (16 * 48 + 16 * 16 + 16 * 64 + 64 * 16)
    assert found.body_cost.weights == weights and found.cost.weights == weights + 40 * 16
    assert found.body_cost.bytes == weights * (4 + beside / 16) / 8
    assert found.cost.bits_per_weight == found.body_cost.bits_per_weight == 4 + beside / 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_every_linear_weight_and_nothing_else(model, dtype):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = cast_copy(model, dtype)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    linear = names_of_linear_layers(model)
    assert names_of_linear_layers(found.model) == linear and not found.weights
    for name, value in found.model.state_dict().items():
        assert value.dtype == torch.float32
        rounded = name.removesuffix(".weight") in linear
        assert torch.equal(value, before[name].to(dtype).float() if rounded else before[name]), name
    assert not torch.equal(found.model.lm_head.weight, model.lm_head.weight)
    everything = sum(parameter.numel() for parameter in model.parameters())
    head = model.lm_head.weight.numel()
    assert set(found.cost.layers) == linear and set(found.body_cost.layers) == linear - {"lm_head"}
    assert found.cost.weights - found.body_cost.weights == head
    for cost in (found.cost, found.body_cost):
        assert cost.bits_per_weight == 16 and cost.bytes == 2 * cost.weights
        assert cost.bytes + cost.other_bytes == 2 * everything  # a head tied to the embedding is stored once


def test_a_cast_that_cannot_be_is_refused():
    model = copy.deepcopy(MODELS["llama"])
    with pytest.raises(InputError, match=r"dtype is torch.float64; allowed: torch.bfloat16, torch.float16"):
        cast_copy(model, torch.float64)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e6
    with pytest.raises(
        InputError,
        match=r"model.layers.1.mlp.up_proj has weights that torch.float16 cannot hold; allowed: torch.bfloat16",
    ):
        cast_copy(model, torch.float16)
    assert float(cast_copy(model, torch.bfloat16).model.model.layers[1].mlp.up_proj.weight.data[0, 0]) > 9e5


@pytest.mark.parametrize(
    "make", [lambda model: lowbit_copy(model, Recipe(Grid(4))), lambda m: cast_copy(m, torch.float16)]
)
def test_weights_that_would_stay_as_they_are_are_refused(make):
    """A matrix that no linear layer holds, as experts have, and a linear layer outside the blocks."""
    model = copy.deepcopy(MODELS["llama"])
    model.model.layers[1].mlp.experts = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(InputError, match=r"LlamaForCausalLM has weights of an unknown kind \(mlp.experts\); allowed: "):
        make(model)
    model = copy.deepcopy(MODELS["llama"])
    model.model.project_in = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"unknown kind \(model.project_in\)"):
        make(model)


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

    texts = inputs.split(64)

    def judge(text):
        return texts[text] @ weight_of(layer).T

    wanted = [judge(text) for text in range(4)]
    before = weight_of(layer).clone()
    scales, power = search_scales(place, inputs, Grid(3), wanted, judge)
    assert torch.equal(weight_of(layer), before)
    assert power > 0 and int(scales.argmax()) == 2 and float(scales[2]) > 1

    def error(weight):
        return float((inputs @ (weight - before).T).norm())

    rounded = round_to_nearest(before * scales, Grid(3)).dequantised() / scales
    assert error(rounded) < error(round_to_nearest(before, Grid(3)).dequantised())
    monkeypatch.setattr(awq, "POWERS", 1)
    scales, power = search_scales(place, inputs, Grid(3), wanted, judge)
    assert power == 0 and torch.equal(scales, torch.ones(columns))


def test_every_fourth_text_judges_all_powers_and_all_texts_the_best(model):
    """What the others leave out costs little: the power found is as good as the best of all, within a hundredth."""
    place = scaled_inputs(decoder_blocks(model)[0])[0]
    layer = place.layers[0]
    columns = weight_of(layer).shape[1]
    inputs = torch.randn(640, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, columns)
    texts, asked = inputs.split(64), []
    wanted = [text @ weight_of(layer).T for text in texts]
    original = weight_of(layer).clone()

    def judge(text):
        asked.append(text)
        return texts[text] @ weight_of(layer).T

    _, power = search_scales(place, inputs, Grid(3), wanted, judge)
    assert asked == [0, 4, 8] * awq.POWERS + list(range(10)) * awq.FINALISTS
    size, errors = inputs.abs().mean(dim=0), []
    for step in range(awq.POWERS):
        scales = size.pow(step / awq.POWERS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(original * scales, Grid(3)).dequantised() / scales
        errors.append(float((inputs @ (rounded - original).T).square().sum()))
    assert errors[round(power * awq.POWERS)] <= 1.01 * min(errors) < 0.9 * errors[0]
    weight_of(layer).zero_()
    nothing = [torch.zeros_like(want) for want in wanted]
    assert search_scales(place, inputs, Grid(3), nothing, judge)[1] == 0  # the smallest of equals


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("grid", [Grid(3), Grid(4, 8), Grid(3, 8, "min"), Grid(3, 8, "sym")], ids=str)
def test_calibrated_methods_come_nearer_to_the_model(model, method, grid):
    scale_some_channels(model)
    want = logits(model)

    def distance(recipe):
        return float((logits(lowbit_copy(model, recipe, TEXTS).model) - want).norm())

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
    clone = lowbit_copy(model, Recipe(Grid(2), "gptq", head=False), TEXTS[:1]).model
    first_of_second = next(iter(linear_layers(decoder_blocks(clone)[1]).values()))
    given = []
    first_of_second.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    with torch.inference_mode():
        clone(TEXTS[0][None])
    assert any(x.shape == given[0].shape and torch.allclose(x, given[0], atol=1e-5) for x in seen)


def test_more_bits_are_nearer(model):
    want = logits(model)
    errors = [float((logits(lowbit_copy(model, Recipe(Grid(bits))).model) - want).norm()) for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)


def test_equal_calibration_gives_equal_weights(model):
    for method in ("gptq", "awq"):
        one, other = (lowbit_copy(model, Recipe(Grid(4), method), TEXTS).model for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_what_cannot_be_done_is_refused(model):
    for method in ("gptq", "awq"):
        with pytest.raises(InputError, match=f"{method} has no calibration data; allowed: at least one text"):
            lowbit_copy(model, Recipe(Grid(4), method))
    with pytest.raises(InputError, match="method is 'hqq'; allowed: rtn, gptq, awq"):
        Recipe(Grid(4), "hqq")
    with pytest.raises(InputError, match="group_size is 5, which does not divide"):
        lowbit_copy(model, Recipe(Grid(4, 5)))


def test_awq_is_refused_where_folding_would_change_the_outputs():
    """Gemma's norms multiply by 1 + weight, so that a weight divided by s is no scale divided by s; rounding alone works."""
    model = tiny_gemma3()
    assert len(lowbit_copy(model, Recipe(Grid(4), "gptq"), TEXTS).weights) == 3 * 7 + 1
    with pytest.raises(
        InputError, match=r"awq cannot fold scales into Gemma3DecoderLayer; allowed: Llama's or GPT-2's blocks"
    ):
        lowbit_copy(model, Recipe(Grid(3), "awq"), TEXTS)
    model = copy.deepcopy(MODELS["llama"])
    attention = model.model.layers[0].self_attn
    attention.all_proj = attention.q_proj
    del attention.q_proj
    with pytest.raises(InputError, match=r"awq does not know the parts of LlamaDecoderLayer \(.*q_proj.*\); allowed: "):
        scaled_inputs(model.model.layers[0])
