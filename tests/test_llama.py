"""The decoder says what transformers' Llama says, however the text is fed, rolled back and run."""

import copy
import gc
import weakref

import pytest
import torch
from stand_ins import tiny_gpt2, tiny_llama, tiny_mistral
from sync_deps import closure
from torch import nn

from specdec.cache import CachedModel, context_length
from specdec.errors import InputError, InvariantError
from specdec.grid import Grid
from specdec.kernels import kernel_copy
from specdec.llama import FIRST_CAPACITY, LONGEST_PASS, LlamaDecoder, packed_linear, plain_linear
from specdec.lowbit import Recipe, lowbit_copy
from specdec.packed import packed_copy
from specdec.quantize import bfloat16_copy, int8_copy

LINEAR = {"plain": plain_linear, "packed": packed_linear}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def scaled(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


def with_biases(model):
    """transformers starts biases at 0, and norms at 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


MODELS = {
    "untied": tiny_llama,
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "heads 9/3": lambda: tiny_llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=3),
    "as many keys as queries": lambda: tiny_llama(num_attention_heads=4, num_key_value_heads=4),
    "wide heads, biases, norms": lambda: with_biases(tiny_llama(head_dim=24, attention_bias=True, mlp_bias=True)),
    "attention's biases": lambda: with_biases(tiny_llama(attention_bias=True)),
    "another activation": lambda: tiny_llama(hidden_act="gelu"),
    "linear": lambda: tiny_llama(**scaled("linear", factor=4.0)),
    "llama3": lambda: tiny_llama(**scaled("llama3", **LLAMA3)),
    "yarn": lambda: tiny_llama(**scaled("yarn", factor=4.0, original_max_position_embeddings=64)),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(params=LINEAR)
def linear(request):
    return LINEAR[request.param]


def text_of(length, seed=0, vocabulary=40):
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def uncached(model, text):
    return model(text[None]).logits[0]


def assert_same(ours, theirs):
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


# What it computes


@pytest.mark.parametrize("chunk", [1, 2, 5, 30])
def test_logits_equal_those_of_transformers_in_any_chunks(model, linear, chunk):
    text = text_of(30)
    cached = LlamaDecoder(model, linear).open()
    ours = torch.cat([cached.forward(part) for part in text.split(chunk)])
    assert_same(ours, uncached(model, text))
    cached.check(text)


def test_logits_equal_those_of_transformers_after_any_rollback(model, linear):
    generator = torch.Generator().manual_seed(0)
    text, cached = text_of(5), LlamaDecoder(model, linear).open()
    cached.forward(text, keep=1)
    for _ in range(20):  # as in decoding: a few tokens more, then some of them, all or none taken back
        fed = text_of(int(torch.randint(1, 6, (), generator=generator)), seed=len(text))
        logits = cached.forward(fed)
        text = torch.cat([text, fed])
        assert cached.length == len(text)
        assert_same(logits, uncached(model, text)[-len(fed) :])
        text = text[: len(text) - int(torch.randint(0, len(fed) + 1, (), generator=generator))]
        cached.rollback(len(text))
        assert cached.length == len(text)
        cached.check(text)
    assert len(text) > 16


def test_greedy_tokens_are_those_of_transformers(model, linear):
    prompt, cached = text_of(6), LlamaDecoder(model, linear).open()
    ours, unread = [], prompt
    for _ in range(40):
        ours.append(int(cached.forward(unread, keep=1).argmax()))
        unread = torch.tensor(ours[-1:])
    theirs = model.generate(
        prompt[None], attention_mask=torch.ones(1, 6, dtype=torch.int64), max_new_tokens=40, do_sample=False
    )
    assert ours == theirs[0, 6:].tolist() and len(set(ours)) > 4


def test_the_last_logits_asked_for_are_returned():
    decoder, tokens = LlamaDecoder(tiny_llama()), torch.tensor([1, 2, 3, 4])
    everything = decoder.open().forward(tokens)
    assert everything.shape == (4, 40)
    torch.testing.assert_close(decoder.open().forward(tokens, keep=2), everything[-2:])
    torch.testing.assert_close(decoder.open().forward(tokens, keep=4), everything)


def test_texts_longer_than_the_first_buffer_and_than_one_pass(linear):
    model = tiny_llama(max_position_embeddings=4 * LONGEST_PASS)
    decoder, length = LlamaDecoder(model, linear), 2 * LONGEST_PASS + 40
    text = text_of(length)
    want = uncached(model, text)
    at_once = decoder.open()
    assert_same(at_once.forward(text), want)
    for start in (FIRST_CAPACITY - 2, LONGEST_PASS - 1):  # across the edge of a buffer, within a pass
        slowly = decoder.open()
        slowly.forward(text[:start], keep=1)
        fed = [slowly.forward(part) for part in text[start : start + 8].split([1, 3, 1, 3])]
        assert_same(torch.cat(fed), want[start : start + 8])
        slowly.rollback(start - 3)
        assert_same(slowly.forward(text[start - 3 : start + 4]), want[start - 3 : start + 4])
        slowly.check(text[: start + 4])


def test_open_caches_of_one_decoder_do_not_disturb_one_another(linear):
    model = tiny_llama(max_position_embeddings=2 * FIRST_CAPACITY)
    decoder, texts = LlamaDecoder(model, linear), [text_of(20, 1), text_of(FIRST_CAPACITY + 20, 2)]
    caches = [decoder.open() for _ in texts]
    said = [[], []]
    caches[1].forward(texts[1][:FIRST_CAPACITY], keep=1)
    for step in range(20):
        for index, (cached, text) in enumerate(zip(caches, texts, strict=True)):
            said[index].append(cached.forward(text[len(text) - 20 + step][None]))
    for ours, text, cached in zip(said, texts, caches, strict=True):
        assert_same(torch.cat(ours), uncached(model, text)[-20:])
        cached.check(text)


# What it takes


def test_length_and_room_count_what_was_fed_and_not_taken_back():
    model = tiny_llama(max_position_embeddings=10)
    decoder = LlamaDecoder(model)
    assert (decoder.device, decoder.dtype, context_length(decoder)) == (torch.device("cpu"), torch.float32, 10)
    assert decoder.config is model.config
    cached, text = decoder.open(), text_of(10)
    assert (cached.length, cached.room) == (0, 10)
    cached.check(text[:0])
    cached.forward(text[:7])
    assert (cached.length, cached.room) == (7, 3)
    with pytest.raises(InputError, match=r"4 tokens were fed to a cache of 7; allowed: 1 to 3"):
        cached.forward(text[:4])
    with pytest.raises(InputError, match=r"0 tokens were fed to a cache of 7; allowed: 1 to 3"):
        cached.forward(text[:0])
    assert cached.length == 7
    cached.rollback(1)
    cached.rollback(1)
    assert (cached.length, cached.room) == (1, 9)
    assert_same(cached.forward(text[1:]), uncached(model, text)[1:])
    assert cached.room == 0
    cached.check(text)  # no room for one more token
    with pytest.raises(InputError, match="allowed: 1 to 0"):
        cached.forward(text[:1])
    cached.rollback(0)
    assert_same(cached.forward(text[:3]), uncached(model, text)[:3])


def test_buffers_never_outgrow_the_context():
    context = FIRST_CAPACITY + 50
    model = tiny_llama(max_position_embeddings=context)
    cached, text = LlamaDecoder(model).open(), text_of(context)
    cached.forward(text[:-50], keep=1)
    cached.forward(text[-50:-49], keep=1)
    assert {buffer.shape[1] for buffer in (*cached._keys, *cached._values)} == {context}
    assert_same(cached.forward(text[-49:]), uncached(model, text)[-49:])


@pytest.mark.parametrize("length", [-1, 4])
def test_a_rollback_to_what_was_never_there_is_refused(length):
    cached = LlamaDecoder(tiny_llama()).open()
    cached.forward(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=f"cannot roll a cache of 3 tokens back to {length}"):
        cached.rollback(length)


def test_a_token_that_does_not_exist_is_refused_and_changes_nothing():
    cached = LlamaDecoder(tiny_llama(max_position_embeddings=2 * LONGEST_PASS)).open()
    cached.forward(torch.tensor([1, 2, 3]))
    with pytest.raises(IndexError):
        cached.forward(torch.cat([text_of(LONGEST_PASS), torch.tensor([40])]))
    cached.check(torch.tensor([1, 2, 3]))


@pytest.mark.parametrize(("build", "name"), [(tiny_gpt2, "GPT2LMHeadModel"), (tiny_mistral, "MistralForCausalLM")])
def test_another_model_is_refused_by_its_class(build, name):
    with pytest.raises(InputError, match=rf"^{name} is not written out here; allowed: exactly LlamaForCausalLM$"):
        LlamaDecoder(build())


def test_what_cannot_be_decoded_is_refused():
    with pytest.raises(InputError, match=r"is in training mode; allowed: models after \.eval\(\)"):
        LlamaDecoder(tiny_llama().train())
    with pytest.raises(
        InputError, match=r"parameters in torch.float64; allowed: torch.float32, torch.bfloat16, torch.fl"
    ):
        LlamaDecoder(tiny_llama().double())
    spread = tiny_llama()
    spread.model.layers[1].to("meta")
    with pytest.raises(InputError, match="is spread over cpu, meta; allowed: one device"):
        LlamaDecoder(spread)
    with pytest.raises(
        InputError, match=r"kind 'dynamic', which may depend .*; allowed: default, linear, llama3, yarn"
    ):
        LlamaDecoder(tiny_llama(**scaled("dynamic", factor=2.0)))
    longrope = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    with pytest.raises(InputError, match="kind 'longrope'"):
        LlamaDecoder(tiny_llama(**scaled("longrope", **longrope)))
    with pytest.raises(InputError, match="q_proj is a PackedLinear; allowed: Linear, Int4Linear, Int8Linear"):
        LlamaDecoder(packed_copy(tiny_llama()))


def test_the_model_is_not_kept_and_may_be_dropped(linear):
    model, text = tiny_llama(), text_of(10)
    want, decoder = uncached(model, text), LlamaDecoder(model, linear)
    gone = weakref.ref(model)
    joined = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    del model
    gc.collect()
    assert gone() is None and joined() is None
    assert_same(decoder.open().forward(text), want)


def test_how_matrices_run_can_be_chosen():
    places, model, text = [], tiny_llama(), text_of(10)

    def noted(layers):
        places.append(len(layers))
        assert all(isinstance(layer, nn.Linear) for layer in layers)
        return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)

    decoder = LlamaDecoder(model, noted)
    assert places == [3, 1, 2, 1] * 2 + [1]
    assert_same(decoder.open().forward(text), uncached(model, text))


def test_what_decodes_imports_nothing_of_what_rounds_or_chooses():
    """A stage depends on every module that it imports; else a change of how weights are rounded would re-time all models."""
    modules = {"lowbit", "gptq", "awq", "policy", "theory", "generate", "drafters"}
    assert not {f"specdec/{name}.py" for name in modules} & closure("specdec/runners.py")
    assert "specdec/policy.py" not in closure("specdec/generate.py")


# The check


def test_the_check_catches_other_tokens_lengths_and_entries(linear):
    cached, text = LlamaDecoder(tiny_llama(), linear).open(), torch.tensor([5, 6, 7, 8])
    cached.forward(text)
    cached.check(text)
    cached.check(text)  # it changed nothing
    with pytest.raises(InvariantError, match=r"the cache of 3 tokens has the lengths \[4\]"):
        cached.check(text[:3])
    with pytest.raises(InvariantError, match="keys of layer 0 differ by"):
        cached.check(torch.tensor([5, 6, 9, 8]))
    for buffers, name in ((cached._keys, "keys"), (cached._values, "values")):
        with torch.inference_mode():
            buffers[1][:, 2] += 0.01
            with pytest.raises(InvariantError, match=f"^{name} of layer 1 differ"):
                cached.check(text)
            buffers[1][:, 2] -= 0.01
    cached.rollback(2)
    cached.check(text[:2])


def test_rounding_in_16_bits_is_no_fault_and_another_position_is_one():
    text = text_of(30)
    for copied in (bfloat16_copy, int8_copy):
        cached = LlamaDecoder(copied(tiny_llama())).open()
        for part in text.split([7, 1, 1, 5, 16]):
            cached.forward(part)
        cached.check(text)
        with torch.inference_mode():
            cached._keys[1][:, :30] = cached._keys[1][:, :30].roll(1, 1)
            with pytest.raises(InvariantError, match="keys of layer 1"):
                cached.check(text)


# Weights of few bits


def wide_llama(**changes):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 48, "initializer_range": 0.2}
    return tiny_llama(**sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes)


RECIPES = [
    Recipe(Grid(4, 32, "min")),
    Recipe(Grid(4, 64), head=False),
    Recipe(Grid(8, None, "sym")),
    Recipe(Grid(8, None, "sym"), head=False),
]


@pytest.mark.parametrize(
    "build", [wide_llama, lambda: with_biases(wide_llama(attention_bias=True, tie_word_embeddings=True))]
)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_layers_of_low_bits_are_nearer_to_their_widened_weights_than_a_copy_in_bfloat16(recipe, build, linear):
    rounded = lowbit_copy(build(), recipe)
    low, text = kernel_copy(rounded), text_of(60, vocabulary=48)
    want, throughout = uncached(rounded.model, text), uncached(low, text).float()
    decoder = LlamaDecoder(low, linear)
    assert decoder.dtype == torch.bfloat16
    for chunk in (1, 5, 60):
        cached = decoder.open()
        said = torch.cat([cached.forward(part) for part in text.split(chunk)])
        assert said.dtype == torch.float32
        assert float((said - want).norm()) < float((throughout - want).norm())
        cached.check(text)


def test_joined_layers_of_low_bits_say_what_they_say_alone():
    for recipe in RECIPES:
        low = kernel_copy(lowbit_copy(with_biases(wide_llama(attention_bias=True)), recipe))
        attention, x = low.model.layers[0].self_attn, torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
        layers = [attention.q_proj, attention.k_proj, attention.v_proj]
        alone = torch.cat([layer(x.bfloat16()) for layer in layers], dim=-1).float()
        torch.testing.assert_close(plain_linear(layers)(x), alone, rtol=2**-7, atol=1e-3)


def test_layers_that_cannot_be_joined_run_one_by_one():
    model, text = with_biases(wide_llama(attention_bias=True)), text_of(20, vocabulary=48)
    unequal = copy.deepcopy(model)
    unequal.model.layers[0].self_attn.k_proj.bias = None
    unequal.model.layers[1].mlp.up_proj = int8_copy(model).model.layers[1].mlp.up_proj
    bare = copy.deepcopy(unequal)
    up = bare.model.layers[1].mlp.up_proj
    bare.model.layers[1].mlp.up_proj = nn.Linear(64, 128, bias=False)
    with torch.no_grad():
        bare.model.layers[1].mlp.up_proj.weight.copy_(up.weight * up.scales.float()[:, None])
    ours, theirs = LlamaDecoder(unequal).open().forward(text), uncached(bare, text)
    assert float((ours - theirs).norm()) < 0.01 * float(theirs.norm())


def test_a_copy_in_bfloat16_runs_with_a_float32_residual_stream(linear):
    model, text = wide_llama(), text_of(60, vocabulary=48)
    low = bfloat16_copy(model)
    want = uncached(model, text)
    ours, theirs = LlamaDecoder(low, linear).open().forward(text), CachedModel(low).forward(text).float()
    assert float((ours - want).norm()) < float((theirs - want).norm())


def test_rotary_tables_do_not_rest_on_the_cosine_of_float32(monkeypatch):
    model, text = tiny_llama(), text_of(30)
    expected = LlamaDecoder(model).open().forward(text)
    for name in ("cos", "sin"):
        exact = getattr(torch.Tensor, name)

        def coarse(angles, exact=exact):
            turned = exact(angles)
            return turned.bfloat16().to(turned) if angles.dtype == torch.float32 else turned

        monkeypatch.setattr(torch.Tensor, name, coarse)
    assert torch.equal(LlamaDecoder(model).open().forward(text), expected)
