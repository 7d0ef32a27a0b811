"""The local hub speaks to the real client, and the tiny checkpoints are what the real hub's repositories hold."""

import hashlib
import http.client
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hub_checkpoints import END, gpt2_files, gpt2_model, llama_files, llama_model
from local_hub import LocalHub
from safetensors.torch import load
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from pipeline.weights import load_tokenizer
from specdec.models import check_pair, count_parameters, load_model

CPU = torch.device("cpu")
FILES = {
    "config.json": b'{"model_type": "none"}\n',
    "empty.txt": b"",
    "model.safetensors": bytes(range(256)) * 400,
    "onnx/decoder model.onnx": b"a large file in a folder",
    "onnx/notes #1?.txt": b"a small file in a folder",
}
# Runs one expression a line, in one process as the import takes time. It does not wait before it tries again, but says for how
# long it would have.
CLIENT = """\
import json, sys, time
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi, auth_check, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download

api, waits = HfApi(), []
time.sleep = waits.append
for line in sys.stdin:
    waits.clear()
    try:
        reply = {"value": eval(json.loads(line))}
    except Exception as error:
        reply = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(reply | {"waits": waits}), flush=True)
"""


class Client:
    """The real client in a process of its own."""

    def __init__(self, hub: LocalHub, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=hub.environment(home) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            encoding="utf-8",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / "stderr").open("w"),
        )
        self.waits: list[float] = []

    def reply(self, expression: str) -> dict:
        self.process.stdin.write(json.dumps(expression) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def value(self, expression: str):
        reply = self.reply(expression)
        assert "error" not in reply, reply
        self.waits = reply["waits"]
        return reply["value"]

    def error(self, expression: str) -> tuple[str, str]:
        reply = self.reply(expression)
        assert "error" in reply, reply
        self.waits = reply["waits"]
        return reply["error"], reply["text"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with LocalHub(page_size=2) as hub:
        client = Client(hub, tmp_path_factory.mktemp("home"))
        yield hub, client
        client.process.stdin.close()
        client.process.wait(timeout=10)


@pytest.fixture
def hub(served):
    hub = served[0]
    yield hub
    hub.mend()
    hub.requests.clear()
    hub.sent.clear()


@pytest.fixture
def client(served):
    return served[1]


@pytest.fixture
def model(hub, request):
    """A repository of the test's own, so that the client has nothing of it yet."""
    name = f"tiny/{re.sub('[^a-z0-9]+', '-', request.node.name).strip('-')}"
    hub.add(name, FILES, licence="mit", tags=["gpt2"])
    return name


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def pointer(content):
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content)}\nsize {len(content)}\n".encode()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def download(name, file="model.safetensors"):
    return f"Path(hf_hub_download('{name}', '{file}')).read_bytes().hex()"


# --- what the hub answers


def test_git_oid_is_git_s():
    assert git_oid(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # echo hello | git hash-object --stdin


def test_a_model_is_described(hub, client, model):
    info = (
        f"(lambda info: [info.id, info.sha, info.gated, info.card_data.license, info.tags])(api.model_info('{model}'))"
    )
    name, sha, gated, licence, tags = client.value(info)
    assert (name, gated, licence) == (model, False, "mit")
    assert "license:mit" in tags and "gpt2" in tags
    assert re.fullmatch("[0-9a-f]{40}", sha)
    for revision in ("main", sha):
        assert client.value(f"api.model_info('{model}', revision='{revision}').sha") == sha
    assert client.value(f"[s.size for s in api.model_info('{model}').siblings]") == [None] * len(FILES)


def test_files_are_described_with_size_and_hashes(client, model):
    siblings = client.value(
        f"[[s.rfilename, s.size, s.blob_id, s.lfs] for s in api.model_info('{model}', files_metadata=True).siblings]"
    )
    tree = client.value(
        f"[[f.path, f.size, f.blob_id, f.lfs] for f in api.list_repo_tree('{model}', recursive=True) if hasattr(f, 'size')]"
    )
    assert siblings == tree
    assert {path: size for path, size, _, _ in tree} == {path: len(content) for path, content in FILES.items()}
    for path, size, oid, lfs in tree:
        content = FILES[path]
        is_large = path.endswith((".safetensors", ".onnx"))
        stored = pointer(content) if is_large else content
        assert oid == git_oid(stored)
        assert lfs == ({"size": size, "sha256": sha256(content), "pointer_size": len(stored)} if is_large else None)


def test_a_listing_comes_in_pages(hub, client, model):
    paths = client.value(f"[entry.path for entry in api.list_repo_tree('{model}')]")
    assert paths == ["onnx", "config.json", "empty.txt", "model.safetensors"]
    assert len(hub.requests) == 2
    assert client.value(f"[f.path for f in api.list_repo_tree('{model}', 'onnx')]") == list(FILES)[-2:]
    assert client.value(f"sorted(api.list_repo_files('{model}'))") == sorted(FILES)


def test_a_small_file_comes_from_the_hub_and_a_large_one_from_the_content_server(hub, client, model):
    ask = "(lambda m: [m.etag, m.size, m.commit_hash, m.location])(get_hf_file_metadata(hf_hub_url('{}', '{}')))"
    commit = client.value(f"api.model_info('{model}').sha")
    small, large = (client.value(ask.format(model, file)) for file in ("config.json", "model.safetensors"))
    assert small == [
        git_oid(FILES["config.json"]),
        len(FILES["config.json"]),
        commit,
        f"{hub.endpoint}/{model}/resolve/main/config.json",
    ]
    content = FILES["model.safetensors"]
    digest = sha256(content)
    assert large == [digest, len(content), commit, f"{hub.cdn}/cdn/{model}/{digest}/model.safetensors"]


def test_a_snapshot_has_every_byte(hub, client, model, tmp_path):
    client.value(f"snapshot_download('{model}', local_dir='{tmp_path}', allow_patterns=['config.json'])")
    assert [path.name for path in tmp_path.glob("*.*") if path.is_file()] == ["config.json"]
    assert [sent.file for sent in hub.sent] == ["config.json"]
    hub.sent.clear()
    folder = Path(client.value(f"snapshot_download('{model}')"))
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == FILES
    # It does not ask for an empty file.
    assert sorted(hub.sent) == [(path, 0, len(content)) for path, content in FILES.items() if content]


def test_an_old_commit_stays(hub, client, model):
    old = client.value(f"api.model_info('{model}').sha")
    new = hub.add(model, {"config.json": b"{}"}, licence=None)
    draft = hub.add(model, {"config.json": b"[]"}, branch="refs/pr/1")
    assert len({old, new, draft}) == 3
    assert hub.add(model, {"config.json": b"{}"}, licence=None) == new
    for revision, commit, content in (
        ("main", new, b"{}"),
        (old, old, FILES["config.json"]),
        ("refs/pr/1", draft, b"[]"),
    ):
        at = f"'{model}', revision='{revision}'"
        assert client.value(f"api.model_info({at}).sha") == commit
        assert (
            client.value(f"Path(hf_hub_download(filename='config.json', repo_id={at})).read_text()").encode() == content
        )
    assert client.value(f"api.model_info('{model}').card_data") is None
    assert client.value(
        f"hf_hub_download('{model}', 'model.safetensors', revision='{old}')"
    )  # no branch has it any more


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_part_of_a_file(hub, client, model, file):
    content = FILES[file]
    ask = (
        "(lambda r: [r.status_code, r.headers.get('content-range'), r.content.hex()])"
        f"(huggingface_hub.get_session().get(hf_hub_url('{model}', '{file}'), headers={{'Range': 'bytes=%s'}}))"
    )
    size = len(content)
    for asked, start, end in (("3-9", 3, 10), ("5-", 5, size), ("-4", size - 4, size), (f"7-{size + 9}", 7, size)):
        assert client.value(ask % asked) == [206, f"bytes {start}-{end - 1}/{size}", content[start:end].hex()]
    assert client.value(ask % f"{size}-")[:2] == [416, f"bytes */{size}"]


def test_requests_are_recorded(hub, client, model):
    client.value(f"hf_hub_download('{model}', 'model.safetensors', token='hf_mine') and None")
    commands = [(request.method, request.path.split("?")[0]) for request in hub.requests]
    address = f"/cdn/{model}/{sha256(FILES['model.safetensors'])}/model.safetensors"
    assert commands == [("HEAD", f"/{model}/resolve/main/model.safetensors"), ("GET", address)]
    assert hub.requests[0].headers["authorization"] == "Bearer hf_mine"
    assert "authorization" not in hub.requests[1].headers  # the content server is somebody else


# --- what it refuses


def test_what_is_not_there(client, model):
    assert client.error("api.model_info('tiny/nothing')")[0] == "RepositoryNotFoundError"
    assert client.error("hf_hub_download('tiny/nothing', 'config.json')")[0] == "RepositoryNotFoundError"
    for token, status in (("False", "401"), ("'hf_mine'", "404")):
        name, text = client.error(f"api.model_info('tiny/nothing', token={token})")
        assert name == "RepositoryNotFoundError" and status in text
    for call in (f"api.model_info('{model}', revision='v9')", f"hf_hub_download('{model}', 'a', revision='v9')"):
        name, text = client.error(call)
        assert name == "RevisionNotFoundError" and "Invalid rev id: v9" in text
    assert client.error(f"hf_hub_download('{model}', 'a.json')")[0] == "RemoteEntryNotFoundError"


def test_a_gated_model_is_for_one_token(hub, client, model):
    hub.gate(model, token="hf_secret")
    assert client.value(f"api.model_info('{model}').gated") == "manual"
    for token, status, said in (("False", "401", "Please log in"), ("'hf_mine'", "403", "not in the authorized list")):
        for call in ("auth_check('{}', token={})", "hf_hub_download('{}', 'config.json', token={})"):
            name, text = client.error(call.format(model, token))
            assert name == "GatedRepoError" and status in text and said in text
    assert client.value(f"auth_check('{model}', token='hf_secret')") is None
    for file in ("config.json", "model.safetensors"):
        assert client.value(f"hf_hub_download('{model}', '{file}', token='hf_secret')")


# --- faults


def test_it_fails_so_many_times(hub, client, model):
    hub.fail("/cdn/", 429, times=2, headers={"Retry-After": "7"})
    assert client.value(download(model)) == FILES["model.safetensors"].hex()
    assert client.waits == [8, 8]
    for status in (500, 503):
        hub.fail("/api/models", status, headers={"X-Error-Message": "out of order"})
        name, text = client.error(f"api.model_info('{model}')")
        assert name == "HfHubHTTPError" and str(status) in text and "out of order" in text
        hub.mend()
    hub.fail("/resolve/", 503, method="GET")
    assert client.value(f"get_hf_file_metadata(hf_hub_url('{model}', 'config.json')).size")
    assert client.error(download(model, "config.json"))[0] == "HfHubHTTPError"
    hub.mend()
    assert client.value(download(model, "config.json")) == FILES["config.json"].hex()


def test_a_cut_response_is_resumed_where_it_ended(hub, client, model):
    """The client keeps whole pieces of 10 MB only; they are made smaller here."""
    content = FILES["model.safetensors"]
    client.value("setattr(huggingface_hub.constants, 'DOWNLOAD_CHUNK_SIZE', 10_000)")
    hub.cut("model.safetensors", after=45_000)
    try:
        assert client.value(download(model)) == content.hex()
    finally:
        client.value("setattr(huggingface_hub.constants, 'DOWNLOAD_CHUNK_SIZE', 10 * 2**20)")
    assert [(sent.start, sent.size) for sent in hub.sent] == [
        (0, 45_000),
        (40_000, 45_000),
        (80_000, len(content) - 80_000),
    ]


def test_a_small_file_that_is_always_cut_never_arrives(hub, client, model):
    hub.cut("model.safetensors", after=40_000)
    error, text = client.error(download(model))
    assert error == "RemoteProtocolError" and "peer closed connection" in text
    assert [(sent.start, sent.size) for sent in hub.sent] == [(0, 40_000)] * 6
    hub.mend()
    hub.cut("config.json", after=3, times=2)
    assert client.value(download(model, "config.json")) == FILES["config.json"].hex()
    assert client.waits == [1, 1]


def test_the_client_takes_wrong_bytes_of_the_right_size(hub, client, model):
    """What is downloaded with it must be hashed by us."""
    hub.corrupt("model.safetensors")
    content, got = FILES["model.safetensors"], bytes.fromhex(client.value(download(model)))
    assert len(got) == len(content)
    assert sum(one != other for one, other in zip(got, content, strict=True)) == 1
    name = client.value(f"Path(hf_hub_download('{model}', 'model.safetensors')).resolve().name")
    assert name == sha256(content)  # its cache now says something wrong
    hub.mend()
    assert client.value(download(model)) == got.hex()


def test_a_stalled_response_goes_on_when_mended(hub, client, model):
    hub.stall("model.safetensors", after=1000)
    client.process.stdin.write(json.dumps(download(model)) + "\n")
    client.process.stdin.flush()
    assert hub.stalled.wait(timeout=10)
    assert not hub.sent
    hub.mend()
    assert json.loads(client.process.stdout.readline())["value"] == FILES["model.safetensors"].hex()
    assert [(sent.start, sent.size) for sent in hub.sent] == [(0, len(FILES["model.safetensors"]))]


def test_a_client_that_dies_while_it_waits_leaves_the_hub_alone(tmp_path, capfd):
    with LocalHub() as hub:
        hub.add("tiny/model", FILES)
        hub.stall("model.safetensors", after=1000)
        client = Client(hub, tmp_path)
        client.process.stdin.write(json.dumps(download("tiny/model")) + "\n")
        client.process.stdin.flush()
        assert hub.stalled.wait(timeout=20)
        client.process.kill()
        client.process.wait()
        hub.mend()
        connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=10)
        connection.request("GET", "/tiny/model/resolve/main/config.json")
        assert connection.getresponse().read() == FILES["config.json"]
        connection.close()
    assert "Exception" not in capfd.readouterr().err


def test_a_closed_hub_answers_nobody(tmp_path):
    hub = LocalHub()
    hub.add("tiny/model", FILES)
    client = Client(hub, tmp_path)
    assert client.value("api.model_info('tiny/model').id") == "tiny/model"
    hub.close()
    hub.close()  # twice is fine
    assert client.error("api.model_info('tiny/model')")[0] in ("ConnectError", "RemoteProtocolError", "ReadError")
    assert client.error("api.model_info('tiny/model')")[0] == "ConnectError"
    client.process.stdin.close()
    client.process.wait(timeout=10)


# --- the checkpoints

LOADED = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|vocab|model\.safetensors\.index)\.json|merges\.txt"
)


def loaded_folder(folder, files):
    """Only what a model is loaded from."""
    weights = [name for name in files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name)]
    for name in [*filter(LOADED.fullmatch, files), *weights]:
        (folder / name).write_bytes(files[name])
    return folder


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_gpt2_of_the_hub_is_the_model_it_was_made_from(tmp_path, prefix):
    files = gpt2_files(context=64, prefix=prefix)
    names = load(files["model.safetensors"])
    assert {f"{prefix}wte.weight", f"{prefix}h.0.attn.c_attn.weight", f"{prefix}h.1.attn.bias"} < names.keys()
    assert not any("lm_head" in name for name in names)
    assert names[f"{prefix}h.0.attn.bias"].shape == (1, 1, 64, 64)
    folder = loaded_folder(tmp_path, files)
    model, source = load_model(folder, dtype=torch.float32, device=CPU), gpt2_model(context=64)
    tokens = torch.arange(50)[None]
    assert torch.equal(model(tokens).logits, source(tokens).logits)
    wte, wpe, masks = 400 * 32, 64 * 32, 2 * 64 * 64
    blocks = 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert count_parameters(model) == wte + wpe + blocks  # the head is the embedding
    assert sum(tensor.numel() for tensor in names.values()) == count_parameters(model) + masks


def test_transformers_has_no_complaint_about_the_masks(tmp_path, caplog):
    folder = loaded_folder(tmp_path, gpt2_files(context=64))
    transformers.logging.set_verbosity_info()
    transformers.logging.enable_propagation()
    try:
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_propagation()
    assert not any(info.values()), info
    assert "attn.bias" not in caplog.text


def test_the_tokenizer_of_gpt2(tmp_path):
    files = gpt2_files(context=64)
    tokenizer = load_tokenizer(loaded_folder(tmp_path, files))
    assert len(tokenizer) == json.loads(files["config.json"])["vocab_size"] == 400
    assert tokenizer.special_tokens_map == dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    assert tokenizer.eos_token_id == 399 == json.loads(files["config.json"])["eos_token_id"]
    assert tokenizer.chat_template is None and tokenizer.pad_token is None
    assert tokenizer.model_max_length == 64
    text = f"What is the colour of the sky — naïve?\n\n{END}"
    ids = tokenizer(text)["input_ids"]
    assert "Ġthe" in tokenizer.convert_ids_to_tokens(ids) and ids[-1] == 399
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("shards", [1, 2])
def test_a_llama_of_the_hub_is_the_model_it_was_made_from(tmp_path, shards):
    files = llama_files(vocabulary=448, shards=shards)
    assert sum(bool(re.fullmatch(r"model.*\.safetensors", name)) for name in files) == shards
    assert ("model.safetensors.index.json" in files) == (shards > 1)
    folder = loaded_folder(tmp_path, files)
    model, source = load_model(folder, dtype=torch.float32, device=CPU), llama_model(vocabulary=448)
    tokens = torch.arange(50)[None]
    assert torch.equal(model(tokens).logits, source(tokens).logits)
    tokenizer = load_tokenizer(folder)
    assert (len(tokenizer), model.config.vocab_size) == (400, 448)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello the"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHello the<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat)["input_ids"]
    assert ids[0] == 398 and ids.count(399) == 1 and tokenizer.eos_token_id == 399
    assert model.generation_config.eos_token_id == [399, 397]


def test_a_llama_without_a_chat_template(tmp_path):
    assert load_tokenizer(loaded_folder(tmp_path, llama_files(template=False))).chat_template is None


@pytest.mark.parametrize("make", [gpt2_model, llama_model])
def test_a_draft_agrees_often_but_not_always(make):
    target, draft = make(context=256), make(noise=0.02, context=256)
    assert isinstance(target, GPT2LMHeadModel) == (make is gpt2_model)
    text = target.generate(torch.tensor([[7]]), max_new_tokens=200, do_sample=False, eos_token_id=-1)
    best, guessed = (model(text).logits.argmax(-1) for model in (target, draft))
    assert len(text.unique()) > 20
    assert 0.7 < (best == guessed).double().mean() < 0.9


@pytest.mark.parametrize("make", [gpt2_files, llama_files])
def test_checkpoints_are_the_same_every_time(make, tmp_path):
    files, other = make(context=64), make(noise=0.02, context=64)
    assert files == make(context=64)
    assert [name for name in files if files[name] != other[name]] == ["model.safetensors"]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, content in zip(folders, (files, other), strict=True):
        folder.mkdir()
        loaded_folder(folder, content)
    pair = [load_model(folder, dtype=torch.float32, device=CPU) for folder in folders]
    check_pair(*pair, *(load_tokenizer(folder) for folder in folders))
