"""Models from the hub: only what is needed, every byte verified, and nothing half finished taken for a model.

The hub is one on this machine, tests/local_hub.py; the client is the real one, with another address and cache.
"""

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_checkpoints import gpt2_files, llama_files
from huggingface_hub import constants, file_download, hf_hub_download
from huggingface_hub.utils import _http, close_session
from local_hub import LocalHub
from sync_deps import ROOT

from pipeline import cli, hub
from specdec.errors import InputError

WEIGHTS = "model.safetensors"
TOKENIZER = {"merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
NEEDED = {"config.json", "generation_config.json", *TOKENIZER}
CHUNK = 1000  # so many bytes of a file come together, or not at all
# What no model could be loaded from; the hub does not mind.
SMALL = {"config.json": b"{}\n", "tokenizer.json": b'{"a": 0}\n', WEIGHTS: bytes(range(256)) * 40}
SIZE = len(SMALL[WEIGHTS])


@pytest.fixture(scope="module")
def gpt2():
    return gpt2_files(context=32)


@pytest.fixture(scope="module")
def shards():
    return llama_files(shards=2)


@contextmanager
def connected(home, monkeypatch):
    """A hub, and the client's settings as `LocalHub.environment` gives them to a new process; it does not wait between tries."""
    with LocalHub() as server:
        settings = {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "DOWNLOAD_CHUNK_SIZE": CHUNK,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        waits = SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr(file_download, "time", waits)
        monkeypatch.setattr(_http, "time", waits)
        close_session()
        try:
            yield server
        finally:
            close_session()


@pytest.fixture
def server(tmp_path, monkeypatch):
    with connected(tmp_path / "home", monkeypatch) as server:
        yield server


@pytest.fixture
def fetch(server, tmp_path):
    """Fetches "organisation/name@revision" for a checkout in `tmp_path`; gives the folder and the record."""

    def fetch(name="a/b", checkout="models", weights_sha256=None):
        repo, _, revision = name.partition("@")
        commit = hub.resolve(repo, revision or None)
        return hub.ensure(repo, commit, tmp_path / checkout, weights_sha256)

    return fetch


@pytest.fixture
def refused(fetch, tmp_path):
    """What `fetch` is refused with, one sentence; what was recorded before is all that is recorded then."""

    def refused(match, *arguments, **options):
        before = records(tmp_path)
        with pytest.raises(InputError, match=match) as caught:
            fetch(*arguments, **options)
        message = str(caught.value)
        assert "\n" not in message and message.endswith(".") and message[0] != " "
        assert records(tmp_path) == before
        return message

    return refused


def records(tmp_path):
    return {path: path.read_bytes() for path in tmp_path.glob("*/hub/*.json")}


def snapshot(tmp_path, commit, name="a/b"):
    return tmp_path / "home" / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def blobs(tmp_path, name="a/b"):
    """The contents that the cache holds, whole or in part, by the names that it gives them."""
    folder = tmp_path / "home" / "hub" / f"models--{name.replace('/', '--')}" / "blobs"
    return {path.name: path for path in folder.glob("*") if path.suffix != ".lock"}


def partial(tmp_path):
    """The weights as far as they have come."""
    return blobs(tmp_path)[f"{sha256(SMALL[WEIGHTS])}.partial"]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def asked(server):
    """What the hub was asked for, but for a list that the client gets once in a process."""
    return [request.path for request in server.requests if "/api/agent-harnesses" not in request.path]


def sent(server, file=WEIGHTS):
    """The ranges of a file that were sent."""
    return [(part.start, part.size) for part in server.sent if part.file == file]


def names_sent(server):
    return [part.file for part in server.sent]


def leave_partial(server, refused, size=4 * CHUNK):
    """So much of the weights, then a connection that stays broken."""
    server.cut(WEIGHTS, size, times=1)
    server.cut(WEIGHTS, CHUNK // 2)
    message = refused("The connection broke")
    server.mend()
    server.sent.clear()
    return message


# What is fetched


@pytest.mark.parametrize("kind", ["single file", "shards"])
def test_only_what_a_model_is_loaded_from_is_fetched_and_recorded(
    server, fetch, gpt2, shards, tmp_path, kind, request, capfd
):
    files, weights = gpt2, {WEIGHTS}
    if kind == "shards":
        weights = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)} | {"model.safetensors.index.json"}
        files = shards
    commit = server.add("owner/tiny.model", files, licence="apache-2.0")
    folder, record = fetch("owner/tiny.model")
    assert sorted(names_sent(server)) == sorted(NEEDED | weights)  # each once, nothing else
    resolved = {path.rpartition("/")[2] for path in asked(server) if "/resolve/" in path}
    assert resolved == NEEDED | weights
    assert folder == snapshot(tmp_path, commit, "owner/tiny.model")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {n: files[n] for n in NEEDED | weights}
    assert record == {
        "repo": "owner/tiny.model",
        "revision": commit,
        "licence": "apache-2.0",
        "files": {n: {"sha256": sha256(files[n]), "bytes": len(files[n])} for n in NEEDED | weights},
    }
    (path,) = records(tmp_path)
    assert path == tmp_path / "models" / "hub" / f"owner--tiny.model@{commit}.json"
    assert json.loads(path.read_text()) == record
    progress = capfd.readouterr().err
    assert all(f"owner/tiny.model: fetching {name}\n" in progress for name in weights if "index" not in name)
    assert "owner/tiny.model: verifying\n" in progress


def test_what_is_there_is_used_again_without_a_question(server, fetch, capfd):
    commit = server.add("a/b", SMALL)
    first = fetch()
    server.requests.clear()
    capfd.readouterr()
    assert fetch(f"a/b@{commit}") == first and asked(server) == []
    assert fetch() == first and asked(server) == ["/api/models/a/b"]  # which commit main is
    assert capfd.readouterr().err == ""


def test_another_checkout_fetches_no_weights_again(server, fetch, tmp_path):
    server.add("a/b", SMALL)
    folder, record = fetch()
    server.sent.clear()
    assert fetch(checkout="elsewhere") == (folder, record)
    assert server.sent == [] and len(records(tmp_path)) == 2


def test_what_two_commits_share_is_fetched_once(server, fetch):
    old = server.add("a/b", SMALL)
    fetch()
    new = server.add("a/b", SMALL | {"config.json": b'{"new": 1}\n'})
    server.sent.clear()
    folder, record = fetch()
    assert record["revision"] == new != old and (folder / "config.json").read_bytes() == b'{"new": 1}\n'
    assert names_sent(server) == ["config.json"]
    folder, record = fetch(f"a/b@{old}")
    assert record["revision"] == old and (folder / "config.json").read_bytes() == SMALL["config.json"]


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ({"model-00001-of-00001.safetensors": b"1", "model.safetensors.index.json": b"{}"}, {WEIGHTS}),
        ({"model.fp16.safetensors": b"1", "adapter_model.safetensors": b"1", "sub/config.json": b"1"}, {WEIGHTS}),
        ({"chat_template.jinja": b"x", "spiece.model": b"x"}, {WEIGHTS, "chat_template.jinja", "spiece.model"}),
        ({"modeling_own.py": b"x", "vocab.txt": b"x", "preprocessor_config.json": b"x"}, {WEIGHTS, "vocab.txt"}),
    ],
)
def test_what_is_needed_of_other_repositories(server, fetch, more, needed):
    server.add("a/b", SMALL | more)
    assert fetch()[1]["files"].keys() == {"config.json", "tokenizer.json"} | needed == set(names_sent(server))


def test_a_repository_without_a_licence(server, fetch):
    server.add("a/b", SMALL, licence=None)
    assert fetch()[1]["licence"] is None


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1"])
def test_branches_and_tags_are_resolved_by_one_request(server, fetch, tmp_path, revision):
    server.add("a/b", SMALL)
    commit = server.add("a/b", SMALL | {"config.json": b"[]"}, branch=revision)
    assert hub.resolve("a/b", revision) == commit
    assert len(asked(server)) == 1
    _, record = fetch(f"a/b@{revision}")
    assert record["revision"] == commit
    (path,) = records(tmp_path)
    assert path.name == f"a--b@{commit}.json"
    # Without the hub the cache knows which commit it was; another checkout has no record of its own yet.
    server.close()
    assert fetch(f"a/b@{revision}")[1] == record
    assert fetch(f"a/b@{revision}", checkout="elsewhere")[1] == record | {"licence": None}  # the listing tells none


def test_the_cache_may_be_one_that_cannot_be_written(server, fetch, tmp_path):
    """The name of a branch is then not noted; a commit's files are all that counts."""
    commit = server.add("a/b", SMALL)
    (tmp_path / "home" / "hub" / "models--a--b").mkdir(parents=True)
    (tmp_path / "home" / "hub" / "models--a--b" / "refs").write_text("in the way of a folder")
    assert hub.resolve("a/b", None) == commit


def test_weights_beyond_what_one_request_may_fetch_are_left_to_the_client(server, fetch, monkeypatch):
    server.add("a/b", SMALL)
    monkeypatch.setattr(hub, "_fetch_large", lambda *_: pytest.fail("fetched in one request"))
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", SIZE - 1)

    def client(*arguments, **options):
        monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", SIZE)  # it knows of other ways than a request
        return huggingface_hub.snapshot_download(*arguments, **options)

    monkeypatch.setattr(hub, "snapshot_download", client)
    folder, _ = fetch()
    assert (folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS] and sent(server) == [(0, SIZE)]


# a14: half-finished downloads


def test_a14_a_cut_connection_is_resumed_from_the_byte(server, fetch, tmp_path):
    server.add("a/b", SMALL)
    server.cut(WEIGHTS, 2 * CHUNK + 1, times=2)  # the last byte is lost, as a chunk comes together
    folder, record = fetch()
    assert sent(server) == [(0, 2 * CHUNK + 1), (2 * CHUNK, 2 * CHUNK + 1), (4 * CHUNK, SIZE - 4 * CHUNK)]
    assert (folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS]
    assert record["files"][WEIGHTS]["sha256"] == sha256(SMALL[WEIGHTS])
    assert not any(name.endswith(".partial") for name in blobs(tmp_path))


def test_a14_after_a_broken_connection_the_next_run_goes_on_from_there(server, fetch, refused, tmp_path, capfd):
    commit = server.add("a/b", SMALL)
    message = leave_partial(server, refused)
    assert message == (
        f"The connection broke while {WEIGHTS} of a/b@{commit} was fetched; run again to go on from there."
    )
    assert partial(tmp_path).read_bytes() == SMALL[WEIGHTS][: 4 * CHUNK]
    assert not snapshot(tmp_path, commit).exists()
    capfd.readouterr()
    folder, _ = fetch()
    assert sent(server) == [(4 * CHUNK, SIZE - 4 * CHUNK)]
    assert f"a/b: fetching {WEIGHTS} from byte {4 * CHUNK} on\n" in capfd.readouterr().err
    assert (folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS]


@pytest.mark.parametrize("kind", ["too long", "as long", "shorter"])
def test_a14_a_leftover_that_is_not_the_start_of_the_file_is_never_used(server, fetch, refused, tmp_path, capfd, kind):
    server.add("a/b", SMALL)
    leave_partial(server, refused)
    content = {"too long": SIZE + 1, "as long": SIZE, "shorter": 3}[kind] * b"x"
    partial(tmp_path).write_bytes(content)
    if kind != "too long":  # whose size alone tells
        refused(rf"{re.escape(WEIGHTS)} of a/b@\w+ arrived with the hash \w+ instead of \w+ and was deleted")
        assert blobs(tmp_path) == {}
        server.sent.clear()
    folder, _ = fetch()
    assert sent(server) == [(0, SIZE)] and (folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS]


FETCH = """
import sys
from pathlib import Path
from pipeline import hub
hub.ensure("a/b", hub.resolve("a/b", None), Path("models"))
"""


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a14_a_process_that_was_killed_is_gone_on_from(server, fetch, tmp_path, file):
    """With the client's own chunks, of 10 MiB."""
    commit = server.add("a/b", files := gpt2_files(context=2048))
    server.stall(file, 25_000_000 if file == WEIGHTS else 100, times=1)
    environment = server.environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", FETCH], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        assert server.stalled.wait(30)
        deadline = time.monotonic() + 30
        have = 0
        while file == WEIGHTS and have < 2 * 10 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.02)
            have = sum(path.stat().st_size for name, path in blobs(tmp_path).items() if name.endswith(".partial"))
    finally:
        process.kill()
        process.wait()
    server.mend()
    assert records(tmp_path) == {} and not (snapshot(tmp_path, commit) / file).exists()
    time.sleep(0.1)  # for the server to notice
    server.sent.clear()
    folder, record = fetch()
    assert sent(server) == ([(have, len(files[WEIGHTS]) - have)] if file == WEIGHTS else [])
    assert (have == 2 * 10 * 2**20) == (file == WEIGHTS)
    assert {name: (folder / name).read_bytes() for name in record["files"]} == {n: files[n] for n in NEEDED | {WEIGHTS}}


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "weights cut": (WEIGHTS, cut_in_half, f"{WEIGHTS} has {SIZE // 2} bytes instead of {SIZE}"),
    "weights deleted": (WEIGHTS, lambda path: path.resolve().unlink(), f"{WEIGHTS} is missing"),
    "link deleted": (WEIGHTS, Path.unlink, f"{WEIGHTS} is missing"),
    "small file cut": ("tokenizer.json", cut_in_half, "tokenizer.json has 4 bytes instead of 9"),
    "small file deleted": ("config.json", lambda path: path.resolve().unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a14_a_damaged_cache_is_named_and_mended(server, fetch, tmp_path, capfd, damage):
    server.add("a/b", SMALL)
    folder, record = fetch()
    before = records(tmp_path)
    file, do_damage, message = DAMAGE[damage]
    do_damage(folder / file)
    server.sent.clear()
    capfd.readouterr()
    assert fetch() == (folder, record) and records(tmp_path) == before
    assert f"a/b: {message}; fetching what is missing\n" in capfd.readouterr().err
    assert names_sent(server) == ([] if damage == "link deleted" else [file])
    assert {name: (folder / name).read_bytes() for name in SMALL} == SMALL


@pytest.mark.parametrize("checkout", ["models", "elsewhere"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a14_a_damaged_cache_without_a_network_is_refused(server, fetch, refused, damage, checkout):
    commit = server.add("a/b", SMALL)
    folder, _ = fetch()
    file, do_damage, message = DAMAGE[damage]
    do_damage(folder / file)
    server.close()
    for _ in range(2):
        text = refused("cannot be reached", checkout=checkout)
        assert (
            f", and the cache {constants.HF_HUB_CACHE} does not hold all of a/b@{commit} ({message}); run again when"
            in text
        )


@pytest.mark.parametrize(
    "content",
    [
        '{"rep',
        "[]",
        "{}",
        '{"files": []}',
        '{"files": {"model.safetensors": {}}}',
        '{"files": {"model.safetensors": {"bytes": 1}}}',
        '{"files": {}, "repo": "a/b"}',
    ],
)
def test_a14_a_spoilt_record_is_made_anew_from_verified_files(server, fetch, tmp_path, capfd, content):
    server.add("a/b", SMALL)
    folder, record = fetch()
    (path,) = before = records(tmp_path)
    path.write_text(content)
    server.sent.clear()
    capfd.readouterr()
    assert fetch() == (folder, record) and records(tmp_path) == before
    assert server.sent == [] and "a/b: verifying" in capfd.readouterr().err


def test_a14_a_damaged_file_is_found_by_another_checkout_by_its_hash(server, fetch, refused, tmp_path):
    server.add("a/b", SMALL)
    folder, record = fetch()
    (folder / WEIGHTS).write_bytes(SMALL[WEIGHTS][:-1] + b"x")
    refused(f"{WEIGHTS} of a/b@.* arrived with the hash .* and was deleted; run again", checkout="elsewhere")
    assert not (folder / WEIGHTS).exists() and sha256(SMALL[WEIGHTS]) not in blobs(tmp_path)
    assert fetch(checkout="elsewhere") == (folder, record)
    assert (folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS]


TROUBLE = {
    "api 500": lambda server: server.fail("/api/", 500),
    "api 503": lambda server: server.fail("/api/", 503),
    "files 500": lambda server: server.fail("/resolve/", 500),
    "files 503": lambda server: server.fail("/resolve/", 503),
    "listing 500": lambda server: server.fail("/tree/", 500),
    "down": lambda server: server.close(),
}


@pytest.mark.parametrize(
    ("left_by", "trouble"),
    [
        *(("this program", trouble) for trouble in TROUBLE if trouble != "listing 500"),  # it has the listing
        *(("another program", trouble) for trouble in TROUBLE),
    ],
)
def test_a14_a_partial_cache_is_never_taken_for_a_model(server, fetch, refused, tmp_path, left_by, trouble):
    """An interrupted run leaves the listing of the repository beside what it got; a program that wants one file leaves none."""
    commit = server.add("a/b", SMALL)
    if left_by == "another program":
        hf_hub_download("a/b", "config.json")
    else:
        server.fail("tokenizer.json", 500)
        refused("answers 500 when asked for a/b")
        server.mend()
    there = {path.name for path in snapshot(tmp_path, commit).iterdir()}
    assert "config.json" in there and "tokenizer.json" not in there
    TROUBLE[trouble](server)
    for name in ("a/b", f"a/b@{commit}"):
        message = refused("answers 50[03] when asked|cannot be reached|broke off: .* is missing; run again", name)
        assert not (snapshot(tmp_path, commit) / "tokenizer.json").exists()
    if trouble == "down":
        fault = " (tokenizer.json is missing)" if left_by == "this program" else ""
        assert f"the cache {constants.HF_HUB_CACHE} does not hold all of a/b@{commit}{fault}; run again when" in message
        return
    server.mend()
    server.sent.clear()
    folder, _ = fetch()
    assert "config.json" not in names_sent(server)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == SMALL


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a14_wrong_bytes_of_the_right_size_are_refused_and_fetched_anew(server, fetch, refused, tmp_path, file):
    commit = server.add("a/b", SMALL)
    server.corrupt(file, times=1)
    message = refused("arrived with the hash")
    assert re.fullmatch(
        rf"{re.escape(file)} of a/b@{commit} arrived with the hash \w+ instead of \w+ and was deleted; "
        r"run again to fetch it anew\.",
        message,
    )
    found, wanted = re.findall(r"hash (\w+) instead of (\w+)", message)[0]
    assert found != wanted and not {found, wanted, f"{wanted}.partial"} & blobs(tmp_path).keys()
    assert not (snapshot(tmp_path, commit) / file).exists()
    server.sent.clear()
    folder, _ = fetch()
    assert file in names_sent(server) and (folder / file).read_bytes() == SMALL[file]


def test_a14_weights_that_are_not_those_of_params_yaml_are_refused_before_they_are_fetched(server, fetch, refused):
    commit = server.add("a/b", SMALL)
    right, wrong = sha256(SMALL[WEIGHTS]), "0" * 64
    message = refused("has the sha256", weights_sha256=wrong)
    assert message == f"{WEIGHTS} of a/b@{commit} has the sha256 {right} by the hub; allowed: {wrong}."
    assert server.sent == [] and not any("/resolve/" in path for path in asked(server))
    _, record = fetch(weights_sha256=right)
    assert record["files"][WEIGHTS]["sha256"] == right
    here = f"{WEIGHTS} of a/b@{commit} has the sha256 {right}; allowed: {wrong}."
    assert refused("has the sha256", weights_sha256=wrong) == here
    server.close()
    assert refused("has the sha256", weights_sha256=wrong) == here
    assert fetch(weights_sha256=right)[1] == record


def test_weights_in_shards_have_no_hash_of_their_own(server, refused, shards):
    server.add("a/b", shards)
    refused(f"{WEIGHTS} of a/b@.* has several parts, so no sha256 of its own; allowed: 0", weights_sha256="0" * 64)
    assert names_sent(server) == [f"{WEIGHTS}.index.json"]


def test_a14_a_copy_without_a_name_that_tells_its_hash_is_refused_without_a_network(server, fetch, refused):
    server.add("a/b", SMALL)
    folder, _ = fetch()
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes(SMALL["config.json"])
    server.close()
    refused(r"\(config\.json is no link to a content named by its hash\); run again when", checkout="elsewhere")


# Who may have it, and what may go wrong


def test_a_gated_model_needs_the_right_token(server, fetch, refused, monkeypatch):
    server.add("a/b", SMALL)
    server.gate("a/b", "hf_right")
    terms = "The hub keeps a/b for those who accepted its terms on its page, and HF_TOKEN"
    assert refused("terms") == f"{terms} is not set."
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refused("terms") == f"{terms} does not open it."
    assert server.sent == []
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    _, record = fetch()
    assert set(names_sent(server)) == set(SMALL) == record["files"].keys()
    assert "hf_right" not in json.dumps(record)
    tokens = {request.headers.get("authorization") for request in server.requests if request.path.startswith("/cdn/")}
    assert tokens == {None}  # another server


@pytest.mark.parametrize(
    ("name", "token", "sentence"),
    [
        ("a/none", None, "The hub has no model a/none, or it is private and HF_TOKEN is not set."),
        ("a/none", "hf_x", "The hub has no model a/none, or it is private and HF_TOKEN does not open it."),
        (f"a/none@{'0' * 40}", None, "The hub has no model a/none, or it is private and HF_TOKEN is not set."),
        ("a/b@nope", None, "The hub's a/b has no revision nope; allowed: a branch, tag or commit of it."),
        ("a/b@refs/pr/9", None, "The hub's a/b has no revision refs/pr/9; allowed: a branch, tag or commit of it."),
        (f"a/b@{'0' * 40}", None, f"The hub's a/b has no revision {'0' * 40}; allowed: a branch, tag or commit of it."),
        ("a/b--c", None, "a/b--c is not the name of a model on the hub; allowed: organisation/name@revision."),
        ("a/b..c@x", None, "a/b..c@x is not the name of a model on the hub; allowed: organisation/name@revision."),
    ],
)
def test_names_that_the_hub_does_not_know(server, refused, tmp_path, monkeypatch, name, token, sentence):
    server.add("a/b", SMALL)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refused(None, name) == sentence
    assert server.sent == [] and not list((tmp_path / "home").glob("hub/*/snapshots/*"))


@pytest.mark.parametrize("lacking", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_repository_of_another_kind_is_refused(server, refused, lacking):
    files = SMALL | {"pytorch_model.bin": b"x", "model.gguf": b"x"}
    commit = server.add("a/b", {name: content for name, content in files.items() if name != lacking})
    allowed = "repositories with config.json, model.safetensors and tokenizer.json"
    sentence = f"a/b@{commit} has no {lacking}; allowed: {allowed}."
    assert refused(None) == sentence
    assert server.sent == []


ADVICE = {
    401: ": HF_TOKEN is not set.",
    403: ": HF_TOKEN is not set.",
    418: ".",
    429: " (too many requests, of which HF_TOKEN allows more), and the cache ",
    500: ", and the cache ",
    503: ", and the cache ",
}


@pytest.mark.parametrize("status", ADVICE)
@pytest.mark.parametrize("part", ["/api/models/", "/resolve/", "/cdn/", "tokenizer.json"])
def test_an_error_of_the_hub_is_one_sentence(server, fetch, refused, part, status):
    commit = server.add("a/b", SMALL)
    server.fail(part, status)
    message = refused(None)
    what = "a/b" if part == "/api/models/" else f"a/b@{commit}"
    assert message.startswith(f"The hub {server.endpoint} answers {status} when asked for {what}{ADVICE[status]}")
    assert message.endswith(hub.REACH + "." if status in (429, 500, 503) else ADVICE[status])
    assert (WEIGHTS in names_sent(server)) == (part == "tokenizer.json")
    server.mend()
    fetch()


@pytest.mark.parametrize("part", ["/resolve/", "/cdn/"])
def test_too_many_requests_for_a_moment_are_waited_for(server, fetch, part):
    server.add("a/b", SMALL)
    server.fail(part, 429, times=1, headers={"Retry-After": "0"})
    fetch()
    assert set(names_sent(server)) == set(SMALL)


def test_a_mirror_that_leads_in_circles_is_one_sentence(server, refused):
    server.fail("/api/models/", 307, headers={"Location": f"{server.endpoint}/api/models/a/b"})
    assert refused("redirects").startswith(f"Asked for a/b, {server.endpoint} gave no answer of a model hub (")


def test_an_answer_that_is_not_the_hubs_is_one_sentence(server, refused):
    """As a login page of a network gives it."""
    server.fail("/api/models/", 200)
    refused("a/b")


@pytest.mark.parametrize("how", ["offline", "down"])
def test_without_the_hub(server, fetch, refused, monkeypatch, how):
    commit = server.add("a/b", SMALL)
    server.add("c/d", SMALL)
    folder, record = fetch()
    asked_before = len(server.requests)
    reason = "HF_HUB_OFFLINE is set, so the hub is not asked"
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        server.close()
        reason = rf"The hub {server.endpoint} cannot be reached \(.+\)"
    assert fetch() == fetch(f"a/b@{commit}") == (folder, record)
    assert fetch(checkout="elsewhere") == (folder, record | {"licence": None})
    cache = re.escape(constants.HF_HUB_CACHE)
    refused(f"^{reason}, and the cache {cache} does not know c/d@main; {hub.REACH}.$", "c/d")
    refused(f"^{reason}, and the cache {cache} does not know a/b@dev; {hub.REACH}.$", "a/b@dev")
    name = f"a/b@{'0' * 40}"
    refused(f"^{reason}, and the cache {cache} does not hold all of {name}; {hub.REACH}.$", name)
    assert len(server.requests) == asked_before


@pytest.mark.parametrize("left_by", [None, "another program"])
@pytest.mark.parametrize("before", ["_fetch_large", "snapshot_download"])
def test_a14_a_hub_that_goes_away_in_the_middle(server, fetch, refused, monkeypatch, before, left_by):
    """It says what it has, then not a word: neither for the weights nor for the rest."""
    commit = server.add("a/b", SMALL)
    if left_by:
        hf_hub_download("a/b", "config.json")
    step = getattr(hub, before)
    monkeypatch.setattr(hub, before, lambda *arguments, **options: (server.close(), step(*arguments, **options))[1])
    message = refused(None)
    if before == "_fetch_large":
        broke = f"The connection broke while {WEIGHTS} of a/b@{commit} was fetched; run again to go on from there."
        assert message == broke
    elif left_by:  # there is a folder, and the client gives it as it is
        broke = f"The hub {server.endpoint} broke off: of a/b@{commit} {WEIGHTS} is missing; run again to go on."
        assert message == broke
    else:
        assert message.startswith(f"The hub {server.endpoint} cannot be reached (")
        assert message.endswith(f"the cache {constants.HF_HUB_CACHE} does not hold all of a/b@{commit}; {hub.REACH}.")


@pytest.mark.parametrize("have", [0, 4 * CHUNK])
def test_a_full_disk_is_noticed_before_anything_is_fetched(server, fetch, refused, monkeypatch, have):
    """What an interrupted download left counts as there."""
    server.add("a/b", SMALL)
    if have:
        leave_partial(server, refused, have)
    needed = sum(map(len, SMALL.values())) - have
    usage, asked_of = namedtuple("usage", "total used free"), []

    def free(size):
        monkeypatch.setattr(
            hub.shutil, "disk_usage", lambda path: (asked_of.append(path), usage(10 * size, 9 * size, size))[1]
        )

    free(needed - 1)
    message = refused("GB free, but fetching a/b needs")
    assert message.startswith(f"The disk of {constants.HF_HUB_CACHE} has 0.00 GB free") and "HF_HOME" in message
    assert server.sent == []
    assert all(path.is_dir() for path in asked_of)  # a folder that does not exist has no disk
    free(needed)
    fetch()
    free(0)
    fetch(checkout="elsewhere")  # nothing to fetch


def test_a_disk_that_fills_up_on_the_way_is_one_sentence(server, fetch, refused, tmp_path, monkeypatch):
    commit = server.add("a/b", SMALL)

    def full(url, stream, **_):
        stream.write(SMALL[WEIGHTS][: 2 * CHUNK])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hub, "http_get", full)
        message = refused("cannot be fetched")
    assert message == f"a/b@{commit} cannot be fetched ({constants.HF_HUB_CACHE}: No space left on device)."
    assert partial(tmp_path).stat().st_size == 2 * CHUNK
    fetch()
    assert sent(server) == [(2 * CHUNK, SIZE - 2 * CHUNK)]


def test_a_cache_that_may_not_be_written_is_one_sentence(server, fetch, tmp_path, monkeypatch, capfd):
    """The superuser may write everywhere, so a system that refuses is imitated."""
    server.add("a/b", SMALL)
    mkdir = Path.mkdir

    def forbidden(path, *arguments, **options):
        if tmp_path / "home" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(SystemExit) as stop:
        cli.run(fetch)
    (line,) = capfd.readouterr().err.splitlines()
    assert stop.value.code == 1 and line.startswith("error: ") and "Permission denied" in line
    assert str(tmp_path / "home" / "hub") in line
    assert server.sent == [] and records(tmp_path) == {}


@pytest.mark.parametrize("checkouts", [("models", "models"), ("models", "elsewhere")])
def test_two_at_once_fetch_the_weights_once(server, fetch, tmp_path, checkouts):
    commit = server.add("a/b", SMALL)
    server.stall(WEIGHTS, CHUNK, times=1)
    found = []
    threads = [
        threading.Thread(target=lambda name=name: found.append(fetch(f"a/b@{commit}", checkout=name)))
        for name in checkouts
    ]
    for thread in threads:
        thread.start()
    assert server.stalled.wait(10)
    server.mend()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert sent(server) == [(0, SIZE)]
    # Who comes second finds the record of its own checkout, and has no question left.
    described = [path for path in asked(server) if "blobs=" in path]
    assert len(records(tmp_path)) == len(described) == len(set(checkouts))


# What lies outside, and what nobody can fetch again


def test_a_file_outside_the_cache_is_never_deleted(server, fetch, refused, tmp_path):
    """Someone keeps weights elsewhere and links them into the cache."""
    server.add("a/b", SMALL)
    folder, record = fetch()
    elsewhere = tmp_path / "precious.safetensors"
    for content in (SMALL[WEIGHTS], SMALL[WEIGHTS][:-1] + b"x", b"short"):
        elsewhere.write_bytes(content)
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(elsewhere)
        if content == SMALL[WEIGHTS]:
            assert fetch(checkout="elsewhere") == (folder, record)
        elif len(content) == SIZE:
            refused("arrived with the hash", checkout="another")
        assert fetch(checkout=f"after {content[-5:]}")[1] == record and elsewhere.read_bytes() == content


@pytest.mark.parametrize("link", ["outside", "damaged"])
def test_without_the_hub_nothing_of_a_cache_is_deleted(server, fetch, refused, tmp_path, link):
    server.add("a/b", SMALL)
    folder, _ = fetch()
    wrong = SMALL[WEIGHTS][:-1] + b"x"
    if link == "outside":
        (tmp_path / "mine").write_bytes(SMALL[WEIGHTS])
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(tmp_path / "mine")
    else:
        (folder / WEIGHTS).write_bytes(wrong)
    server.close()
    fault = "no link to a content named by its hash" if link == "outside" else "not what its hash says"
    for _ in range(2):
        refused(rf"does not hold all of a/b@\w+ \({WEIGHTS} is {fault}\); run again when", checkout="elsewhere")
        assert (folder / WEIGHTS).read_bytes() == (SMALL[WEIGHTS] if link == "outside" else wrong)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_outage_is_as_good_as_no_network_where_the_cache_has_all(server, fetch, status):
    commit = server.add("a/b", SMALL)
    folder, record = fetch()
    server.fail("/api/", status)
    for name in ("a/b", f"a/b@{commit}"):
        assert fetch(name, checkout="elsewhere") == (folder, record | {"licence": None})


def test_shards_may_have_any_name_that_the_index_tells(server, fetch, shards):
    renamed = {name.replace("model-0000", "part"): content for name, content in shards.items()}
    index = renamed[f"{WEIGHTS}.index.json"].replace(b"model-0000", b"part")
    server.add("a/b", renamed | {f"{WEIGHTS}.index.json": index, "model-00001-of-00002.safetensors": b"left over"})
    _, record = fetch()
    found = {name for name in record["files"] if name.endswith(".safetensors")}
    assert found == {name for name in renamed if name.startswith("part")} and len(found) == 2


@pytest.mark.parametrize("change", [{"sha": "../../x"}, {"sha": 5}, {"sha": None}])
def test_a_commit_that_is_none_is_refused(server, refused, monkeypatch, change):
    server.add("a/b", SMALL)
    info = hub.HfApi.model_info

    def changed(*arguments, **options):
        answer = info(*arguments, **options)
        answer.sha = change["sha"]
        return answer

    monkeypatch.setattr(hub.HfApi, "model_info", changed)
    refused(r"gave no answer of a model hub \(the commit")
    assert not list((Path(constants.HF_HUB_CACHE)).glob("*/refs/*"))


def test_a_proxy_that_needs_a_package_is_one_sentence(server, refused, monkeypatch):
    def needs_socks(*_, **__):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr(hub.HfApi, "model_info", needs_socks)
    assert "socksio" in refused("Asked for a/b")
