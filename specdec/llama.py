"""A Llama written out for one text at a time: what transformers computes, with less of Python around it.

The blocks are those of transformers' LlamaForCausalLM: RMSNorm, rotary positions, grouped-query attention, gated MLP. Weights,
rotary frequencies and the activation are the model's own. Beside batches and training it leaves out what the few rows of decoding
pay most for: layers that read the same input are joined into one, keys and values are written into buffers that stay, and angles
and masks are made once a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.cache import check_close, context_length
from specdec.errors import InputError, InvariantError
from specdec.kernels import Int4Linear
from specdec.native import NativeStack
from specdec.packed import decoding_linear
from specdec.quantize import Int8Linear

Run = nn.Module  # x, shape (n, in), float32 -> y, shape (n, out), float32
Linear = Callable[[Sequence[nn.Module]], Run]

LAYERS = (nn.Linear, Int4Linear, Int8Linear)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Others ("dynamic", "longrope") have other frequencies in a longer text, so that the keys in the cache would change.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
FIRST_CAPACITY = 256  # tokens that the buffers of keys and values hold at first
PART = (
    12  # blocks that are compiled at a time: each call costs as much as a matrix product, and each block half a second
)
LONGEST_PASS = 512  # tokens that attend at once; of a longer prompt the scores would take memory by its square


# How matrices run


def plain_linear(layers: Sequence[nn.Module]) -> Run:
    """F.linear on the joined weights of layers that read the same input; one alone shares the model's own weight.

    Args:
        layers: each nn.Linear or one of low bits (Int4Linear, Int8Linear), which runs as it does in its model, joined too.
            Weights of 16 bits get activations of 16 bits.

    Returns:
        x, shape (n, in), float32, to the layers' outputs side by side, shape (n, sum of out), float32.
    """
    return _run(layers, Matrix)


def packed_linear(layers: Sequence[nn.Module]) -> Run:
    """As `plain_linear`, but joined float32 weights run packed on a CPU (`decoding_linear`): always copies of the model's."""
    return _run(layers, decoding_linear)


class Matrix(nn.Module):
    """F.linear: weight of shape (out, in), bias of shape (out,) or None; both are kept, not copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)  # type: ignore[arg-type]


class _SideBySide(nn.Module):
    """The outputs of several layers, which share their input, one behind the other."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__()
        self.runs = nn.ModuleList(runs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([run(x) for run in self.runs], dim=-1)


class _In16Bits(nn.Module):
    """A layer whose activations have 16 bits, between others of float32."""

    def __init__(self, run: Run, dtype: torch.dtype) -> None:
        super().__init__()
        self.run, self.dtype = run, dtype

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(x.to(self.dtype)).float()
        return y


def _run(layers: Sequence[nn.Module], matrix: Callable[[Tensor, Tensor | None], Run]) -> Run:
    if len({_traits(layer) for layer in layers}) > 1:
        return _SideBySide([_run([layer], matrix) for layer in layers])
    first: Any = layers[0]
    if isinstance(first, nn.Linear):
        dtype, bias = first.weight.dtype, None if first.bias is None else _joined(layers, "bias")
        run = matrix(_joined(layers, "weight"), bias)
    else:
        dtype, run = first.scales.dtype, first if len(layers) == 1 else _joined_levels(layers)
    return run if dtype == torch.float32 else _In16Bits(run, dtype)


def _traits(layer: Any) -> tuple[Any, ...]:
    """What layers must share to be joined."""
    dtype = layer.weight.dtype if isinstance(layer, nn.Linear) else layer.scales.dtype
    return type(layer), layer.bias is None, dtype, getattr(layer, "width", None)


def _joined(layers: Sequence[Any], name: str, dim: int = 0) -> Tensor:
    tensors = [getattr(layer, name).detach() for layer in layers]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _joined_levels(layers: Sequence[nn.Module]) -> nn.Module:
    """One layer of low bits with the outputs of all; its levels, scales and biases are copies."""
    joined = copy.deepcopy(layers[0])
    for name, _ in layers[0].named_buffers():
        in_columns = isinstance(joined, Int4Linear) and name == "scales"  # shape (groups, out, 2)
        setattr(joined, name, _joined(layers, name, dim=1 if in_columns else 0))
    return joined


# The model


@dataclass(frozen=True)
class Pass:
    """What all blocks share in one pass over n tokens, which stand at start ≤ position < end.

    Args:
        positions: shape (n,), from start on.
        end: what lies in the buffers of keys and values from here on is not read.
        cos, sin: of the rotary angles, shape (n, D); the sines of the first half negative.
        mask: what is added to the scores, shape (group · n, end): −∞ where the key is later than the query, else 0.
    """

    positions: Tensor
    end: int
    cos: Tensor
    sin: Tensor
    mask: Tensor


class Norm(nn.Module):
    """RMSNorm in float32, of the last dimension."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.register_buffer("weight", norm.weight.detach().float())
        self.eps: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return functional.rms_norm(x, weight.shape, weight, self.eps)


class Block(nn.Module):
    """A decoder block, of `heads` query heads that share `kv_heads` keys and values (group = heads / kv_heads), all D wide."""

    def __init__(self, layer: Any, linear: Linear) -> None:
        super().__init__()
        attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.width: int = attention.head_dim
        self.attention_norm = Norm(layer.input_layernorm)
        self.qkv = linear([_layer(attention, name) for name in ("q_proj", "k_proj", "v_proj")])
        self.attention_out = linear([_layer(attention, "o_proj")])
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.gate_up = linear([_layer(mlp, name) for name in ("gate_proj", "up_proj")])
        self.activation = mlp.act_fn
        self.down = linear([_layer(mlp, "down_proj")])

    def forward(self, x: Tensor, now: Pass, keys: Tensor, values: Tensor) -> Tensor:
        """x: shape (n, H). Writes the n entries of keys and values, each (kv_heads, capacity, D); returns shape (n, H)."""
        x = x + self.attention_out(self._attend(self.qkv(self.attention_norm(x)), now, keys, values))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        y: Tensor = x + self.down(self.activation(gate) * up)
        return y

    def _attend(self, qkv: Tensor, now: Pass, keys: Tensor, values: Tensor) -> Tensor:
        """qkv: shape (n, (heads + 2 kv_heads) · D); returns shape (n, heads · D)."""
        rows = len(qkv)
        heads = qkv.view(rows, -1, self.width).transpose(0, 1)  # (heads + 2 kv_heads, n, D)
        turned = _rotate(heads[: self.heads + self.kv_heads], now.cos, now.sin)
        keys.index_copy_(1, now.positions, turned[self.heads :])
        values.index_copy_(1, now.positions, heads[self.heads + self.kv_heads :])
        # The queries that share their keys are rows of one product: (kv_heads, group · n, D).
        queries = turned[: self.heads].reshape(self.kv_heads, -1, self.width) * self.width**-0.5
        past = keys[:, : now.end].transpose(1, 2)
        scores = torch.baddbmm(now.mask, queries, past)
        seen = torch.bmm(scores.softmax(dim=-1), values[:, : now.end])
        return seen.view(self.heads, rows, self.width).transpose(0, 1).reshape(rows, -1)


class Stack(nn.Module):
    """Everything between the embedding and the logits.

    Args:
        compiled: whether torch.compile makes code for the blocks, up to PART at a time: for one token, and for more, of which it
            serves any number; both behind any context. All parts share it. It takes tens of seconds, and less when torch has it
            on disk.
    """

    def __init__(self, model: Any, linear: Linear, compiled: bool) -> None:
        super().__init__()
        layers = model.model.layers[: model.config.num_hidden_layers]
        self.blocks = nn.ModuleList(Block(layer, linear) for layer in layers)
        self.norm = Norm(model.model.norm)
        self.head = linear([_layer(model, "lm_head")])
        self._part = next(size for size in range(min(PART, len(layers)), 0, -1) if len(layers) % size == 0)
        self._forward: Blocks = _compiled(f"blocks_of_{id(self)}") if compiled else _through

    def hidden(self, x: Tensor, now: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The residual stream behind the last block, of embeddings x; both of shape (n, H)."""
        # Code made for the first pass of a text, where each token sees as many as there are, would serve no other.
        forward = _through if now.end == len(x) else self._forward
        for start in range(0, len(self.blocks), self._part):
            part = slice(start, start + self._part)
            x = forward(list(self.blocks[part]), x, now, keys[part], values[part])  # type: ignore[arg-type]
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Of the residual stream, shape (n, H), the logits, shape (n, V)."""
        y: Tensor = self.head(self.norm(x))
        return y


def _through(blocks: Sequence[Block], x: Tensor, now: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The residual stream behind some blocks."""
    for block, of_keys, of_values in zip(blocks, keys, values, strict=True):
        x = block(x, now, of_keys, of_values)
    return x


Blocks = Callable[[Sequence[Block], Tensor, Pass, Sequence[Tensor], Sequence[Tensor]], Tensor]


def _compiled(name: str) -> Blocks:
    """`_through` compiled for one decoder, by a name of its own.

    torch makes so many versions of one code and then quietly runs it as it is. A code of another name has its versions to itself;
    and should they be too many all the same, that is an error (fullgraph).
    """
    own = FunctionType(_through.__code__.replace(co_name=name), _through.__globals__, name)
    compiled: Blocks = torch.compile(own, dynamic=True, fullgraph=True)
    return compiled


class LlamaDecoder:
    """A Llama to decode one text at a time.

    The residual stream, norms, attention and logits are float32, whatever the weights are. Layers of low bits and matrices of 16
    bits get activations of 16 bits, and nothing else does; in a bfloat16 copy that transformers runs, everything does.

    Memory: the embedding, the norms and the layers that `linear` neither joins nor packs are shared with the model; the rest is
    copied. With `plain_linear` that is q, k, v, gate and up; with `packed_linear` every float32 matrix, of which a tied head is a
    second copy of the embedding. The model itself is not kept: what was copied exists twice only as long as the caller keeps the
    model. Rotary tables take 8 · D bytes for each position that texts have reached (D: width of a head), and each open cache
    layers · kv_heads · D · 8 bytes for each token of its capacity.

    Args:
        model: transformers' LlamaForCausalLM, on one device, which is not to be changed afterwards.
        linear: how matrices run, see `plain_linear`. It is called once for each of [q, k, v], [o], [gate, up], [down] of each
            block, and for [head].
        compiled: whether torch.compile makes code for the blocks, see `Stack`. It needs a C++ compiler.
        native: whether blocks and head are native code (specdec/native.py), which takes the place of `linear`.

    Raises:
        InputError: another class, training mode, more than one device, another dtype than DTYPES, rotary positions of a kind that
            depends on the length of the text, or layers other than LAYERS.
    """

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype  # of the model's parameters

    def __init__(
        self, model: PreTrainedModel, linear: Linear = plain_linear, *, compiled: bool = False, native: bool = False
    ) -> None:
        _check_model(model)
        base: Any = model.model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.context = context_length(model)
        self.embedding: Tensor = base.embed_tokens.weight.detach()
        attention = base.layers[0].self_attn
        self.layers: int = model.config.num_hidden_layers
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads
        self.width: int = attention.head_dim
        self.stack: Any = NativeStack(model) if native else Stack(model, linear, compiled).eval()
        self.rotary = _Rotary(base.rotary_emb, self.context)

    def open(self) -> LlamaCache:
        """An empty cache, to feed one text to. Caches of one decoder know nothing of one another."""
        return LlamaCache(self)


class LlamaCache:
    """A LlamaDecoder and the keys and values of what it has been fed; batch size 1. It offers what `CachedModel` does.

    Invariant: the first `length` entries of each layer are those of the tokens fed and not rolled back. What lies behind them is
    left from what was rolled back, and is overwritten before it is read.
    """

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._decoder = decoder
        # Of each layer, shape (kv_heads, capacity, D), float32; rotated keys.
        self._keys = [
            torch.empty(decoder.kv_heads, 0, decoder.width, device=decoder.device) for _ in range(decoder.layers)
        ]
        self._values = [keys.clone() for keys in self._keys]
        self.length = 0

    @property
    def room(self) -> int:
        """How many more tokens fit into the model's context."""
        return self._decoder.context - self.length

    @torch.inference_mode()
    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        """Feed tokens, shape (n,), and return the logits after the last `keep` of them (default: all), shape (keep, V), float32.

        Raises:
            InputError: no token, or more than there is room for.
        """
        if not 1 <= len(tokens) <= self.room:
            raise InputError(f"{len(tokens)} tokens were fed to a cache of {self.length}; allowed: 1 to {self.room}")
        model, keep = self._decoder, len(tokens) if keep is None else keep
        embedded = functional.embedding(tokens.to(model.device), model.embedding).float()
        x = torch.cat([self._feed(part) for part in embedded.split(LONGEST_PASS)])
        return model.stack.logits(x[-keep:])

    def _feed(self, x: Tensor) -> Tensor:
        """Feed the embeddings of n tokens, shape (n, H), and return the residual stream behind the last block, shape (n, H)."""
        now = self._pass(len(x))
        x = self._decoder.stack.hidden(x, now, self._keys, self._values)
        self.length = now.end
        return x

    def _pass(self, rows: int) -> Pass:
        """The next pass over so many tokens, with room made for their keys and values."""
        start, end = self.length, self.length + rows
        self._reserve(end)
        cos, sin = self._decoder.rotary.tables(start, end)
        later = torch.full((rows, end), float("-inf"), device=cos.device).triu_(start + 1)
        mask = later.repeat(self._decoder.heads // self._decoder.kv_heads, 1)
        return Pass(torch.arange(start, end, device=cos.device), end, cos, sin, mask)

    def _reserve(self, length: int) -> None:
        """Make room for so many entries; doubling, so that of a long text few entries are copied often."""
        if length <= self._keys[0].shape[1]:
            return
        capacity = _capacity(length, self._decoder.context)
        for buffers in (self._keys, self._values):
            for index, old in enumerate(buffers):
                buffers[index] = old.new_empty(old.shape[0], capacity, old.shape[2])
                buffers[index][:, : self.length] = old[:, : self.length]

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens fed."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} tokens back to {length}")
        self.length = length

    @torch.inference_mode()
    def check(self, text: Tensor, tolerance: float = 1e-3) -> None:
        """For debugging: is this cache what one pass of this decoder over `text`, shape (n,), would have left?

        Compares the length, every key and value (rotated keys show the position of each token), and the logits that one more
        token gets from this cache with those of one pass over everything. It judges the cache, not the decoder: whether that
        computes what transformers does only the model itself can tell, which a decoder does not keep. What the cache holds does
        not change.

        Args:
            tolerance: of each number with float32 weights; with others as for `CachedModel.check`.

        Raises:
            InvariantError: naming what differs.
        """
        if self.length != len(text):
            raise InvariantError(f"the cache of {len(text)} tokens has the lengths [{self.length}]")
        if self.length == 0:
            return
        fresh = self._decoder.open()
        fresh.forward(text, keep=1)
        for name, ours, theirs in (("keys", self._keys, fresh._keys), ("values", self._values, fresh._values)):
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                of_layer = f"{name} of layer {index}"
                self._compare(of_layer, one[:, : self.length], other[:, : self.length], tolerance)
        if self.room < 1:  # a draft's context may be full
            return
        cached = self.forward(text[:1], keep=1)
        self.rollback(len(text))
        uncached = self._decoder.open().forward(torch.cat([text, text[:1]]), keep=1)
        self._compare("logits of the next token", cached, uncached, tolerance)

    def _compare(self, name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
        dtype = self._decoder.dtype  # says how coarsely both were computed
        check_close(name, ours.to(dtype), theirs.to(dtype), tolerance)


# Its parts


class _Rotary:
    """Cosines and sines for each position, by the model's own frequencies; made for the positions asked for, and kept."""

    def __init__(self, module: Any, context: int) -> None:
        self._frequencies: Tensor = module.inv_freq.detach().float().clone()
        self._scale = float(module.attention_scaling)
        self._context = context
        self._cos = self._sin = self._frequencies.new_empty(0, 2 * len(self._frequencies))

    def tables(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Of start ≤ position < end, each of shape (end − start, D); the sines of the first half negative, see `_rotate`."""
        if end > len(self._cos):
            positions = torch.arange(_capacity(end, self._context), device=self._frequencies.device)
            # The angles are the model's, in float32. Their cosines are not taken in it: on a loaded CPU torch has been seen to
            # give coarse ones, once in dozens of processes, and a table would keep them. In float64 there are digits to spare.
            angles = (positions[:, None].float() * self._frequencies).cpu().double()
            cos, sin = ((turn * self._scale).to(self._frequencies) for turn in (angles.cos(), angles.sin()))
            self._cos, self._sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return self._cos[start:end], self._sin[start:end]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each entry i of the first half of D and the one D/2 behind it by an angle; heads: shape (..., n, D)."""
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat([heads[..., half:], heads[..., :half]], dim=-1) * sin


def _capacity(length: int, context: int) -> int:
    """The size of a buffer for so many entries: doubled from FIRST_CAPACITY, never beyond the context."""
    return min(context, max(FIRST_CAPACITY, 1 << (length - 1).bit_length()))


def _layer(parent: nn.Module, name: str) -> nn.Module:
    layer: nn.Module = getattr(parent, name)
    if type(layer) not in LAYERS:
        allowed = ", ".join(kind.__name__ for kind in LAYERS)
        raise InputError(f"{name} is a {type(layer).__name__}; allowed: {allowed}")
    return layer


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if type(model) is not LlamaForCausalLM:
        raise InputError(f"{name} is not written out here; allowed: exactly LlamaForCausalLM")
    if model.training:
        raise InputError(f"{name} is in training mode; allowed: models after .eval()")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise InputError(f"{name} is spread over {', '.join(devices)}; allowed: one device")
    if model.dtype not in DTYPES:
        raise InputError(f"{name} has parameters in {model.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    kind = model.model.rotary_emb.rope_type
    if kind not in ROTARY_KINDS:
        raise InputError(
            f"{name} has rotary positions of the kind {kind!r}, which may depend on the length of the text; allowed: "
            f"{', '.join(ROTARY_KINDS)}"
        )
