"""Whether a model fits into memory, asked before any weight is read: a swapping machine or a killed process explains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import psutil
import torch

from specdec.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPREAD: Final = "spread"  # over all GPUs, then main memory
Placement = torch.device | Literal["spread"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that tensors can still take on a device: what the system reports, and no more than a container's limit."""
    if device.type == "cuda":
        # What torch holds and does not use is ours as well, though the driver calls it taken.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    memory = psutil.virtual_memory()
    # macOS compresses or writes out everything that is not wired; it calls only a small part of that available.
    free = memory.total - memory.wired if hasattr(memory, "wired") else memory.available
    return min([free, *_cgroup_rooms()])


def require_memory(what: str, parameters: int, dtype: torch.dtype, device: Placement, free: int | None = None) -> None:
    """Refuse a model whose weights do not fit, and say what would.

    Only the weights are counted; cache and activations of one text are small beside them.

    Args:
        what: begins the sentence, as "The model models/big".
        parameters: those that are stored, so that tied ones count once.
        free: bytes; default: what `device` has now, "spread" being all cuda devices and main memory together.

    Raises:
        InputError: the weights take more than is free; exactly as much fits.
    """
    free = _free(device) if free is None else free
    needed = parameters * dtype.itemsize
    if needed <= free:
        return
    smaller = [name for name, other in DTYPES.items() if parameters * other.itemsize <= free]
    if smaller:
        remedies = [f"{' or '.join(smaller)} ({_gb(parameters * DTYPES[smaller[0]].itemsize)})"]
    else:
        most = [f"{free // other.itemsize:,} in {name}" for name, other in DTYPES.items()]
        remedies = [f"at most so many parameters: {', '.join(most)}"]
    kind = device if isinstance(device, str) else device.type
    elsewhere = {"cuda": "the device cpu or spread", "mps": "the device cpu", SPREAD: "a machine with more memory"}
    remedies += ["closing other programs", f"or {elsewhere.get(kind, 'another device')}"]
    raise InputError(
        f"{what} has {parameters:,} parameters of {dtype.itemsize} bytes, which is {_gb(needed)} in "
        f"{str(dtype).removeprefix('torch.')}, with {_gb(free)} free on {_place(device)}; what would help: {'; '.join(remedies)}."
    )


def _free(device: Placement) -> int:
    if isinstance(device, torch.device):
        return free_memory(device)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return sum(free_memory(one) for one in (*gpus, torch.device("cpu")))


def _place(device: Placement) -> str:
    return str(device) if isinstance(device, torch.device) else "all GPUs and in main memory"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _cgroup_rooms() -> list[int]:
    """Bytes that each memory limit above this process leaves: containers and job schedulers set them (Linux, cgroup v2).

    A process may take what the limit leaves and what the cached files hold, which the kernel drops first.
    """
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    rooms = []
    # In a container its own group is usually the root; elsewhere a limit of any group on the way up holds too.
    for group in (_CGROUPS / own, *(_CGROUPS / parent for parent in Path(own).parents)):
        try:
            limit = (group / "memory.max").read_text(encoding="utf-8").strip()
            used = int((group / "memory.current").read_text(encoding="utf-8"))
            lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue  # the system's root has no limit
        if limit != "max":
            stat = dict(line.split() for line in lines)
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            rooms.append(max(0, int(limit) - used + cached))
    return rooms
