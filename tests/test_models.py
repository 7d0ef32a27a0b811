"""The toy pair, loading with an explicit dtype, and whether two models fit together."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from specdec.cache import context_length
from specdec.errors import InputError
from specdec.models import (
    check_pair,
    count_parameters,
    load_model,
    random_prompt,
    resolve_device,
    resolve_dtype,
    toy_draft,
    toy_target,
)

CPU = torch.device("cpu")
WORDS = [f"word{i}" for i in range(20)]


def weights(model):
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def tiny_gpt2(vocabulary=20, **options):
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


@pytest.fixture
def folder(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


# The toy pair


@torch.inference_mode()
def self_generated(model, temperature, texts=8, tokens=48):
    """Random prompts of 8 tokens and what the model makes of them, shape (texts, 8 + tokens)."""
    generator = torch.Generator().manual_seed(1)
    text = torch.cat([random_prompt(model, 8, generator) for _ in range(texts)])
    unread, cache = text, None
    for _ in range(tokens):
        output = model(unread, cache=cache, use_cache=True)
        logits, cache = output.logits[:, -1], output.cache
        if temperature == 0:
            unread = logits.argmax(dim=-1, keepdim=True)
        else:
            unread = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        text = torch.cat([text, unread], dim=1)
    return text


@torch.inference_mode()
def alpha(target, draft, temperature):
    """E[Σ min(p, q)] on the target's own text; at T = 0 the rate of equal argmaxes."""
    text = self_generated(target, temperature)
    logits = [model(text).logits[:, 7:-1] for model in (target, draft)]
    if temperature == 0:
        return (logits[0].argmax(dim=-1) == logits[1].argmax(dim=-1)).double().mean().item()
    p, q = ((one / temperature).softmax(dim=-1) for one in logits)
    return torch.minimum(p, q).sum(dim=-1).mean().item()


def test_toy_models_are_seeded_and_leave_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    for make in (toy_target, toy_draft):
        assert torch.equal(weights(make(3)), weights(make(3)))
        assert not torch.equal(weights(make(3)), weights(make(4)))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)  # another global state, the same model
    assert torch.equal(weights(toy_target(0)), weights(toy_target()))


def test_toy_draft_is_a_perturbed_copy():
    target, draft = toy_target(), toy_draft()
    assert not draft.training and {parameter.dtype for parameter in draft.parameters()} == {torch.float32}
    assert torch.equal(target.lm_head.weight, draft.lm_head.weight)
    pairs = zip(target.transformer.h.parameters(), draft.transformer.h.parameters(), strict=True)
    changed = [not torch.equal(one, other) for one, other in pairs if one.dim() == 2]
    assert changed and all(changed)
    check_pair(target, draft)
    assert context_length(target) == 512


@pytest.mark.parametrize("seed", [0, 1])
def test_toy_acceptance_is_u_shaped_in_temperature(seed):
    target, draft = toy_target(seed), toy_draft(seed)
    agreement = alpha(target, draft, 0)
    assert 0.93 < agreement < 0.985
    assert abs(alpha(target, draft, 0.02) - agreement) < 0.02  # the limit T -> 0
    assert 0.35 < alpha(target, draft, 0.2) < 0.55
    assert alpha(target, draft, 0.1) > 0.7 and alpha(target, draft, 0.5) > 0.7
    assert alpha(target, draft, 10.0) > 0.98  # both uniform as T -> infinity


def test_toy_greedy_text_does_not_repeat_itself():
    text = self_generated(toy_target(), 0, texts=2, tokens=100)
    assert all(len(set(row[8:].tolist())) > 90 for row in text)


def test_random_prompt_is_seeded():
    model = tiny_gpt2()
    prompt = random_prompt(model, 12, torch.Generator().manual_seed(5))
    assert prompt.shape == (1, 12) and prompt.dtype == torch.int64
    assert torch.equal(prompt, random_prompt(model, 12, torch.Generator().manual_seed(5)))


# Loading


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_a15_dtype_is_the_one_asked_for(tmp_path, stored, asked):
    tiny_gpt2().to(stored).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")
    model = load_model(tmp_path, dtype=asked, device=CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {asked}
    assert not model.training


def test_loading_uses_no_random_numbers(folder):
    before = torch.random.get_rng_state()
    assert torch.equal(weights(load_model(folder, dtype=torch.float32, device=CPU)), weights(tiny_gpt2()))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_tied_head_is_counted_once(folder):
    model = load_model(folder, dtype=torch.float32, device=CPU)
    untied = tiny_gpt2(tie_word_embeddings=False)
    assert count_parameters(untied) - count_parameters(model) == 20 * 16
    stored = load_file(folder / "model.safetensors")
    assert count_parameters(model) == sum(tensor.numel() for tensor in stored.values())


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_in_half(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def pickle_only(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


C_FC = "transformer.h.0.mlp.c_fc.weight"
BROKEN = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text('{"model_'), "cannot be loaded"),
    "unknown architecture": (lambda folder: (folder / "config.json").write_text('{"model_type": "x"}'), "cannot be loaded"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no file named model\.safetensors"),
    "pickled weights": (pickle_only, r"no file named model\.safetensors"),
    "half the weights": (cut_in_half, "incomplete"),
    "a tensor missing": (lambda folder: edit_weights(folder, lambda t: t.pop(C_FC)), rf"missing: {C_FC}\)"),
    "a tensor too many": (
        lambda folder: edit_weights(folder, lambda t: t.update({C_FC.replace("h.0", "h.1"): t[C_FC].clone()})),
        r"unexpected: transformer\.h\.1",
    ),
    "a tensor of another shape": (
        lambda folder: edit_weights(folder, lambda t: t.update({C_FC: torch.zeros(16, 3)})),
        rf"mismatched: .*{C_FC}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a14_an_incomplete_folder_is_refused_in_one_sentence(folder, fault, capfd):
    damage, message = BROKEN[fault]
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        load_model(folder, dtype=torch.float32, device=CPU)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


# Names


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    for name in ("cuda", "mps", "tpu"):
        with pytest.raises(InputError, match=f"'{name}'.*allowed: auto, cpu"):
            resolve_device(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"


def test_dtypes():
    assert resolve_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(InputError, match=r"'int8'.*float32, bfloat16, float16"):
        resolve_dtype("int8")


# Pairs


def save_tokenizer(folder, words=WORDS, **special):
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_a09_a_draft_with_another_vocabulary_size_is_refused():
    with pytest.raises(InputError, match=r"20 tokens.*24"):
        check_pair(tiny_gpt2(20), tiny_gpt2(24))


def test_a09_a_draft_with_another_tokenizer_is_refused(tmp_path):
    swapped = [*WORDS[:7], WORDS[12], *WORDS[8:12], WORDS[7], *WORDS[13:]]
    tokenizers = save_tokenizer(tmp_path / "a"), save_tokenizer(tmp_path / "b", swapped)
    with pytest.raises(InputError, match="Token 7 is 'word7' to the target and 'word12' to the draft"):
        check_pair(tiny_gpt2(), tiny_gpt2(), *tokenizers)


def test_a09_one_tokenizer_in_two_folders_is_fine(tmp_path):
    tokenizers = [save_tokenizer(tmp_path / name, eos_token="word3") for name in "ab"]
    check_pair(tiny_gpt2(), tiny_gpt2(), *tokenizers)


def test_a09_other_special_tokens_are_refused(tmp_path):
    tokenizers = [save_tokenizer(tmp_path / word, eos_token=word) for word in ("word3", "word4")]
    with pytest.raises(InputError, match="eos_token is 'word3' to the target and 'word4' to the draft"):
        check_pair(tiny_gpt2(), tiny_gpt2(), *tokenizers)
