"""Checkpoints from the model hub, by huggingface_hub's own client, in its own cache (HF_HOME).

The client honours HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE and retries what a retry may mend. What it does not do is done here:
only the files that a model is loaded from are fetched; every file that arrives is hashed, since the client checks sizes only;
a weights file whose download was killed goes on where it stopped; and a revision whose files were all verified gets a record
below models/hub/, with which it is used again without asking the hub.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_token

from pipeline.cells import read_json, write_json, write_text
from specdec.errors import InputError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = ("config.json", "generation_config.json")
# A tokenizer is in one of these; the others say more about it.
TOKENIZER = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TOKENIZER_DETAILS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt"),
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REACH = "run again when it answers, or set HF_HOME to a cache that does"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository as the hub lists it; `sha256` only of large files, `blob_id` (git's hash) of all."""

    name: str
    size: int
    blob_id: str
    sha256: str | None

    @property
    def etag(self) -> str:
        """What the client calls the file's content in its cache."""
        return self.sha256 or self.blob_id


class Unreachable(InputError):
    """The hub gave no answer: no network, an outage, or HF_HUB_OFFLINE. The beginning of a sentence."""


def resolve(repo: str, revision: str | None) -> str:
    """The commit hash of a branch, a tag or (None) the main branch; a commit hash is its own.

    Without the hub it is the one that the cache knows by that name.

    Raises:
        InputError: neither the hub nor the cache tells.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    name = revision or constants.DEFAULT_REVISION
    try:
        with _sentences(repo, revision):
            reference = _cache_folder(repo) / "refs" / name
            commit = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise ValueError(f"the commit {commit!r}")
    except Unreachable as unreachable:
        if not reference.is_file():
            raise InputError(f"{unreachable}, and {_cache()} does not know {repo}@{name}; {REACH}.") from None
        commit = reference.read_text(encoding="utf-8").strip()
        _say(f"{repo}: the hub gives no answer; {name} was {commit} when it last did")
        return commit
    with suppress(InputError):  # a cache that may only be read
        write_text(reference, commit)
    return commit


def ensure(repo: str, commit: str, models_dir: Path, weights_sha256: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The cache's folder of that commit, with all files that a model is loaded from, and its record; fetched if need be.

    Cheap, and without a request, when the record is there: files are compared by size.

    Args:
        weights_sha256: what model.safetensors must be, whatever the hub says.

    Returns:
        The folder, and {repo, revision, licence, files: {name: {sha256, bytes}}}; the licence is None if only the cache was
        there to tell.

    Raises:
        InputError: it cannot be had, is not what the hashes promise, or there is no room for it.
    """
    with _sentences(repo, commit):
        folder = _cache_folder(repo) / "snapshots" / commit
    path = models_dir / "hub" / f"{repo.replace('/', '--')}@{commit}.json"
    record, _ = _good_record(path, folder, repo)
    if record is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The system drops the lock of a process that was killed.
        with FileLock(path.with_suffix(".lock")):
            record, fault = _good_record(path, folder, repo)  # another process may have been first
            if record is None:
                if fault is not None:
                    _say(f"{repo}: {fault}; fetching what is missing")
                try:
                    record = _download(repo, commit, folder, weights_sha256)
                except Unreachable as unreachable:
                    record = _from_cache(repo, commit, folder, unreachable)
                write_json(path, record)
    found = record["files"].get(_WEIGHTS, {}).get("sha256")
    if weights_sha256 not in (None, found):
        raise InputError(f"{_WEIGHTS} of {repo}@{commit} has the sha256 {found}; allowed: {weights_sha256}.")
    return folder, record


def _cache() -> str:
    return f"the cache {constants.HF_HUB_CACHE}"


def _cache_folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _good_record(path: Path, folder: Path, repo: str) -> tuple[dict[str, Any] | None, str | None]:
    """The record, if the cache still holds all of it; else what is wrong, which is None if there is no record yet."""
    if not path.exists():
        return None, None
    try:
        record = read_json(path)
        faults = [_fault(folder / name, file["bytes"]) for name, file in record["files"].items()]
        if (record["repo"], record["revision"]) != (repo, folder.name) or "config.json" not in record["files"]:
            faults = [f"{path} is about something else"]
    except (InputError, KeyError, TypeError, AttributeError):
        faults = [f"{path} is broken"]
    fault = next(filter(None, faults), None)
    return (record, None) if fault is None else (None, fault)


def _fault(path: Path, size: int) -> str | None:
    """What keeps a file from being the one of that size, in words; None if nothing."""
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        return f"{path.name} is missing"
    return None if found == size else f"{path.name} has {found} bytes instead of {size}"


def _download(repo: str, commit: str, folder: Path, weights_sha256: str | None) -> dict[str, Any]:
    """Fetch what is missing, verify all, and return the record."""
    what = f"{repo}@{commit}"
    listed, licence = _listing(repo, commit)
    files = _needed(listed, repo, commit, lambda: Path(hf_hub_download(repo, _INDEX, revision=commit)))
    promised = next((f.sha256 for f in files if f.name == _WEIGHTS), None)
    if weights_sha256 not in (None, promised):
        found = f"the sha256 {promised} by the hub" if promised else "several parts, so no sha256 of its own"
        raise InputError(f"{_WEIGHTS} of {what} has {found}; allowed: {weights_sha256}.")
    blobs = folder.parents[1] / "blobs"
    missing = [f for f in files if _fault(folder / f.name, f.size) is not None]
    for file in missing:
        _remove(folder / file.name, blobs)  # whatever lies there is not the file
    _require_room(repo, missing, blobs)
    for file in missing:
        if file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            _fetch_large(repo, commit, file, blobs)
    with _sentences(repo, commit):
        snapshot_download(repo, revision=commit, allow_patterns=[f.name for f in files])
    for file in files:  # where the hub broke off, the client gives the folder that it has
        if (fault := _fault(folder / file.name, file.size)) is not None:
            raise InputError(f"The hub {constants.ENDPOINT} broke off: of {what} {fault}; run again to go on.")
    _say(f"{repo}: verifying")
    sums = {}
    for file in files:
        sums[file.name], git = _hashes(folder / file.name)
        if file.etag not in (sums[file.name], git):
            _remove(folder / file.name, blobs)
            raise _wrong(file, what, sums[file.name] if file.sha256 else git)
    return _record(repo, commit, licence, files, sums)


def _listing(repo: str, commit: str) -> tuple[list[HubFile], Any]:
    """Every file of the repository, and its licence."""
    with _sentences(repo, commit):
        info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        listed = []
        for f in info.siblings or []:
            file = HubFile(f.rfilename, f.size or 0, f.blob_id or "", f.lfs.sha256 if f.lfs else None)
            if not isinstance(f.size, int) or not _HASH.fullmatch(file.etag):
                raise ValueError(f"{file.name} of {f.size} bytes with the hash {file.etag!r}")
            listed.append(file)
    return listed, getattr(info.card_data, "license", None)


def _needed(files: list[HubFile], repo: str, commit: str, index: Callable[[], Path]) -> list[HubFile]:
    """What a model is loaded from, and no more: other frameworks' weights can be several times its size.

    Args:
        index: fetches the list of shards, where there is one.

    Raises:
        InputError: there is no config, or there are no safetensors weights, or no tokenizer.
    """
    names = {file.name for file in files}
    for wanted in (["config.json"], [_WEIGHTS, _INDEX], TOKENIZER):
        if not names.intersection(wanted):
            allowed = f"config.json, {_WEIGHTS} and {TOKENIZER[0]}"
            raise InputError(f"{repo}@{commit} has no {wanted[0]}; allowed: repositories with {allowed}.")
    weights = {_WEIGHTS}
    if _WEIGHTS not in names:  # as transformers chooses: shards only where there is no single file
        with _sentences(repo, commit):
            weights = {_INDEX, *json.loads(index().read_text(encoding="utf-8"))["weight_map"].values()}
    return [f for f in files if f.name in weights or f.name in (*_CONFIG, *TOKENIZER, *_TOKENIZER_DETAILS)]


def _require_room(repo: str, missing: list[HubFile], blobs: Path) -> None:
    """Refuse a download that the disk cannot hold. What an interrupted one has left counts as there."""
    there = [path for file in missing for path in (blobs / file.etag, _partial(blobs, file)) if path.exists()]
    needed = sum(file.size for file in missing) - sum(path.stat().st_size for path in there)
    existing = next(parent for parent in blobs.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise InputError(
            f"The disk of {constants.HF_HUB_CACHE} has {free / 1e9:.2f} GB free, but fetching {repo} needs "
            f"{needed / 1e9:.2f} GB; HF_HOME names another folder."
        )


def _partial(blobs: Path, file: HubFile) -> Path:
    return blobs / f"{file.etag}.partial"


def _fetch_large(repo: str, commit: str, file: HubFile, blobs: Path) -> None:
    """Put a weights file where the client looks before it fetches, once its hash is right.

    The client's own download starts from the first byte after a kill.
    """
    blobs.mkdir(parents=True, exist_ok=True)
    blob, partial = blobs / file.etag, _partial(blobs, file)
    with FileLock(f"{partial}.lock"):  # another checkout may fetch the same file
        if blob.exists():
            return
        if partial.exists() and partial.stat().st_size > file.size:
            partial.unlink()
        with _sentences(repo, commit, file.name), partial.open("ab") as stream:
            have = stream.tell()
            _say(f"{repo}: fetching {file.name}" + (f" from byte {have} on" if have else ""))
            http_get(
                hf_hub_url(repo, file.name, revision=commit),
                stream,
                resume_size=have,
                headers={**build_hf_headers(), "Accept-Encoding": "identity"},  # a range of the file, not of its gzip
                expected_size=file.size,
                displayed_filename=file.name,
            )
        sha256, _ = _hashes(partial)
        if sha256 != file.sha256:
            partial.unlink()
            raise _wrong(file, f"{repo}@{commit}", sha256)
        partial.replace(blob)


def _from_cache(repo: str, commit: str, folder: Path, unreachable: Unreachable) -> dict[str, Any]:
    """The record of a commit that another program, or another checkout, brought into the cache.

    The cache's own listing tells whether it is complete; a folder that merely exists proves nothing. In the cache a file's
    content is named by its hash. Nothing is deleted here, for it could not be fetched again.

    Raises:
        InputError: the cache has no listing, or not every file.
    """
    lack = f"{unreachable}, and {_cache()} does not hold all of {repo}@{commit}"

    def index() -> Path:
        if not (folder / _INDEX).is_file():
            raise InputError(f"{lack} ({_INDEX} is missing); {REACH}.")
        return folder / _INDEX

    try:
        listed = [HubFile(f.path, f.size, f.blob_id, None) for f in get_cached_repo_tree(repo, revision=commit)]
        files = _needed(listed, repo, commit, index)
    except CachedRepoTreeNotFoundError:
        raise InputError(f"{lack}; {REACH}.") from None
    _say(f"{repo}: verifying")
    sums = {}
    for file in files:
        path = folder / file.name
        fault, content = _fault(path, file.size), path.resolve().name
        if fault is None and not _HASH.fullmatch(content):
            fault = f"{file.name} is no link to a content named by its hash"
        if fault is None:
            sums[file.name], git = _hashes(path)
            fault = None if content in (sums[file.name], git) else f"{file.name} is not what its hash says"
        if fault is not None:
            raise InputError(f"{lack} ({fault}); {REACH}.")
    return _record(repo, commit, None, files, sums)


def _record(repo: str, commit: str, licence: Any, files: list[HubFile], sums: dict[str, str]) -> dict[str, Any]:
    described = {file.name: {"sha256": sums[file.name], "bytes": file.size} for file in files}
    return {"repo": repo, "revision": commit, "licence": licence, "files": described}


def _hashes(path: Path) -> tuple[str, str]:
    """The sha256 of a file, and git's hash of it, by which the hub knows small files."""
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(2**20):
            sha256.update(block)
            git.update(block)
    return sha256.hexdigest(), git.hexdigest()


def _wrong(file: HubFile, what: str, found: str) -> InputError:
    return InputError(
        f"{file.name} of {what} arrived with the hash {found} instead of {file.etag} and was deleted; run again to fetch it "
        "anew."
    )


def _remove(path: Path, blobs: Path) -> None:
    """A file of the cache: the link, and the content that it points to unless that lies elsewhere."""
    content = path.resolve()
    if content.parent == blobs.resolve():
        content.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def _sentences(repo: str, revision: str | None, file: str | None = None) -> Iterator[None]:
    """Turn what the client raises into one sentence.

    Raises:
        Unreachable: no answer came.
        InputError: the answer was no, or nothing that a hub would say; or a file could not be written.
    """
    what = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except InputError:
        raise
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise _as_sentence(error, repo, what, file) from None


def _as_sentence(error: BaseException, repo: str, what: str, file: str | None) -> InputError:
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the client's summary of it, in several lines
    token = "HF_TOKEN does not open it" if get_token() else "HF_TOKEN is not set"
    match error:
        case GatedRepoError():
            return InputError(f"The hub keeps {repo} for those who accepted its terms on its page, and {token}.")
        case RepositoryNotFoundError():
            return InputError(f"The hub has no model {repo}, or it is private and {token}.")
        case RevisionNotFoundError():
            revision = what.partition("@")[2]
            return InputError(f"The hub's {repo} has no revision {revision}; allowed: a branch, tag or commit of it.")
        case HFValidationError():
            return InputError(f"{what} is not the name of a model on the hub; allowed: organisation/name@revision.")
        case OfflineModeIsEnabled():
            return Unreachable("HF_HUB_OFFLINE is set, so the hub is not asked")
        case HfHubHTTPError():
            return _refusal(error.response.status_code, what, token)
        case httpx2.TransportError() if file is None:
            reason = (str(error) or type(error).__name__).rstrip(".")
            return Unreachable(f"The hub {constants.ENDPOINT} cannot be reached ({reason})")
        case httpx2.HTTPError() | OSError() if file is not None and not getattr(error, "errno", None):
            return InputError(
                f"The connection broke while {file} of {what} was fetched; run again to go on from there."
            )
        case OSError() if error.errno:
            place = error.filename or constants.HF_HUB_CACHE
            return InputError(f"{what} cannot be fetched ({place}: {error.strerror}).")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return InputError(f"Asked for {what}, {constants.ENDPOINT} gave no answer of a model hub ({reason}).")


def _refusal(status: int, what: str, token: str) -> InputError:
    answer = f"The hub {constants.ENDPOINT} answers {status} when asked for {what}"
    if status in (401, 403):
        return InputError(f"{answer}: {token}.")
    if status == 429:
        return Unreachable(f"{answer} (too many requests, of which HF_TOKEN allows more)")
    return Unreachable(answer) if status >= 500 else InputError(f"{answer}.")


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
