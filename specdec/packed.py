"""How a float32 matrix runs on a CPU: with its entries in oneDNN's own order, packed.

With few rows, as in decoding, reading the matrix is nearly the whole cost, and the order decides how fast it is read. Nothing is
rounded: the products are those of `torch.nn.functional.linear`, summed in another order.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.errors import InputError

# torch.compile cannot look into a packed matrix, nor keep code on disk that takes one as an argument. In compiled code its
# product is therefore an operation of its own, which is told a number and finds the layer by it.
_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = itertools.count()
_LIBRARY = torch.library.Library("specdec", "DEF")
_LIBRARY.define("packed_linear(Tensor x, Tensor number, int outputs) -> Tensor")


@torch.library.impl(_LIBRARY, "packed_linear", "CPU")
def _product_of(x: Tensor, number: Tensor, outputs: int) -> Tensor:
    y: Tensor = _LAYERS[int(number)].product(x)
    return y


@torch.library.register_fake("specdec::packed_linear", lib=_LIBRARY)
def _shape_of_product(x: Tensor, number: Tensor, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _numbered(layer: nn.Module) -> Tensor:
    """A number for compiled code to find the layer by, as long as that lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number)


def packs(weight: Tensor) -> bool:
    """Whether a matrix can be packed here: float32, on a CPU, in a torch with oneDNN."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W packed, to infer with: no gradient passes.

    The packed matrix is the only one kept, as the buffer `weight`, an opaque tensor that has a shape and a size but no entries to
    read; `dense` gives those. What leaves the module (`state_dict`, a pickle) is the matrix in its plain order, and what comes in
    (`load_state_dict`, `.to`) is packed anew. A packed matrix is never written to, so that deep copies share it.

    Where there is nothing to pack (another dtype or device, or a torch without oneDNN) the matrix that was given is kept, not
    copied, and F.linear runs on it.

    Args:
        weight: shape (out, in).
        bias: shape (out,) or None; kept, not copied.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._pack()

    def forward(self, x: Tensor) -> Tensor:
        """x: shape (..., in), of the weight's dtype; returns shape (..., out).

        Raises:
            InputError: packed, and x is not float32, not on a CPU, or of another width. (oneDNN does not say which.)
        """
        if not self.is_packed:
            return functional.linear(x, self.weight, self.bias)
        if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1] != self.in_features:
            raise InputError(
                f"a packed matrix got {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)} on {x.device}; "
                f"allowed: float32 of shape (..., {self.in_features}) on the CPU"
            )
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.specdec.packed_linear(x, self.number, self.out_features)
            return y
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Of a packed matrix."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def dense(self) -> Tensor:
        """The matrix in its plain order, shape (out, in); a copy where it is packed."""
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, packed={self.weight.is_mkldnn}"

    def _pack(self) -> None:
        self.number = _numbered(self)
        self.is_packed = packs(self.weight)  # what torch.compile sees of the matrix does not tell
        if self.is_packed:
            # None: no number of rows to tune for. The fastest over 1 to 9 rows, and it need not be known before.
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)

    # What nn.Module does with its tensors, it does with the dense matrix.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedLinear:
        self.weight = self.dense()
        super()._apply(fn, recurse)
        self._pack()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.dense()

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.weight = self.dense()
        super()._load_from_state_dict(*arguments, **options)
        self._pack()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffers": {**self._buffers, "weight": self.dense()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        clone = memo[id(self)] = type(self).__new__(type(self))
        if self.weight.is_mkldnn:
            memo[id(self.weight)] = self.weight.detach()
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        clone.number = _numbered(clone)
        return clone


class DecodingLinear(nn.Module):
    """y = x Wᵀ + b with W packed twice: in MKL's order for one row, in oneDNN's for more. To infer with, and not to be moved.

    Each is the faster one at its own on the CPU that this was written on; stage `cost_curve` shows what comes of both. It takes
    twice the memory of W.

    Args:
        weight: shape (out, in); not kept.
        bias: shape (out,) or None; kept, not copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.rows = PackedLinear(weight, bias)
        self.bias = bias
        # MKL's product reads the shape of the matrix from a plain one. This is a plain one without its entries.
        self.like = weight.new_zeros(1).expand(weight.shape)
        self.row = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), 1)
        self.number = _numbered(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: shape (n, in), float32; returns shape (n, out)."""
        if len(x) > 1:
            y: Tensor = self.rows(x)
            return y
        if torch.compiler.is_compiling():
            return torch.ops.specdec.packed_linear(x, self.number, len(self.like))
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Of one row."""
        y: Tensor = torch.ops.mkl._mkl_linear(x, self.row, self.like, self.bias, 1)
        return y


def decoding_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A DecodingLinear where there is MKL and something to pack, else a PackedLinear."""
    return (DecodingLinear if packs(weight) and torch.backends.mkl.is_available() else PackedLinear)(weight, bias)


@torch.no_grad()
def packed_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a causal language model, to infer with, whose linear layers, the LM head included, run packed.

    Beside the model it needs the memory of its packed matrices and its embeddings: no plain copy of a matrix is made on the way,
    but one of GPT-2's at a time. Embeddings are looked up and stay plain; one that is tied to the head remains as it is, so that
    the head becomes a second copy of it. Where nothing can be packed (see `packs`) the copy's layers run as before.

    The packed matrices are buffers, not parameters: `count_parameters` of the copy leaves them out.

    Raises:
        InputError: a matrix that would stay as it is, in a layer of another kind than nn.Linear and GPT-2's Conv1D.
    """
    _check_complete(model)
    # Until they are packed one by one, the copy borrows the matrices of the model; not those that remain, as a tied embedding.
    kept = {id(p) for m in model.modules() if not _is_linear(m) for p in m.parameters(recurse=False)}
    weights: list[Any] = [module.weight for module in model.modules() if _is_linear(module)]
    clone = copy.deepcopy(model, {id(w): w for w in weights if packs(w) and id(w) not in kept})
    for name, layer in [(n, m) for n, m in clone.named_modules() if _is_linear(m)]:
        weight: Any = layer.weight
        bias: Any = layer.bias
        clone.set_submodule(name, PackedLinear(weight.T.contiguous() if isinstance(layer, Conv1D) else weight, bias))
    return clone


def _is_linear(module: nn.Module) -> bool:
    """Exactly these types: what is derived from them may compute something else."""
    return type(module) in (nn.Linear, Conv1D)


def _check_complete(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if _is_linear(module) or isinstance(module, nn.Embedding | PackedLinear):
            continue
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        # Of buffers those with levels of few bits; others are masks and tables.
        matrices = [n for n, t in tensors if t.dim() > 1 and (isinstance(t, nn.Parameter) or _is_levels(t))]
        if matrices:
            raise InputError(
                f"{type(model).__name__} has a matrix that would not be packed ({name}.{matrices[0]}, of "
                f"{type(module).__name__}); allowed: matrices in nn.Linear, Conv1D and embeddings"
            )


def _is_levels(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.int8, torch.uint8)
