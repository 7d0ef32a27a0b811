"""The toy pair, loading with an explicit dtype, and whether two models fit together."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import ScriptedModel, nearby, random_table, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from specdec import models
from specdec.cache import context_length
from specdec.chance import GeneratorChooser
from specdec.drafters import ModelDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.identity import check_greedy_identity, emitted_gaps
from specdec.models import (
    SPREAD,
    check_pair,
    check_runs,
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


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])  # the new name and the old one
@pytest.mark.parametrize("named", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_a15_a_dtype_that_only_the_configuration_names_decides_nothing(folder, key, named, asked):
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config | {key: named}))
    model = load_model(folder, dtype=asked, device=CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {asked}
    assert torch.equal(weights(model), weights(tiny_gpt2()).to(asked))
    assert torch.get_default_dtype() == torch.float32


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


# Weights in several files


@pytest.fixture
def shards(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "shards", max_shard_size="16KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 2
    return tmp_path / "shards"


def test_a_checkpoint_of_two_shards_is_loaded(shards):
    assert torch.equal(weights(load_model(shards, dtype=torch.float32, device=CPU)), weights(tiny_llama()))


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_a14_a_missing_shard_is_named(shards, name, capfd):
    (shards / name).unlink()
    with pytest.raises(InputError, match=f"shards has no {name}; allowed: all 2 files that .*index.json lists"):
        load_model(shards, dtype=torch.float32, device=CPU)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("content", ['{"weight_map', "{}", "[]", '{"weight_map": 3}'])
def test_a14_a_broken_index_is_named(shards, content):
    (shards / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json is broken"):
        load_model(shards, dtype=torch.float32, device=CPU)


# Models laid out over several devices


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([[1, 2, 3, 4]])).logits


@pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="needs a machine without a GPU"
)
def test_spread_over_a_machine_without_gpus_is_the_cpu(folder, monkeypatch):
    expected = load_model(folder, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(GPT2LMHeadModel, "to", lambda *_, **__: pytest.fail("moved"))
    model = load_model(folder, dtype=torch.float32, device=SPREAD)
    assert not model.training and model.device == CPU
    assert torch.equal(logits_of(model), logits_of(expected))
    assert count_parameters(model) == count_parameters(expected)


def offloaded(folder, scratch):
    """A Llama whose second layer lies on the disk: accelerate's hooks bring it in for each pass."""
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = {part: "disk" if part == "model.layers.1" else "cpu" for part in parts}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=scratch
    ).eval()


def test_a_model_with_layers_elsewhere_decodes_the_same_as_target_and_as_draft(tmp_path):
    whole = tiny_llama()
    whole.save_pretrained(tmp_path / "llama")
    parted = offloaded(tmp_path / "llama", tmp_path / "scratch")
    assert {parameter.device.type for parameter in parted.parameters()} == {"cpu", "meta"}
    assert torch.equal(logits_of(parted), logits_of(whole))
    assert count_parameters(parted) == count_parameters(whole)
    prompt = torch.tensor([[1, 2, 3, 4]])
    expected = autoregressive_generate(whole, prompt, max_new_tokens=24).new_tokens
    assert autoregressive_generate(parted, prompt, max_new_tokens=24).new_tokens == expected
    for target, draft in ((parted, nearby(whole, 0.05)), (whole, parted)):
        options = {"drafter": ModelDrafter(draft), "k": 3, "max_new_tokens": 24, "check_invariants": True}
        result = speculative_generate(target, prompt, **options)
        assert result.new_tokens == expected and result.stats.accepted > 0


def test_a_spread_that_would_need_the_disk_is_refused(tmp_path, monkeypatch):
    tiny_llama().save_pretrained(tmp_path / "llama")
    load = AutoModelForCausalLM.from_pretrained

    def with_little_memory(*arguments, **options):
        return load(*arguments, **options, max_memory={"cpu": 12_000})

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", with_little_memory)
    with pytest.raises(InputError, match=r"llama does not fit when spread: .*; allowed: GPUs and main memory"):
        load_model(tmp_path / "llama", dtype=torch.float32, device=SPREAD)


# Devices


@pytest.mark.parametrize("device", [CPU, SPREAD], ids=str)
def test_a_dtype_that_the_device_cannot_run_is_refused_with_those_that_it_can(folder, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("float32", "bfloat16", "float16"):
        check_runs(device, resolve_dtype(name))
    matmul = torch.matmul

    def without_half(a, b):
        if a.dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand more")
        return matmul(a, b)

    monkeypatch.setattr(torch, "matmul", without_half)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    message = r"^float16 does not run on the device cpu \(\"addmm_impl_cpu_\" not implemented for 'Half'\); allowed: "
    with pytest.raises(InputError, match=rf"{message}float32, bfloat16 there, or another device\.$"):
        load_model(folder, dtype=torch.float16, device=device)


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, TypeError, AssertionError])
def test_a_device_that_runs_nothing_is_refused(monkeypatch, kind):
    def broken(*_):
        raise kind

    monkeypatch.setattr(torch, "matmul", broken)
    message = rf"bfloat16 does not run on the device cpu \({kind.__name__}\); allowed: another device\."
    with pytest.raises(InputError, match=message):
        check_runs(CPU, torch.bfloat16)


class OnMps(torch.Tensor):
    """Stands in for a tensor on mps, where anything in float64 raises an error; `cpu` leaves the device."""

    operations = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        OnMps.operations += 1
        result = super().__torch_function__(function, types, arguments, options or {})
        if function is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, OnMps) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return result


def on_mps(model):
    model.register_forward_hook(lambda *call: setattr(call[-1], "logits", call[-1].logits.as_subclass(OnMps)))
    return model


SAMPLINGS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("verify", ["token", "block"])
def test_no_float64_is_made_on_mps(sampling, verify):
    with pytest.raises(TypeError, match="float64"):
        torch.ones(3).as_subclass(OnMps).double()
    prompt, before = torch.tensor([[1, 2, 3]]), OnMps.operations
    on_device, elsewhere = ([ScriptedModel(random_table(6, seed)) for seed in (0, 1)] for _ in range(2))
    texts = []
    for target, draft in ((on_mps(one) for one in on_device), elsewhere):
        drafter = ModelDrafter(draft, confidence_threshold=0.15, vocabulary=6)
        options = sampling | {"k": 3, "max_new_tokens": 20, "verify": verify, "check_invariants": True}
        generator = torch.Generator().manual_seed(0)
        texts.append(speculative_generate(target, prompt, drafter=drafter, generator=generator, **options).new_tokens)
    assert texts[0] == texts[1]
    assert OnMps.operations > before + 100
    gaps = emitted_gaps(on_mps(tiny_llama()), prompt, [4, 5, 6])
    assert gaps.top2.dtype == torch.float64 and not isinstance(gaps.top2, OnMps)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda device")),
        pytest.param(
            "mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an mps device")
        ),
    ],
)
def test_on_a_real_device_speculative_greedy_text_is_the_plain_one(device):
    target, draft = (model.to(device) for model in (toy_target(), toy_draft()))
    for dtype in models.DTYPES.values():
        check_runs(torch.device(device), dtype)
    prompt = random_prompt(target, 12, torch.Generator().manual_seed(0))
    plain = autoregressive_generate(target, prompt, max_new_tokens=64).new_tokens
    options = {"drafter": ModelDrafter(draft), "k": 4, "max_new_tokens": 64, "check_invariants": True}
    speculative = speculative_generate(target, prompt, **options)
    report = check_greedy_identity(target, prompt, plain, speculative.new_tokens)
    assert report.matches or report.is_tie
    assert speculative.stats.alpha > 0.8
    drawing = {"temperature": 0.5, "top_p": 0.9, "generator": torch.Generator().manual_seed(0)}
    assert len(speculative_generate(target, prompt, **options | drawing).new_tokens) == 64
    GeneratorChooser(torch.Generator(device).manual_seed(0)).bernoulli(0.5)


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


@pytest.mark.parametrize(("size", "of_draft"), [(24, 32), (32, 24), (20, 64)])
def test_a09_one_tokenizer_and_vocabularies_padded_to_different_sizes_are_fine(tmp_path, size, of_draft):
    tokenizers = [save_tokenizer(tmp_path / name, eos_token="word3") for name in "ab"]
    check_pair(tiny_gpt2(size), tiny_gpt2(of_draft), *tokenizers)
    with pytest.raises(InputError, match=rf"{size} tokens.*{of_draft}; allowed: equal vocabularies, or tokenizers"):
        check_pair(tiny_gpt2(size), tiny_gpt2(of_draft))


def test_a09_padded_vocabularies_with_a_token_that_only_one_model_has_are_refused(tmp_path):
    tokenizers = [save_tokenizer(tmp_path / name) for name in "ab"]
    for sizes in ((19, 24), (24, 19)):
        message = (
            rf"{sizes[0]} tokens.*{sizes[1]}, and token 19 is known to both tokenizers; allowed: .* all lie below 19\."
        )
        with pytest.raises(InputError, match=message):
            check_pair(*map(tiny_gpt2, sizes), *tokenizers)


def test_a09_padded_vocabularies_of_different_tokenizers_are_refused_with_the_first_token_that_differs(tmp_path):
    longer = save_tokenizer(tmp_path / "a", [*WORDS, "more"]), save_tokenizer(tmp_path / "b")
    with pytest.raises(
        InputError, match=r"32 tokens.*24, and token 20 is 'more' to the target and None to the draft; "
    ):
        check_pair(tiny_gpt2(32), tiny_gpt2(24), *longer)
    added = [save_tokenizer(tmp_path / name) for name in "cd"]
    for tokenizer, token in zip(added, ("<one>", "<other>"), strict=True):
        tokenizer.add_tokens([token])
    for size in (24, 32):
        with pytest.raises(InputError, match="oken 20 is '<one>' to the target and '<other>' to the draft; allowed"):
            check_pair(tiny_gpt2(24), tiny_gpt2(size), *added)
    specials = [save_tokenizer(tmp_path / word, eos_token=word) for word in ("word3", "word4")]
    with pytest.raises(InputError, match="eos_token is 'word3' to the target and 'word4' to the draft"):
        check_pair(tiny_gpt2(32), tiny_gpt2(24), *specials)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"rope_parameters": {"rope_type": "no-such-type", "rope_theta": 1.0}},
        {"hidden_size": "32"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
    ],
    ids=str,
)
def test_a_configuration_that_asks_for_what_is_not_here_is_one_sentence(tmp_path, change):
    tiny_llama().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"model cannot be loaded as a causal language model: |do not fit config"
    ) as caught:
        load_model(tmp_path / "model", dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)
