"""Checkpoints from the model hub, by huggingface_hub's own client, in its own cache (HF_HOME).

The client honours HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE and retries what a retry may mend. What it does not do is done here:
only the files that a model is loaded from are fetched; every file that arrives is hashed, since the client takes wrong bytes of
the right size; a weights file whose download was killed goes on where it stopped; and a revision whose files were all verified
gets a record below models/hub/, with which it is used again without asking the hub.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_url, snapshot_download
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

REACH = "run again with a network, or set HF_HOME to a cache that does"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_CONFIG = ("config.json", "generation_config.json")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)


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
    """The hub gave no answer: no network, or HF_HUB_OFFLINE. The beginning of a sentence."""


def resolve(repo: str, revision: str | None) -> str:
    """The commit hash of a branch, a tag or (None) the main branch; a commit hash is its own.

    Without the hub it is the one that the cache knows by that name.

    Raises:
        InputError: neither the hub nor the cache tells.
    """
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    name = revision or constants.DEFAULT_REVISION
    try:
        with _sentences(repo, revision):
            reference = _cache_folder(repo) / "refs" / name
            commit = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    except Unreachable as unreachable:
        if not reference.is_file():
            raise InputError(f"{unreachable}, and {_cache()} does not know {repo}@{name}; {REACH}.") from None
        commit = reference.read_text(encoding="utf-8").strip()
        _say(f"{repo}: the hub gives no answer; {name} was {commit} when it last did")
        return commit
    assert commit is not None  # the hub always sends it; the field is optional for other uses of the class
    with suppress(InputError):  # a cache that may only be read
        write_text(reference, commit)
    return commit


def ensure(repo: str, commit: str, models_dir: Path, weights_sha256: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The cache's folder of that commit, with all files that a model is loaded from, and its record; fetched if not there yet.

    Cheap, and without a request, when the record is there: files are compared by size.

    Args:
        weights_sha256: what model.safetensors must be, whatever the hub says.

    Returns:
        The folder, and {repo, revision, licence, files: {name: {sha256, bytes}}}.

    Raises:
        InputError: it cannot be had, is not what the hashes promise, or there is no room for it.
    """
    with _sentences(repo, commit):
        folder = _cache_folder(repo) / "snapshots" / commit
    path = models_dir / "hub" / f"{repo.replace('/', '--')}@{commit}.json"
    record = _good_record(path, folder, repo)
    if record is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The system drops the lock of a process that was killed.
        with FileLock(path.with_suffix(".lock")):
            record = _good_record(path, folder, repo)  # another process may have been first
            if record is None:
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


def _good_record(path: Path, folder: Path, repo: str) -> dict[str, Any] | None:
    """The record, if the cache still holds all of it; says what is wrong if it does not."""
    if not path.exists():
        return None
    try:
        record = read_json(path)
        faults = [_fault(folder / name, file["bytes"]) for name, file in record["files"].items()]
        if (record["repo"], record["revision"]) != (repo, folder.name) or "config.json" not in record["files"]:
            faults = [f"{path} is about something else"]
    except (InputError, KeyError, TypeError, AttributeError):
        faults = [f"{path} is broken"]
    for fault in filter(None, faults):
        _say(f"{repo}: {fault}; fetching what is missing")
        return None
    return record


def _fault(path: Path, size: int) -> str | None:
    """What keeps a file from being the one of that size, in words; None if nothing."""
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        return f"{path.name} is missing"
    return None if found == size else f"{path.name} has {found} bytes instead of {size}"


def _download(repo: str, commit: str, folder: Path, weights_sha256: str | None) -> dict[str, Any]:
    """Fetch what is missing, verify all, and return the record."""
    with _sentences(repo, commit):
        info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    listed = [
        HubFile(f.rfilename, f.size or 0, f.blob_id or "", f.lfs.sha256 if f.lfs else None) for f in info.siblings or []
    ]
    files = _needed(listed, f"{repo}@{commit}")
    if unknown := [f.name for f in files if not f.etag]:
        raise InputError(
            f"The hub {constants.ENDPOINT} tells no hash of {unknown[0]} of {repo}; allowed: hubs that do."
        )
    promised = next((f.sha256 for f in files if f.name == _WEIGHTS), None)
    if weights_sha256 not in (None, promised):
        found = f"the sha256 {promised} by the hub" if promised else "several parts, so no sha256 of its own"
        raise InputError(f"{_WEIGHTS} of {repo}@{commit} has {found}; allowed: {weights_sha256}.")
    missing = [f for f in files if _fault(folder / f.name, f.size) is not None]
    for file in missing:
        _remove(folder / file.name)  # whatever lies there is not the file
    blobs = folder.parents[1] / "blobs"
    _require_room(repo, missing, blobs)
    for file in missing:
        if file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            _fetch_large(repo, commit, file, blobs)
    with _sentences(repo, commit):
        snapshot_download(repo, revision=commit, allow_patterns=[f.name for f in files])
    for file in files:  # where the hub broke off, the client gives the folder that it has
        if (fault := _fault(folder / file.name, file.size)) is not None:
            raise InputError(f"The hub {constants.ENDPOINT} broke off: of {repo}@{commit} {fault}; run again to go on.")
    licence = getattr(info.card_data, "license", None)
    return _record(repo, commit, licence, {f.name: f.etag for f in files}, folder)


def _needed(files: list[HubFile], what: str) -> list[HubFile]:
    """What a model is loaded from, and no more: other frameworks' weights can be several times its size.

    Raises:
        InputError: there is no config, or there are no safetensors weights.
    """
    names = {file.name for file in files}
    for wanted in ({"config.json"}, {_WEIGHTS, _INDEX}):
        if not names & wanted:
            raise InputError(
                f"{what} has no {sorted(wanted)[0]}; allowed: repositories with config.json and {_WEIGHTS}."
            )
    # As transformers chooses: shards only where there is no single file.
    weights = {_WEIGHTS} if _WEIGHTS in names else {_INDEX, *(name for name in names if _SHARD.fullmatch(name))}
    return [file for file in files if file.name in weights or file.name in (*_CONFIG, *_TOKENIZER)]


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
            url = hf_hub_url(repo, file.name, revision=commit)
            http_get(
                url,
                stream,
                resume_size=have,
                headers={**build_hf_headers(), "Accept-Encoding": "identity"},  # a range of the file, not of its gzip
                expected_size=file.size,
                displayed_filename=file.name,
            )
        _verify(partial, file.name, file.etag, f"{repo}@{commit}")
        partial.replace(blob)


def _from_cache(repo: str, commit: str, folder: Path, unreachable: Unreachable) -> dict[str, Any]:
    """The record of a commit that another program, or another checkout, brought into the cache.

    The cache's own listing tells whether it is complete; a folder that merely exists proves nothing. In the cache a file's
    content is named by its hash.

    Raises:
        InputError: the cache has no listing, or not every file.
    """
    lack = f"{unreachable}, and {_cache()} does not hold all of {repo}@{commit}"
    try:
        listed = [HubFile(f.path, f.size, f.blob_id, None) for f in get_cached_repo_tree(repo, revision=commit)]
    except CachedRepoTreeNotFoundError:
        raise InputError(f"{lack}; {REACH}.") from None
    files = _needed(listed, f"{repo}@{commit}")
    for file in files:
        fault = _fault(folder / file.name, file.size)
        if fault is None and not (folder / file.name).is_symlink():
            fault = f"{file.name} is no link to a content named by its hash"
        if fault is not None:
            raise InputError(f"{lack} ({fault}); {REACH}.")
    names = {file.name: (folder / file.name).resolve().name for file in files}
    return _record(repo, commit, None, names, folder)


def _record(repo: str, commit: str, licence: Any, etags: dict[str, str], folder: Path) -> dict[str, Any]:
    """Hash every file and describe them."""
    _say(f"{repo}: verifying")
    files = {
        name: {
            "sha256": _verify(folder / name, name, etag, f"{repo}@{commit}"),
            "bytes": (folder / name).stat().st_size,
        }
        for name, etag in etags.items()
    }
    return {"repo": repo, "revision": commit, "licence": licence, "files": files}


def _verify(path: Path, name: str, etag: str, what: str) -> str:
    """The file's sha256; `etag` is it, or git's hash of the file.

    Raises:
        InputError: the content has another hash. The file is gone then, so that the next run fetches it anew.
    """
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    found = sha256
    if len(etag) == 40:
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != etag:
        _remove(path)
        raise InputError(
            f"{name} of {what} arrived with the hash {found} instead of {etag} and was deleted; run again to fetch it anew."
        )
    return sha256


def _remove(path: Path) -> None:
    """A file of the cache: the link, and the content that it points to."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def _sentences(repo: str, revision: str | None, file: str | None = None) -> Iterator[None]:
    """Turn what the client raises into one sentence.

    Raises:
        Unreachable: no answer came.
        InputError: the answer was no.
    """
    what = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except (httpx2.HTTPError, OfflineModeIsEnabled, OSError, ValueError, KeyError, TypeError) as error:
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
            return InputError(
                f"The hub's {repo} has no revision {what.partition('@')[2]}; allowed: a branch, tag or commit of it."
            )
        case HFValidationError():
            return InputError(f"{what} is not the name of a model on the hub; allowed: organisation/name@revision.")
        case OfflineModeIsEnabled():
            return Unreachable("HF_HUB_OFFLINE is set, so the hub is not asked")
        case HfHubHTTPError():
            status = error.response.status_code
            advice = {401: token, 403: token, 429: "too many requests; wait, or set HF_TOKEN"}.get(
                status, "try again later"
            )
            return InputError(f"The hub {constants.ENDPOINT} answers {status} when asked for {what}: {advice}.")
        case httpx2.TransportError() if file is None:
            reason = str(error) or type(error).__name__
            return Unreachable(f"The hub {constants.ENDPOINT} cannot be reached ({reason.rstrip('.')})")
        case httpx2.HTTPError() | OSError() if file is not None and not getattr(error, "errno", None):
            return InputError(
                f"The connection broke while {file} of {what} was fetched; run again to go on from there."
            )
        case OSError() if error.errno:
            return InputError(f"{what} cannot be written to {constants.HF_HUB_CACHE}: {error.strerror}.")
        case ValueError() | KeyError() | TypeError():
            return InputError(f"What answers at {constants.ENDPOINT} when asked for {what} is no model hub.")
    return InputError(f"{what} cannot be fetched: {str(error).strip().splitlines()[0].rstrip('.')}.")


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
