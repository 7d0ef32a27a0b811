"""Native code computes what the model computes, and a token's logits do not depend on how many are fed with it."""

import pytest
import torch
from stand_ins import tiny_llama
from test_runners import LOW_BITS, require, wide_llama

from specdec import native
from specdec.cache import CachedModel
from specdec.drafters import PromptLookupDrafter
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.llama import FIRST_CAPACITY, LONGEST_PASS, LlamaDecoder
from specdec.quantize import bfloat16_copy
from specdec.runners import runner

MODELS = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "an odd vocabulary": {"vocab_size": 49},
    "narrow heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "heads of another width": {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 1},
    "a tied head": {"tie_word_embeddings": True},
}
WEIGHTS = {"float32": lambda model: model, "bfloat16": bfloat16_copy} | LOW_BITS


def text_of(length):
    return torch.randint(40, (length,), generator=torch.Generator().manual_seed(length))


def fed(decoder, text, parts):
    cached = decoder.open()
    return torch.cat([cached.forward(part) for part in text.split(parts)])


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_the_model(changes):
    require("native")
    model = wide_llama(**changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    text = text_of(30)
    ours, theirs = fed(LlamaDecoder(model, native=True), text, [9, 1, 13, 7]), CachedModel(model).forward(text)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("architecture", [None, []], ids=["this processor", "any processor"])
def test_one_pass_gives_bit_for_bit_what_single_tokens_give(weights, architecture, monkeypatch):
    require("native")
    if architecture is not None:
        monkeypatch.setattr(native, "ARCHITECTURES", {})
        native.library.cache_clear()
        monkeypatch.setattr(native, "library", native.library.__wrapped__)
    model, text = WEIGHTS[weights](wide_llama(vocab_size=49)), text_of(23)
    decoder = LlamaDecoder(model, native=True)
    one_by_one = fed(decoder, text, 1)
    for parts in (23, [1, 2, 3, 4, 5, 6, 2], [10, 13], [7, 16]):
        assert torch.equal(fed(decoder, text, parts), one_by_one)
    expected = CachedModel(model).forward(text).float()
    torch.testing.assert_close(one_by_one, expected, rtol=0, atol=1e-4 if weights == "float32" else 0.2)


def test_long_texts_and_any_number_of_threads():
    require("native")
    model, length = wide_llama(max_position_embeddings=2048), LONGEST_PASS + 70
    text, decoder = text_of(length), LlamaDecoder(wide_llama(max_position_embeddings=2048), native=True)
    expected = CachedModel(model).forward(text)
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            for parts in (length, [FIRST_CAPACITY - 1, 2, length - FIRST_CAPACITY - 1]):
                torch.testing.assert_close(fed(decoder, text, parts), expected, rtol=0, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_float32_weights_are_the_models_own():
    require("native")
    model = wide_llama()
    stack = LlamaDecoder(model, native=True).stack
    kept = {tensor.data_ptr() for tensor in stack._kept}
    assert {parameter.data_ptr() for name, parameter in model.named_parameters() if "embed" not in name} == kept


def test_greedy_decoding_has_no_ties():
    """Of equal logits each pass sees the same ones equal: here all tokens are alike but for rounding."""
    require("native")
    model = wide_llama(initializer_range=1e-4)
    ours, prompt = runner(model, "native"), torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    plain = autoregressive_generate(ours, prompt, max_new_tokens=60)
    for k in (1, 3, 8):
        result = speculative_generate(ours, prompt, drafter=PromptLookupDrafter(), k=k, max_new_tokens=60)
        assert result.new_tokens == plain.new_tokens and result.stats.proposed > 0


def test_what_it_does_not_run():
    require("native")
    assert "multiple of 32" in native.refusal(tiny_llama(hidden_size=16, num_attention_heads=2, num_key_value_heads=1))
    assert native.refusal(wide_llama(hidden_act="gelu")) == "the activation silu"
    assert "weights in" in native.refusal(wide_llama().half())
    assert native.refusal(wide_llama()) is None


# Making it


@pytest.fixture
def no_code_yet(tmp_path, monkeypatch):
    require("native")
    monkeypatch.setattr(native.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    native.library.cache_clear()
    yield tmp_path / "specdec"
    native.library.cache_clear()


def test_it_is_made_once_and_anew_for_other_flags(no_code_yet, monkeypatch):
    assert native.library() is not None
    made = [path.name for path in no_code_yet.iterdir()]
    assert len(made) == 1 and made[0].endswith(".so")
    commands = []
    monkeypatch.setattr(native, "_run", commands.append)
    native.library.cache_clear()
    assert native.library() is not None and not commands
    monkeypatch.setenv("CXX", "another-compiler")
    native.library.cache_clear()
    assert native.library() is None and commands[0][0] == "another-compiler"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_is_none(compiler, no_code_yet, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    assert native.library() is None and native.refusal(wide_llama()).startswith("a C++ compiler")
    assert list(no_code_yet.iterdir()) == []


def test_a_folder_that_cannot_be_made(no_code_yet):
    no_code_yet.write_text("a file in its place")
    assert native.library() is None
