"""How a model's matrices run, by name: the kernels that target, plain decoding and draft of one comparison share.

- `default`: transformers' forward.
- `joined`: a Llama written out for one text at a time, with layers that read the same input joined into one (specdec/llama.py).
- `packed`: the same with float32 matrices in oneDNN's own order; a model of another class is transformers' with its linear layers
  packed (specdec/packed.py). On a CPU.
- `compiled`: a Llama as with `packed`, and what lies between the matrices is code that torch.compile makes. On a CPU, with a C++
  compiler.
- `native`: a Llama whose blocks and head are one piece of C++ (specdec/native.py). On a CPU, with a C++ compiler. A token's
  logits are the same to the last bit however many tokens are fed with it.

Layers of low bits (Int4Linear, Int8Linear) have kernels of their own in each of these: `joined` and `packed` are one for them. No
kernel changes what is computed, but for the order of sums and, with weights of 16 bits or fewer, for activations that are
rounded less often.
"""

from functools import cache

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from specdec import native
from specdec.cache import Model
from specdec.errors import InputError
from specdec.kernels import Int4Linear
from specdec.llama import LlamaDecoder, packed_linear, plain_linear
from specdec.packed import packed_copy, packs
from specdec.quantize import Int8Linear

KERNELS = ("default", "joined", "packed", "compiled", "native")


def fastest(model: PreTrainedModel) -> str:
    """The kernels with the most tokens per second, as far as was measured: of native, compiled, packed the first that runs."""
    if type(model) is LlamaForCausalLM and model.device.type == "cpu" and model.dtype != torch.float64:
        if native.refusal(model) is None:
            return "native"
        if compiles():
            return "compiled"
    return "packed" if packs(next(model.parameters())) else "default"


@cache
def compiles() -> bool:
    """Whether torch.compile works on this CPU: it needs a C++ compiler and Python's headers. Tried once, with one addition."""
    try:
        torch.compile(_successor)(torch.zeros(1))
    except Exception:  # what is missing shows in many ways, and none of them is a fault of the caller
        return False
    return True


def _successor(x: Tensor) -> Tensor:
    return x + 1


def runner(model: PreTrainedModel, kernels: str, *, draft: bool = False) -> Model:
    """The model as it decodes with these kernels. With `default` it is the model itself; else it holds copies of matrices.

    Args:
        model: in eval mode, and not to be changed afterwards.
        kernels: one of KERNELS.
        draft: a draft in 16 bits has no matrix to pack, and beside a packed target it runs as with `joined`. A target would only
            be called packed, so it is refused. A draft that is neither to be compiled nor for native code runs as with `packed`.

    Raises:
        InputError: an unknown name, a model that these kernels do not run, or one that LlamaDecoder or `packed_copy` refuses.
    """
    if kernels not in KERNELS:
        raise InputError(f"kernels is {kernels!r}; allowed: {', '.join(KERNELS)}")
    if kernels == "default":
        return model
    is_llama, packable = type(model) is LlamaForCausalLM, packs(next(model.parameters()))
    if kernels == "compiled":
        if is_llama and model.device.type == "cpu" and compiles():
            return LlamaDecoder(model, packed_linear if packable else plain_linear, compiled=True)
        if not draft:
            raise InputError(_refusal(model, kernels, packable, "a LlamaForCausalLM on a CPU with a C++ compiler"))
        kernels = "packed"
    if kernels == "native":
        needs = native.refusal(model) if is_llama and model.device.type == "cpu" else "a LlamaForCausalLM on a CPU"
        if needs is None:
            return LlamaDecoder(model, native=True)
        if not draft:
            raise InputError(_refusal(model, kernels, packable, needs))
        kernels = "packed"
    bits_of_its_own = any(isinstance(layer, Int4Linear | Int8Linear) for layer in model.modules())
    if bits_of_its_own or (kernels == "packed" and draft and model.dtype in (torch.bfloat16, torch.float16)):
        return LlamaDecoder(model, plain_linear) if is_llama else model
    if kernels == "packed":
        if not packable:
            raise InputError(_refusal(model, kernels, packable, "float32 on a CPU with oneDNN"))
        return LlamaDecoder(model, packed_linear) if is_llama else packed_copy(model)
    if not is_llama:
        raise InputError(_refusal(model, kernels, packable, "a LlamaForCausalLM"))
    return LlamaDecoder(model, plain_linear)


def _refusal(model: PreTrainedModel, kernels: str, packable: bool, what_runs: str) -> str:
    name = type(model).__name__
    others = ["default", *(["joined"] if type(model) is LlamaForCausalLM else []), *(["packed"] if packable else [])]
    allowed = ", ".join(other for other in others if other != kernels)
    return f"kernels is {kernels!r} for a {name} in {model.dtype} on {model.device}; allowed: {allowed}, or {what_runs}"
