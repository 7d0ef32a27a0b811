"""A Llama's blocks and head as one piece of C++ (specdec/native.cpp), compiled where it runs.

A step of decoding is many small operations, and what each costs beside its arithmetic (Python, dispatch, a parallel region of its
own) is much of a small draft's time. Here a pass is two calls. Weights are read as they are stored, also those of 4 and 8 bits,
and activations stay float32.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from specdec.kernels import Int4Linear
from specdec.quantize import Int8Linear

if TYPE_CHECKING:
    from specdec.llama import Pass

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 32  # columns that the code takes at a time
FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # of nn.Linear; and, in native.cpp's order:
INT8, INT4 = 2, 3
ARCHITECTURES = {"AVX512": ["-march=x86-64-v4"], "AVX2": ["-march=x86-64-v3"]}  # by what torch says of the CPU


# Making it


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code, or None where there is no C++ compiler that makes it. It is made once and kept in the user's cache."""
    try:
        code = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    code.specdec_hidden.argtypes = [c_void_p, c_void_p, c_int32, c_int32, *[c_void_p] * 4, c_int32, c_int32]
    code.specdec_logits.argtypes = [c_void_p, c_void_p, c_int32, c_void_p, c_int32]
    code.specdec_hidden.restype = code.specdec_logits.restype = None
    return code


def _compiled() -> Path:
    """The shared object, from the cache when it was made of this source by this command."""
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", *ARCHITECTURES.get(torch.backends.cpu.get_cpu_capability(), [])]
    made_of = [SOURCE.read_text(encoding="utf-8"), compiler, *flags, platform.machine(), sys.platform]
    folder = Path(platformdirs.user_cache_dir("specdec"))
    path = folder / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        of_source, shared = Path(work, "native.o"), Path(work, "native.so")
        _run([compiler, *flags, "-c", str(SOURCE), "-o", str(of_source)])
        # Without -fopenmp: the threads are to be those of torch's OpenMP, which is loaded. Two pools would fight over cores.
        _run([compiler, "-shared", str(of_source), "-o", str(shared)])
        shared.replace(path)
    return path


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)


# Describing a model to it; the structures are those of native.cpp


class _Matrix(ctypes.Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("format", "outputs", "columns", "group")],
        *[(name, c_void_p) for name in ("weights", "scales", "bias")],
    ]


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [("attention_norm", c_void_p), ("mlp_norm", c_void_p), *[(name, _Matrix) for name in MATRICES]]


class _Model(ctypes.Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "width", "inner")],
        ("eps", c_float),
        ("layer", ctypes.POINTER(_Layer)),
        ("norm", c_void_p),
        ("head", _Matrix),
    ]


class NativeStack:
    """Everything between the embedding and the logits, as `llama.Stack`, in native code.

    float32 and bfloat16 matrices are the model's own, not copies; levels of 8 bits too. Those of 4 bits are copied in another
    order.

    Args:
        model: a LlamaForCausalLM on a CPU that `refusal` finds nothing against.
    """

    def __init__(self, model: Any) -> None:
        self._code: Any = library()
        self._kept: list[Tensor] = []  # what the structures point to
        config, layers = model.config, model.model.layers[: model.config.num_hidden_layers]
        self._layers = (_Layer * len(layers))(*[self._layer(layer) for layer in layers])
        attention = layers[0].self_attn
        self._model = _Model(
            layers=len(layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=attention.head_dim,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            layer=self._layers,
            norm=self._keep(model.model.norm.weight.float()),
            head=self._matrix(model.lm_head),
        )
        self._vocabulary = self._model.head.outputs

    def hidden(self, x: Tensor, now: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The residual stream behind the last block, of embeddings x; both of shape (n, H). Writes n keys and values a layer."""
        x = x.clone()
        pointers = c_void_p * len(keys)
        with record_function("specdec::native_blocks"):
            self._code.specdec_hidden(
                ctypes.byref(self._model),
                x.data_ptr(),
                len(x),
                now.end - len(x),
                now.cos.data_ptr(),
                now.sin.data_ptr(),
                pointers(*[each.data_ptr() for each in keys]),
                pointers(*[each.data_ptr() for each in values]),
                keys[0].shape[1],
                torch.get_num_threads(),
            )
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Of the residual stream, shape (n, H), the logits, shape (n, V)."""
        x = x.contiguous()
        y = x.new_empty(len(x), self._vocabulary)
        with record_function("specdec::native_head"):
            threads = torch.get_num_threads()
            self._code.specdec_logits(ctypes.byref(self._model), x.data_ptr(), len(x), y.data_ptr(), threads)
        return y

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        matrices = {name: getattr(attention, f"{name}_proj") for name in ("q", "k", "v", "o")}
        matrices |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        return _Layer(
            attention_norm=self._keep(layer.input_layernorm.weight.float()),
            mlp_norm=self._keep(layer.post_attention_layernorm.weight.float()),
            **{name: self._matrix(matrix) for name, matrix in matrices.items()},
        )

    def _matrix(self, layer: Any) -> _Matrix:
        if isinstance(layer, Int4Linear):
            kind, group = INT4, layer.width
            weights, scales = _halves(layer), layer.scales.transpose(0, 1)
        elif isinstance(layer, Int8Linear):
            kind, group, weights, scales = INT8, 0, layer.weight, layer.scales.float()
        else:
            kind, group, weights, scales = FORMATS[layer.weight.dtype], 0, layer.weight, None
        outputs, columns = _shape(layer)
        return _Matrix(
            format=kind,
            outputs=outputs,
            columns=columns,
            group=group,
            weights=self._keep(weights),
            scales=None if scales is None else self._keep(scales),
            bias=None if layer.bias is None else self._keep(layer.bias.float()),
        )

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def refusal(model: Any) -> str | None:
    """What of a LlamaForCausalLM on a CPU native code does not run, or None."""
    if library() is None:
        return "a C++ compiler that makes specdec/native.cpp"
    if model.config.hidden_act != "silu":
        return "the activation silu"
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Int8Linear | Int4Linear):
            if isinstance(layer, nn.Linear) and layer.weight.dtype not in FORMATS:
                return "weights in float32, bfloat16, or Int8Linear and Int4Linear"
            if _shape(layer)[1] % BLOCK:
                return f"matrices whose inputs are a multiple of {BLOCK}"
    return None


def _shape(layer: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    outputs, columns = (layer.nibbles if isinstance(layer, Int4Linear) else layer.weight).shape
    return outputs, columns * 2 if isinstance(layer, Int4Linear) else columns


def _halves(layer: Int4Linear) -> Tensor:
    """The levels with the first half of each BLOCK in the lower four bits and the second above; shape (out, in / 2), uint8."""
    levels = torch.stack([layer.nibbles & 15, layer.nibbles >> 4], dim=-1).reshape(
        len(layer.nibbles), -1, 2, BLOCK // 2
    )
    return (levels[:, :, 0] | (levels[:, :, 1] << 4)).flatten(1)
