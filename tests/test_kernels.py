"""Layers that run on their levels compute what the rounded and widened ones do, up to bfloat16."""

import copy
import itertools
import pickle
import types

import pytest
import torch
from stand_ins import tiny_llama
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from specdec.cache import CachedModel
from specdec.errors import InputError
from specdec.gptq import gptq
from specdec.grid import KINDS, Grid, GridWeight, round_to_nearest
from specdec.kernels import GROUP_SIZES, INT4_GRID, Int4Linear, has_kernel, int4_copy, kernel_copy, stored_bytes
from specdec.lowbit import Recipe, cast_copy, lowbit_copy
from specdec.quantize import Int8Linear, bfloat16_copy

TEXT = torch.randint(40, (30,), generator=torch.Generator().manual_seed(0))
SHAPES = [(576, 576, 64), (1536, 576, 32), (576, 1536, 128), (192, 576, 64), (80, 256, 256), (16, 32, 32), (48, 64, 64)]


def wide_gpt2():
    sizes = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=48, bos_token_id=None, eos_token_id=None, **sizes)).eval()


def wide_llama(**changes):
    return tiny_llama(
        **{"hidden_size": 64, "intermediate_size": 128, "vocab_size": 48, "initializer_range": 0.2} | changes
    )


MODELS = {
    "gpt2, tied": wide_gpt2(),
    "llama": wide_llama(),
    "llama, tied": wide_llama(tie_word_embeddings=True),
    "llama, 40 tokens": wide_llama(vocab_size=40),  # its head has no kernel: 40 is no multiple of 16
}


@pytest.fixture(params=MODELS)
def model(request):
    return copy.deepcopy(MODELS[request.param])


def random_weight(out, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) * torch.logspace(-2, 1, out)[:, None]  # rows of unequal size
    return weight + 0.3 * weight.abs().mean(dim=1, keepdim=True)  # and off centre


def inputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def off(y, x, weight, bias=None):
    """The largest error of an entry of y = x Wᵀ + b, relative to the size of what was summed."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.bfloat16().double())
    return float(((y.double() - exact).abs() / (x.double().abs() @ weight.double().abs().T + 1e-30)).max())


def never_called(*_):
    raise AssertionError("the kernel was called")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "width", "group"), SHAPES)
def test_the_layer_is_the_product_with_the_dequantised_weight(out, width, group, kind):
    found = round_to_nearest(random_weight(out, width), Grid(4, group, kind))
    layer = Int4Linear(found, None)
    for rows in (1, 4, 5, 33):
        x = inputs(rows, width)
        y = layer(x)
        assert y.dtype == torch.bfloat16 and y.shape == (rows, out)
        assert off(y, x, layer.widened()) < 2**-8  # of the weight as the kernel has it
        assert off(y, x, found.dequantised()) < 2**-6


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_moves_a_weight_by_a_small_part_of_a_step(kind):
    """Scale and offset are off by one part in 512 each, and reach up to 8 steps from the middle level."""
    found = round_to_nearest(random_weight(64, 576), Grid(4, 64, kind))
    layer = Int4Linear(found, None)
    step = found.scales[:, found.groups]
    assert float(((layer.widened() - found.dequantised()).abs() / step).max()) < 1 / 16
    if kind == "sym":
        assert bool((layer.widened()[found.dequantised() == 0] == 0).all())


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_leading_dimensions_and_bias(shape, bias):
    found, x = round_to_nearest(random_weight(32, 64), Grid(4, 32)), inputs(*shape)
    offset = torch.linspace(-2, 2, 32) if bias else None
    y = Int4Linear(found, offset)(x)
    assert y.shape == (*shape[:-1], 32)
    if y.numel():
        assert off(y, x, found.dequantised(), offset) < 2**-6
    strided = inputs(64, 5).T  # as no kernel takes it
    assert off(Int4Linear(found, None)(strided), strided, found.dequantised()) < 2**-6


def test_levels_and_their_order_by_hand():
    """Unit inputs read the weight out, column by column; all numbers are exact in bfloat16."""
    levels = torch.arange(16 * 64).reshape(16, 64).remainder(16).to(torch.uint8)
    scales = torch.tensor([[0.5, 2.0]]).repeat(16, 1)
    zeros = torch.tensor([[3.0, 8.0]]).repeat(16, 1)
    layer = Int4Linear(GridWeight(levels, scales, zeros, torch.arange(64) // 32, Grid(4, 32)), None)
    want = torch.cat([(levels[:, :32] - 3.0) * 0.5, (levels[:, 32:] - 8.0) * 2], dim=1)
    assert torch.equal(layer(torch.eye(64).bfloat16()).float(), want.T)
    assert torch.equal(layer.widened(), want)
    assert layer.nibbles[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_kernel_the_same_is_computed(kind, monkeypatch):
    found = round_to_nearest(random_weight(96, 256), Grid(4, 64, kind))
    layer, bias = Int4Linear(found, None), torch.linspace(-2, 2, 96)
    for rows in (1, 5, 33):
        x = inputs(rows, 256)
        y = layer(x)
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", never_called)
            patch.setattr(Int4Linear, "_runs_kernel", lambda *_: False)
            assert off(layer(x), x, layer.widened()) < 2**-7
        assert off(y, x, layer.widened()) < 2**-8
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", never_called)
    y = Int4Linear(found, bias)(inputs(5, 256).float())  # float32 activations
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, inputs(5, 256).float() @ layer.widened().T + bias.bfloat16())


class GpuKernel:
    """What `aten::_weight_int4pack_mm` and its packing do, by torch's description: bytes of two levels, the even column in the
    upper half, and rows and groups of columns as the kernel checks them. It keeps the bytes as they are."""

    def pack(self, nibbles, tiles):
        assert nibbles.dtype == torch.uint8 and tiles in (2, 4, 8)
        assert nibbles.shape[0] % 8 == 0 and 2 * nibbles.shape[1] % (16 * tiles) == 0
        return nibbles

    def product(self, x, packing, group, scales):
        levels = torch.stack([packing >> 4, packing & 15], dim=-1).flatten(1).float() - 8
        scale, offset = scales.float().repeat_interleave(group, dim=0).unbind(dim=-1)
        return (x.float() @ (levels.T * scale + offset)).to(x.dtype)


@pytest.mark.parametrize(("out", "width", "group"), SHAPES)
def test_a_gpu_gets_the_levels_in_its_own_order(out, width, group, monkeypatch):
    layer, gpu = Int4Linear(round_to_nearest(random_weight(out, width), Grid(4, group)), None), GpuKernel()
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", gpu.pack)
    packing = layer._packed(torch.device("cuda"))
    x = inputs(5, width)
    assert off(gpu.product(x, packing, layer.width, layer.scales), x, layer.widened()) < 2**-8


def test_a_gpu_is_asked_for_its_own_product(monkeypatch):
    """With tensors that have a device and a shape but no entries: torch checks the calls, and nothing is computed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    layer = Int4Linear(round_to_nearest(random_weight(48, 96), Grid(4, 32)), torch.zeros(48))
    with FakeTensorMode():
        for name, buffer in list(layer.named_buffers()):
            setattr(layer, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))
        y = layer(torch.empty(5, 96, dtype=torch.bfloat16, device="cuda"))
        assert y.shape == (5, 48) and y.dtype == torch.bfloat16 and y.device.type == "cuda"
        assert layer._packing.shape == (6, 3, 32, 1) and layer._packing.dtype == torch.int32


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_which_gpus_run_the_kernel(capability, runs, monkeypatch):
    layer = Int4Linear(round_to_nearest(random_weight(32, 64), Grid(4, 32)), None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x = types.SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"))
    assert layer._runs_kernel(x) is runs
    x.dtype = torch.float32
    assert not layer._runs_kernel(x)


@pytest.mark.parametrize("out", [1, 8, 24, 40])
def test_outputs_that_are_no_multiple_of_16_are_computed_without_the_kernel(out, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", never_called)
    found, x = round_to_nearest(random_weight(out, 64), Grid(4, 32)), inputs(5, 64)
    assert off(Int4Linear(found, None)(x), x, found.dequantised()) < 2**-6


def test_the_packing_is_the_kernels_own_and_goes_nowhere():
    """Neither into copies nor files, nor through a move; and it is made anew when other levels are loaded."""
    one, other = (round_to_nearest(random_weight(32, 64, seed), Grid(4, 32)) for seed in (0, 1))
    layer, x = Int4Linear(one, None), inputs(3, 64)
    y = layer(x)
    assert layer._packing is not None
    assert set(layer.state_dict()) == set(dict(layer.named_buffers())) == {"nibbles", "scales"}
    for moved in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert moved._packing is None and torch.equal(moved(x), y)
    assert layer._packing is not None
    layer.load_state_dict(Int4Linear(other, None).state_dict())
    assert torch.equal(layer(x), Int4Linear(other, None)(x)) and not torch.equal(layer(x), y)
    before = layer(x)
    assert layer.to("cpu")._packing is None and torch.equal(layer(x), before)
    away = copy.deepcopy(layer).to("meta")  # a device that holds no numbers
    assert away._packing is None and away(x.to("meta")).device.type == "meta"
    back = away.to_empty(device="cpu")
    back.load_state_dict(layer.state_dict())
    assert torch.equal(back(x), before)
    assert torch.equal(copy.deepcopy(layer).float()(x.float()), x.float() @ layer.widened().T)


def test_what_has_a_kernel():
    grids = [
        Grid(*args) for args in itertools.product(range(2, 9), (None, 16, 32, 48, 64, 96, 128, 192, 256, 512), KINDS)
    ]
    found = {(grid.bits, grid.group_size, grid.kind) for grid in grids if has_kernel(grid)}
    assert found == {(4, size, kind) for size in GROUP_SIZES for kind in KINDS} | {(8, None, "sym")}


@pytest.mark.parametrize(
    "grid", [Grid(3, 64), Grid(4), Grid(4, 16), Grid(8, None, "zero"), Grid(8, 64, "sym")], ids=str
)
def test_grids_without_a_kernel_are_refused_by_name(grid):
    found = lowbit_copy(MODELS["llama"], Recipe(grid))
    with pytest.raises(
        InputError, match=rf"^Grid\(bits={grid.bits}, .*{grid.kind}.* has no kernel; allowed: 4 bits in"
    ):
        kernel_copy(found)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"group_size is 128, .* 576 columns .*; allowed: None, 32, 64, 96, 192$"):
        round_to_nearest(torch.zeros(16, 576), Grid(4, 128))
    found = round_to_nearest(torch.zeros(16, 576), Grid(4, 64))
    wrong = GridWeight(found.levels, found.scales, found.zeros, found.groups, Grid(4, 128))
    with pytest.raises(InputError, match=r"group_size is 128, .* 576 columns"):
        Int4Linear(wrong, None)
    mixed = GridWeight(found.levels, found.scales, found.zeros, found.groups.flip(0), found.grid)
    with pytest.raises(InputError, match="groups are mixed over the columns; allowed: neighbouring columns"):
        Int4Linear(mixed, None)
    with pytest.raises(InputError, match="bits is 8; allowed: 4"):
        Int4Linear(round_to_nearest(torch.zeros(16, 64), Grid(8, None, "sym")), None)
    with pytest.raises(InputError, match=r"rounded to no grid \(a cast\); allowed: one of lowbit_copy"):
        kernel_copy(cast_copy(MODELS["llama"], torch.bfloat16))


@pytest.mark.parametrize("act_order", [True, False])
def test_groups_of_gptq_are_neighbouring_columns(act_order):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64)
    found = gptq(random_weight(32, 64), x.T @ x, Grid(4, 32), act_order=act_order)
    assert off(Int4Linear(found, None)(x.bfloat16()), x.bfloat16(), found.dequantised()) < 2**-6


def calibration():
    return [torch.randint(40, (32,), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


RECIPES = [
    *(Recipe(Grid(4, 32, kind), method) for kind, method in zip(KINDS, ("gptq", "rtn", "awq"), strict=True)),
    Recipe(Grid(4, 64), "rtn", head=False),
    Recipe(Grid(8, None, "sym"), "gptq"),
    Recipe(Grid(8, None, "sym"), "rtn", head=False),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_model_says_what_its_widened_copy_says(model, recipe):
    rounded = lowbit_copy(model, recipe, calibration())
    before = copy.deepcopy(rounded.model.state_dict())
    clone = kernel_copy(rounded)
    after = rounded.model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    low = {name for name, layer in clone.named_modules() if isinstance(layer, Int4Linear | Int8Linear)}
    assert low == set(rounded.weights)
    assert not any(isinstance(layer, nn.Linear | Conv1D) for name, layer in clone.named_modules() if name != "lm_head")
    assert all(parameter.dtype == torch.bfloat16 for parameter in clone.parameters()) and not clone.training
    want, plain, said = (
        CachedModel(m).forward(TEXT).float() for m in (rounded.model, bfloat16_copy(rounded.model), clone)
    )
    unrounded = CachedModel(model).forward(TEXT).float()
    # As near as bfloat16 alone comes, a few times over; and far nearer than the rounding to so few bits.
    error, cast = float((said - want).norm()), float((plain - want).norm())
    assert error < 4 * cast + 1e-3 * float(want.norm())
    if recipe.grid.bits == 4:
        assert error < 0.5 * float((unrounded - want).norm())


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_levels_of_8_bits_are_taken_as_they_are(method):
    rounded = lowbit_copy(MODELS["llama"], Recipe(Grid(8, None, "sym"), method), calibration())
    for name, weight in rounded.weights.items():
        layer = kernel_copy(rounded).get_submodule(name)
        assert isinstance(layer, Int8Linear)
        assert torch.equal(layer.weight.int(), weight.levels.int() - 127)
        assert torch.equal(layer.scales, weight.scales[:, 0].bfloat16())


def test_a_tied_head_runs_on_a_copy_of_its_own():
    model = MODELS["llama, tied"]
    clone = kernel_copy(lowbit_copy(model, Recipe(Grid(4, 32))))
    assert isinstance(clone.lm_head, Int4Linear)
    assert torch.equal(clone.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())
    kept = kernel_copy(lowbit_copy(model, Recipe(Grid(4, 32), head=False)))
    assert kept.lm_head.weight is kept.model.embed_tokens.weight
    assert stored_bytes(clone) - stored_bytes(kept) == 48 * 64 * (4 + 32 / 32) / 8


@pytest.mark.parametrize("name", ["gpt2, tied", "llama", "llama, tied"])
def test_a_draft_of_4_bits_has_a_head_of_8(name):
    model = MODELS[name]
    before = copy.deepcopy(model.state_dict())
    clone = int4_copy(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    head, weight = clone.get_output_embeddings(), model.get_output_embeddings().weight.detach()
    assert type(head) is Int8Linear and clone.lm_head is head
    expected = Int8Linear(weight, None)
    assert torch.equal(head.weight, expected.weight) and torch.equal(head.scales, expected.scales)
    assert torch.equal(clone.get_input_embeddings().weight, model.get_input_embeddings().weight.bfloat16())
    kept = kernel_copy(lowbit_copy(model, Recipe(INT4_GRID, head=False)))
    low = {name: layer for name, layer in clone.named_modules() if isinstance(layer, Int4Linear)}
    assert set(low) == {name for name, layer in kept.named_modules() if isinstance(layer, Int4Linear)} and low
    for name, layer in low.items():
        assert torch.equal(layer.nibbles, kept.get_submodule(name).nibbles)
        assert torch.equal(layer.scales, kept.get_submodule(name).scales)
    assert all(parameter.dtype == torch.bfloat16 for parameter in clone.parameters()) and not clone.training
    ours, theirs = (CachedModel(m).forward(TEXT).float() for m in (clone, kept))
    assert 0 < float((ours - theirs).norm()) < 0.02 * float(theirs.norm())


def test_a_layer_that_does_not_come_out_even_in_groups_has_no_4_bits():
    with pytest.raises(InputError, match="group_size is 32, which does not divide the 72 columns"):
        int4_copy(tiny_llama(hidden_size=72, num_attention_heads=6, num_key_value_heads=3))


def test_rotary_frequencies_keep_their_precision():
    clone = kernel_copy(lowbit_copy(MODELS["llama"], Recipe(Grid(4, 32))))
    assert clone.model.rotary_emb.inv_freq.dtype == torch.float32


def test_copies_and_moves_of_a_model_say_the_same(model):
    clone = kernel_copy(lowbit_copy(model, Recipe(Grid(4, 32, "min"))))
    want, stored = CachedModel(clone).forward(TEXT), stored_bytes(clone)
    for other in (copy.deepcopy(clone), copy.deepcopy(clone).to("cpu")):
        assert torch.equal(CachedModel(other).forward(TEXT), want)
    assert stored_bytes(clone) == stored  # a packing is not counted


def test_stored_bytes_by_hand():
    """Of a layer 64 → 32 with groups of 32: half a byte a weight, 4 bytes a group of a row, 2 an entry of the bias."""
    layer = Int4Linear(round_to_nearest(torch.zeros(32, 64), Grid(4, 32)), torch.zeros(32))
    layer(inputs(1, 64))
    assert stored_bytes(layer) == 32 * 64 / 2 + 32 * 2 * 4 + 32 * 2
    tied = bfloat16_copy(MODELS["llama, tied"])
    assert stored_bytes(tied) == 2 * sum(p.numel() for p in tied.parameters()) + sum(
        b.numel() * b.element_size() for b in tied.buffers()
    )
