"""Where a kernel can run: on this GPU, in Triton's interpreter, or not at all (then references and
torch's own).

Knows devices and limits; knows no operation.
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
# Triton reads the variable when a kernel is decorated, so a later change has no effect here either.
INTERPRET: bool = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Bytes of shared memory that one program may ask for (CUDA programming guide, table "technical
# specifications",
# less the 1 KiB a block reserves); architectures that are not listed get the smallest.
_SHARED_MEMORY_BYTES = {
    "sm_75": 65_536,
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
}


def mode(location: torch.Tensor | torch.device) -> Mode:
    """How an own kernel would run on this tensor's device; "reference" when it cannot."""
    device = location.device if isinstance(location, torch.Tensor) else location
    if not HAS_TRITON:
        return "reference"
    if device.type == "cpu":
        return "interpret" if INTERPRET else "reference"
    return "gpu" if device.type == "cuda" and _has_gpu() and not INTERPRET else "reference"


def why_not(
    location: torch.Tensor | torch.device, *other_tensors: torch.Tensor | None
) -> str | None:
    """Why an own kernel cannot run there, in words; None when it can.

    `other_tensors`: further tensors of the call.
    """
    for x in (location, *other_tensors):
        if isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, torch.nn.Parameter):
            # DTensor, FakeTensor, …
            return f"a {type(x).__name__}, whose numbers a kernel does not see"
    if mode(location) != "reference":
        return None
    device = location.device if isinstance(location, torch.Tensor) else location
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu":
        return "a CPU tensor, and no interpreter was asked for"
    if INTERPRET:
        return "the process interprets kernels, so a GPU tensor has none"
    return f"no Triton kernels for {device.type} devices here"


def device_key(device: torch.device) -> int:
    """The device's index; the current one where the device names none."""
    return device.index if device.index is not None else torch.cuda.current_device()


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None


@functools.cache
def _device_arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch(device: torch.device | None = None) -> str:
    """The architecture kernels are chosen for: "sm_90", "interpret", or "cpu" where neither exists."""
    if INTERPRET:
        return "interpret"
    if not _has_gpu() or (device is not None and device.type != "cuda"):
        return "cpu"
    return _device_arch(device_key(device) if device is not None else torch.cuda.current_device())


def has_fp8(arch: str) -> bool:
    """If Triton's e4m3 exists there: from sm_89 on, and in the interpreter."""
    return arch == "interpret" or (arch.startswith("sm_") and int(arch[3:]) >= 89)


@functools.cache
def _device_sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(device: torch.device | None = None) -> int:
    """Streaming multiprocessors of the device; 4 in the interpreter, where programs run one after
    the other.
    """
    if INTERPRET or not _has_gpu() or (device is not None and device.type != "cuda"):
        return 4
    return _device_sm_count(
        device_key(device) if device is not None else torch.cuda.current_device()
    )


def shared_memory_limit(arch: str) -> int:
    """Bytes of shared memory one program may use on this architecture."""
    return _SHARED_MEMORY_BYTES.get(arch, min(_SHARED_MEMORY_BYTES.values()))


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one for a launch; Triton launches on the current device
    only.
    """
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
