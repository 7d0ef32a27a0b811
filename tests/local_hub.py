"""A model hub on this machine: the part of the real one's protocol that the `huggingface_hub` client downloads models with.

Like the real one it is two servers. The hub answers questions, and hands out small files itself; for a large one (Git LFS) it
redirects to a content server, which knows files by their sha256 and has another origin: the client follows a redirect within the
hub's origin when it asks for a file's hash and size, and would lose both. Faults can be switched on: see `LocalHub.fail`, `cut`,
`corrupt` and `stall`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

# What the .gitattributes of a new repository on the real hub sends to LFS, as far as models hold it; and anything beyond 10 MB.
_LFS_SUFFIXES = (
    *(
        ".bin",
        ".ckpt",
        ".gguf",
        ".h5",
        ".model",
        ".msgpack",
        ".npy",
        ".npz",
        ".onnx",
        ".ot",
        ".pb",
        ".pickle",
        ".pkl",
        ".pt",
    ),
    *(".pth", ".safetensors", ".tar.gz", ".tflite", ".zip"),
)
_LFS_SIZE = 10 * 2**20


class Request(NamedTuple):
    """What the hub or its content server was asked."""

    method: str
    path: str  # with the query; that of the content server begins with /cdn/
    headers: dict[str, str]  # names in lower case


class Sent(NamedTuple):
    """What was sent of a file in one response."""

    file: str  # its path within the repository
    start: int
    size: int  # bytes, fewer than promised if the response was cut


@dataclass
class _Fault:
    kind: str  # "fail", "cut", "corrupt" or "stall"
    part: str
    times: int | None = None
    status: int = 0
    headers: Mapping[str, str] | None = None
    method: str | None = None
    after: int = 0


class _File:
    """A file of a repository, as git knows it."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content
        self.is_lfs = path.endswith(_LFS_SUFFIXES) or len(content) > _LFS_SIZE

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def blob(self) -> bytes:
        """What git stores: the content, or the pointer to it."""
        if not self.is_lfs:
            return self.content
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return pointer.encode()

    @cached_property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.blob) + self.blob).hexdigest()

    def entry(self) -> dict[str, Any]:
        """Its line in a listing of the tree."""
        lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self.blob)}
        entry = {"type": "file", "oid": self.oid, "size": len(self.content), "path": self.path}
        return entry | ({"lfs": lfs} if self.is_lfs else {})

    def sibling(self, blobs: bool) -> dict[str, Any]:
        """Its line in the description of the model."""
        lfs = {"sha256": self.sha256, "size": len(self.content), "pointerSize": len(self.blob)}
        sizes = {"size": len(self.content), "blobId": self.oid} | ({"lfs": lfs} if self.is_lfs else {})
        return {"rfilename": self.path} | (sizes if blobs else {})


@dataclass(frozen=True)
class _Commit:
    files: dict[str, _File]
    licence: str | None
    tags: tuple[str, ...]


class _Repository:
    def __init__(self) -> None:
        self.commits: dict[str, _Commit] = {}
        self.branches: dict[str, str] = {}
        self.token: str | None = None  # the only one with access, if the repository is gated

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, or a commit's full hash, stands for."""
        return revision if revision in self.commits else self.branches.get(revision)


class LocalHub:
    """A hub at `endpoint`, until it is closed. A client must have HF_ENDPOINT set before it is imported: see `environment`.

    Attributes:
        requests: everything that was asked, in order.
        sent: which bytes of which files were sent, in the order in which the responses ended. A client that died may have less.
        stalled: set when a response hangs, see `stall`.
        page_size: how many entries a listing of files has at once; the next page is in its Link header.
    """

    def __init__(self, page_size: int = 1000) -> None:
        self.page_size = page_size
        self.requests: list[Request] = []
        self.sent: list[Sent] = []
        self.stalled = threading.Event()
        self._released = threading.Event()  # what hangs goes on
        self._closed = False
        self._repositories: dict[str, _Repository] = {}
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._hub, self._cdn = _Server(_HubHandler, self), _Server(_CdnHandler, self)
        self.endpoint, self.cdn = self._hub.address, self._cdn.address

    def __enter__(self) -> LocalHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No more answers, on open connections neither."""
        self._closed = True
        self._released.set()
        for server in (self._hub, self._cdn):
            server.close()

    def environment(self, home: Path) -> dict[str, str]:
        """This process's environment for a client of the hub, without a token: `home` will hold its cache."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and name.lower() != "no_proxy"
        }
        # A proxy of the machine, which the client would obey, cannot reach us. There must be no update check, nor telemetry.
        return kept | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def add(
        self,
        name: str,
        files: Mapping[str, bytes],
        licence: str | None = "mit",
        branch: str = "main",
        tags: Sequence[str] = (),
    ) -> str:
        """Commit these files, and no others, to a branch; the repository is made if need be. Earlier commits stay reachable.

        Args:
            name: of the repository, "owner/name".
            tags: what the model page shows beside the licence ("gpt2", "text-generation"), not git's.

        Returns:
            the commit's hash, which depends on the repository's name, the content, the licence and the tags only.
        """
        commit = _Commit({path: _File(path, files[path]) for path in sorted(files)}, licence, tuple(tags))
        content = [name, licence, *tags, {path: file.oid for path, file in commit.files.items()}]
        digest = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        with self._lock:
            repository = self._repositories.setdefault(name, _Repository())
            repository.commits[digest] = commit
            repository.branches[branch] = digest
        return digest

    def gate(self, name: str, token: str) -> None:
        """Files only for who sends this token. As on the real hub, the description and the listing stay public."""
        self._repositories[name].token = token

    def fail(
        self,
        part: str,
        status: int,
        times: int | None = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> None:
        """Answer requests whose path (with the query) holds `part` with an error, so many times or until `mend`.

        A large file is asked for twice, from the hub and from the content server: "/resolve/" and "/cdn/" tell them apart.
        """
        self._add(_Fault("fail", part, times, status=status, headers=headers, method=method))

    def cut(self, part: str, after: int, times: int | None = None) -> None:
        """Promise the bytes of files whose path holds `part`, but close the connection after so many of each response.

        A response that has no more bytes than that is sent as it is, and does not count.
        """
        self._add(_Fault("cut", part, times, after=after))

    def corrupt(self, part: str, times: int | None = None) -> None:
        """Send such files with one bit changed, in the byte in the middle. Sizes and hashes are told as before."""
        self._add(_Fault("corrupt", part, times))

    def stall(self, part: str, after: int, times: int | None = None) -> None:
        """Send so many bytes of each response with such a file, then nothing until `mend`, and `stalled` is set."""
        self.stalled.clear()
        self._released.clear()
        self._add(_Fault("stall", part, times, after=after))

    def mend(self) -> None:
        """No more faults; responses that hang go on."""
        with self._lock:
            self._faults.clear()
        self._released.set()
        self.stalled.clear()

    def _add(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _take(self, kinds: Sequence[str], path: str, method: str, size: int = 0) -> _Fault | None:
        """The first fault of these kinds that befalls a request, for a response of `size` bytes; it then has one time less."""
        with self._lock:
            for fault in self._faults:
                befalls = fault.kind in kinds and fault.part in path and fault.method in (None, method)
                if befalls and (fault.kind == "fail" or fault.after < size) and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None


class _Server(ThreadingTCPServer):
    """Serves from the moment it is made, in threads that do not keep the process alive."""

    daemon_threads = True
    request_queue_size = 64  # the client opens several connections at once

    def __init__(self, handler: type[_Handler], hub: LocalHub) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed in the tests: that a connection broke is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing: `LocalHub.requests` has it all."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append(Request(self.command, self.path, headers))
        if fault := hub._take(["fail"], unquote(self.path), self.command):
            self.reply(fault.status, fault.headers, {"error": HTTPStatus(fault.status).phrase})
            return
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.answer([unquote(part) for part in url.path.strip("/").split("/")], query)

    def answer(self, parts: list[str], query: dict[str, str]) -> None:
        raise NotImplementedError

    @property
    def token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def reply(self, status: int, headers: Mapping[str, str] | None, content: object) -> None:
        """A whole response with JSON."""
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        """The client tells errors apart by X-Error-Code, and shows X-Error-Message."""
        told = {"X-Error-Code": code, "X-Error-Message": message, **headers}
        self.reply(status, told, {"error": message})

    def send_file(self, file: _File, headers: Mapping[str, str]) -> None:
        """The file, or the range of it that is asked for, with the faults that are on."""
        size, asked = len(file.content), self.headers.get("Range")
        start, end = _span(asked, size) if asked else (0, size)
        if asked and start >= end:
            self.reply(416, {"Content-Range": f"bytes */{size}"}, {"error": "Range Not Satisfiable"})
            return
        self.send_response(206 if asked else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(file, start, end)

    def _send_body(self, file: _File, start: int, end: int) -> None:
        hub, path = self.server.hub, unquote(self.path)
        content = file.content
        if hub._take(["corrupt"], path, self.command, end - start):
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        fault = hub._take(["cut", "stall"], path, self.command, end - start)
        first, stop = start, start + fault.after if fault else end
        if fault and fault.kind == "stall":
            self.wfile.write(content[start:stop])
            hub.stalled.set()
            hub._released.wait()
            first, stop = stop, stop if hub._closed else end
        # Noted before the last byte leaves, since the client, and then the test, may be done as soon as it arrives.
        hub.sent.append(Sent(file.path, start, stop - start))
        self.close_connection = self.close_connection or stop < end
        self.wfile.write(content[first:stop])


def _span(asked: str, size: int) -> tuple[int, int]:
    """First byte and the one after the last, of a Range header with one range; empty if the file has no such bytes."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


class _HubHandler(_Handler):
    """/api/models/{owner}/{name}… and /{owner}/{name}/resolve/{revision}/{path}."""

    def answer(self, parts: list[str], query: dict[str, str]) -> None:
        match parts:
            case ["api", "models", owner, name]:
                self._answer_repository(f"{owner}/{name}", "info", "main", "", query)
            case ["api", "models", owner, name, "revision", revision]:
                self._answer_repository(f"{owner}/{name}", "info", revision, "", query)
            case ["api", "models", owner, name, "tree", revision, *path]:
                self._answer_repository(f"{owner}/{name}", "tree", revision, "/".join(path), query)
            case ["api", "models", owner, name, "auth-check"]:
                self._answer_repository(f"{owner}/{name}", "auth-check", "main", "", query)
            case [owner, name, "resolve", revision, *path] if path:
                self._answer_repository(f"{owner}/{name}", "resolve", revision, "/".join(path), query)
            case _:
                self.reply(404, {"X-Error-Message": "Not Found"}, {"error": "Not Found"})

    def _answer_repository(self, name: str, what: str, revision: str, path: str, query: dict[str, str]) -> None:
        repository = self.server.hub._repositories.get(name)
        if repository is None:
            self._refuse_repository()
            return
        if repository.token not in (None, self.token) and what in ("resolve", "auth-check"):
            self._refuse_access(name)
            return
        commit = repository.resolve(revision)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif what == "info":
            self.reply(200, {"X-Repo-Commit": commit}, _description(name, repository, commit, "blobs" in query))
        elif what == "tree":
            self._reply_tree(repository.commits[commit], commit, path, query)
        elif what == "auth-check":
            self.reply(200, {}, {})
        else:
            self._resolve(name, commit, repository.commits[commit].files.get(path))

    def _refuse_repository(self) -> None:
        # To who is not logged in, a repository that is not there looks like a private one. The real hub's error code may be
        # missing from the 401, since the client also knows it by the URL, but only if that begins with https.
        if self.token is None:
            login = 'Bearer realm="Authentication required", charset="UTF-8"'
            self.refuse(401, "RepoNotFound", "Invalid username or password.", **{"WWW-Authenticate": login})
        else:
            self.refuse(404, "RepoNotFound", "Repository not found")

    def _refuse_access(self, name: str) -> None:
        restricted = f"Access to model {name} is restricted"
        if self.token is None:
            message = f"{restricted}. You must have access to it and be authenticated to access it. Please log in."
            self.refuse(401, "GatedRepo", message)
        else:
            page = f"{self.server.hub.endpoint}/{name}"
            message = f"{restricted} and you are not in the authorized list. Visit {page} to ask for access."
            self.refuse(403, "GatedRepo", message)

    def _reply_tree(self, commit: _Commit, digest: str, path: str, query: dict[str, str]) -> None:
        entries = _tree(commit, path, query.get("recursive", "").lower() in ("true", "1"))
        if path and not entries:
            self.refuse(404, "EntryNotFound", f'{path} does not exist on "{digest}"')
            return
        start, size = int(query.get("cursor", 0)), self.server.hub.page_size
        headers = {"X-Repo-Commit": digest}
        if start + size < len(entries):
            address = self.server.address + urlsplit(self.path).path
            recursive = query.get("recursive", "false")
            headers["Link"] = f'<{address}?recursive={recursive}&cursor={start + size}>; rel="next"'
        self.reply(200, headers, entries[start : start + size])

    def _resolve(self, name: str, commit: str, file: _File | None) -> None:
        if file is None:
            self.refuse(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})
        elif file.is_lfs:
            location = f"{self.server.hub.cdn}/cdn/{name}/{file.sha256}/{quote(file.path)}"
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{file.sha256}"',
                "X-Linked-Size": str(len(file.content)),
                "Location": location,
            }
            self.reply(302, headers, f"Found. Redirecting to {location}")
        else:
            self.send_file(file, {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'})


class _CdnHandler(_Handler):
    """/cdn/{owner}/{name}/{sha256}/{path}: large files of all commits. Addresses are secret, so no token is asked for."""

    def answer(self, parts: list[str], query: dict[str, str]) -> None:
        match parts:
            case ["cdn", owner, name, sha256, *path]:
                repository = self.server.hub._repositories.get(f"{owner}/{name}", _Repository())
                files = (commit.files.get("/".join(path)) for commit in list(repository.commits.values()))
                file = next((file for file in files if file and file.is_lfs and file.sha256 == sha256), None)
            case _:
                file = None
        if file is None:
            self.reply(403, {}, {"error": "Access denied"})
        else:
            # The content server's ETag is not the file's sha256; on the real hub it is some hash of the storage behind it.
            self.send_file(file, {"ETag": f'"{hashlib.md5(file.sha256.encode()).hexdigest()}"'})


def _description(name: str, repository: _Repository, digest: str, blobs: bool) -> dict[str, Any]:
    """What the hub tells of a model at a commit."""
    commit = repository.commits[digest]
    licence = {} if commit.licence is None else {"license": commit.licence}
    return {
        "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
        "id": name,
        "modelId": name,
        "author": name.split("/")[0],
        "sha": digest,
        "createdAt": "2022-03-02T23:29:04.000Z",
        "lastModified": "2024-02-19T10:57:45.000Z",
        "private": False,
        "gated": "manual" if repository.token else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [*commit.tags, *(f"license:{value}" for value in licence.values()), "region:us"],
        "cardData": licence,
        "siblings": [file.sibling(blobs) for file in commit.files.values()],
    }


def _tree(commit: _Commit, path: str, recursive: bool) -> list[dict[str, Any]]:
    """Folders and files under a folder of the repository; "" is all of it."""
    root = PurePosixPath(path)
    files = [file for file in commit.files.values() if root in PurePosixPath(file.path).parents]
    folders = {parent for file in files for parent in PurePosixPath(file.path).parents if root in parent.parents}
    entries = [
        {"type": "directory", "oid": hashlib.sha1(str(folder).encode()).hexdigest(), "size": 0, "path": str(folder)}
        for folder in sorted(folders)
    ] + [file.entry() for file in files]
    return [entry for entry in entries if recursive or PurePosixPath(entry["path"]).parent == root]
