"""Where a kernel can run: on this GPU, in Triton's interpreter, or nowhere (then references and
torch run).

Does not depend on any operation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from contextlib import AbstractContextManager
from typing import Literal

import torch

Mode = Literal["gpu", "interpret", "reference"]

HAS_TRITON: bool = importlib.util.find_spec("triton") is not None
# Triton reads the variable when a kernel is decorated, so later changes have no effect.
INTERPRET: bool = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Bytes of shared memory that one program may use (CUDA programming guide, table "technical
# specifications", less the 1 KiB that each block reserves). Unlisted architectures get the
# smallest.
_SHARED_MEMORY_BYTES = {
    "sm_75": 65_536,
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
}


def mode(location: torch.Tensor | torch.device) -> Mode:
    """How an own kernel would run on this tensor's device; "reference" if it cannot run."""
    device = location.device if isinstance(location, torch.Tensor) else location
    if not HAS_TRITON:
        return "reference"
    if device.type == "cpu":
        return "interpret" if INTERPRET else "reference"
    return "gpu" if device.type == "cuda" and _has_gpu() and not INTERPRET else "reference"


def why_not(
    location: torch.Tensor | torch.device, *other_tensors: torch.Tensor | None
) -> str | None:
    """The reason why an own kernel cannot run there; None if it can. `other_tensors`: further
    tensors of the call.
    """
    for x in (location, *other_tensors):
        if isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, torch.nn.Parameter):
            # DTensor, FakeTensor, …
            return f"{type(x).__name__} is not a plain tensor"
    if mode(location) != "reference":
        return None
    device = location.device if isinstance(location, torch.Tensor) else location
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu":
        return "a CPU tensor, and TRITON_INTERPRET is not set"
    if INTERPRET:
        return "this process interprets kernels, which excludes GPU tensors"
    return f"no Triton kernels for {device.type} devices"


def device_key(device: torch.device) -> int:
    """The device's index, or the current device's if the device has no index."""
    return device.index if device.index is not None else torch.cuda.current_device()


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None


@functools.cache
def _device_arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch(device: torch.device | None = None) -> str:
    """The architecture to choose kernels for: "sm_90", "interpret", or "cpu" without either."""
    if INTERPRET:
        return "interpret"
    if not _has_gpu() or (device is not None and device.type != "cuda"):
        return "cpu"
    return _device_arch(device_key(device) if device is not None else torch.cuda.current_device())


def has_fp8(arch: str) -> bool:
    """Whether Triton supports e4m3: from sm_89 on, and in the interpreter."""
    return arch == "interpret" or (arch.startswith("sm_") and int(arch[3:]) >= 89)


@functools.cache
def _device_sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(device: torch.device | None = None) -> int:
    """Streaming multiprocessors of the device; 4 in the interpreter, which runs programs in
    sequence.
    """
    if INTERPRET or not _has_gpu() or (device is not None and device.type != "cuda"):
        return 4
    return _device_sm_count(
        device_key(device) if device is not None else torch.cuda.current_device()
    )


def shared_memory_limit(arch: str) -> int:
    """Bytes of shared memory that one program may use on this architecture."""
    return _SHARED_MEMORY_BYTES.get(arch, min(_SHARED_MEMORY_BYTES.values()))


def is_capturing(location: torch.Tensor | torch.device) -> bool:
    """Whether a CUDA graph is being captured on this device: values cannot be read then, and copies
    run at replays only.
    """
    device = location.device if isinstance(location, torch.Tensor) else location
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current for a launch; Triton launches on the current device
    only.
    """
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
