"""How a model's matrices run, by name: the kernels that target, plain decoding and draft of one comparison share.

- `default`: transformers' forward.
- `joined`: a Llama written out for one text at a time, with layers that read the same input joined into one (specdec/llama.py).
- `packed`: the same with float32 matrices in oneDNN's own order; a model of another class is transformers' with its linear layers
  packed (specdec/packed.py). On a CPU.

Layers of low bits (Int4Linear, Int8Linear) have kernels of their own in each of these: `joined` and `packed` are one for them. No
kernel changes what is computed, but for the order of sums and, with weights of 16 bits or fewer, for activations that are
rounded less often.
"""

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from specdec.cache import Model
from specdec.errors import InputError
from specdec.kernels import Int4Linear
from specdec.llama import LlamaDecoder, packed_linear, plain_linear
from specdec.packed import packed_copy, packs
from specdec.quantize import Int8Linear

KERNELS = ("default", "joined", "packed")


def runner(model: PreTrainedModel, kernels: str, *, draft: bool = False) -> Model:
    """The model as it decodes with these kernels. With `default` it is the model itself; else it holds copies of matrices.

    Args:
        model: in eval mode, and not to be changed afterwards.
        kernels: one of KERNELS.
        draft: a draft in 16 bits has no matrix to pack, and beside a packed target it runs as with `joined`. A target would only
            be called packed, so it is refused.

    Raises:
        InputError: an unknown name, a model that these kernels do not run, or one that LlamaDecoder or `packed_copy` refuses.
    """
    if kernels not in KERNELS:
        raise InputError(f"kernels is {kernels!r}; allowed: {', '.join(KERNELS)}")
    if kernels == "default":
        return model
    is_llama, name = type(model) is LlamaForCausalLM, type(model).__name__
    packable = packs(next(model.parameters()))
    bits_of_its_own = any(isinstance(layer, Int4Linear | Int8Linear) for layer in model.modules())
    if bits_of_its_own or (kernels == "packed" and draft and model.dtype in (torch.bfloat16, torch.float16)):
        return LlamaDecoder(model, plain_linear) if is_llama else model
    if kernels == "packed":
        if not packable:
            others = "default, joined" if is_llama else "default"
            raise InputError(
                f"kernels is 'packed' for a {name} in {model.dtype} on {model.device}; allowed: {others}, or float32 on a CPU "
                "with oneDNN"
            )
        return LlamaDecoder(model, packed_linear) if is_llama else packed_copy(model)
    if not is_llama:
        others = "default, packed" if packable else "default"
        raise InputError(f"kernels is 'joined' for a {name}; allowed: {others}, or a LlamaForCausalLM")
    return LlamaDecoder(model, plain_linear)
