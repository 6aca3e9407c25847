"""Initial weights that depend only on the seed and the parameter's name, not on sharding.

Every parameter is drawn in chunks of rows, each with its own generator on the CPU; a rank draws
only the chunks of its shard. Torch's own DTensor initialization repeats one shard's numbers on
every rank on a CPU (pytorch#138329).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

STD = 0.02  # GPT-2 and Llama
_CHUNK_ELEMENTS = 1 << 20
_RESIDUAL = (
    "attn.o.weight",
    "mlp.down.weight",
    "mlp.experts.down.weight",
    "mlp.shared.down.weight",
)


@torch.no_grad()
def initialize(model: nn.Module, *, layers: int, seed: int) -> None:
    """Fill every parameter of `model`: plain tensors or sharded DTensors, on any device.

    Normal(0, 0.02); projections to the residual stream are scaled by 1 / sqrt(2 · layers) (GPT-2,
    section 2.3); norm gains one, biases and buffers zero.
    """
    for name, parameter in model.named_parameters():
        if not _fill_adapter(name, parameter, seed=seed):
            fill_parameter(name, parameter, layers=layers, seed=seed)
    for buffer in model.buffers():
        buffer.zero_()


def fill_parameter(name: str, parameter: Tensor, *, layers: int, seed: int) -> None:
    """Fill one parameter, or the local shard of a DTensor, with the values that its name and `seed`
    give.
    """
    if name.endswith(".bias"):
        _local(parameter).zero_()
    elif parameter.ndim == 1:
        _local(parameter).fill_(1.0)
    else:
        _fill_normal(
            name, parameter, STD / math.sqrt(2 * layers) if name.endswith(_RESIDUAL) else STD, seed
        )


def _fill_adapter(name: str, parameter: Tensor, *, seed: int) -> bool:
    """Fill a parameter of an adapter by its name; false for another parameter.

    A uniform within ±1/sqrt(inputs) (He et al. 2015 with slope sqrt(5), as PEFT), B zero, factors
    one. Values depend on name and seed, not on sharding.
    """
    local, place = local_part(parameter)
    kind = name.rpartition(".")[2]
    if kind == "lora_B":
        local.zero_()
    elif kind in ("ia3_l", "lora_magnitude"):
        local.fill_(1.0)
    elif name.endswith("_adapter.up.weight"):
        local.zero_()  # at first the adapter changes nothing
    elif kind in ("prefix_k", "prefix_v") or name == "prompt.embedding":
        generator = torch.Generator().manual_seed(derived_seed(seed, name))
        local.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=generator)[place])
    elif kind == "lora_A":
        generator = torch.Generator().manual_seed(derived_seed(seed, name))
        bound = 1 / math.sqrt(parameter.shape[1])
        values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        local.copy_(values[place])
    else:
        return False
    return True


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed derived from `parts`."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's shard of a tensor and its slices in the full tensor; all of a plain tensor."""
    local = _local(tensor)
    starts = _offsets(tensor)
    return local, tuple(
        slice(start, start + size) for start, size in zip(starts, local.shape, strict=True)
    )


def _fill_normal(name: str, parameter: Tensor, std: float, seed: int) -> None:
    local, (rows, *columns) = local_part(parameter)
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // math.prod(parameter.shape[1:]))
    first, last = rows.start, rows.stop
    for chunk in range(first // rows_per_chunk, -(-last // rows_per_chunk)):
        begin = chunk * rows_per_chunk
        end = min(begin + rows_per_chunk, parameter.shape[0])
        generator = torch.Generator().manual_seed(derived_seed(seed, name, chunk))
        values = torch.empty((end - begin, *parameter.shape[1:])).normal_(
            0.0, std, generator=generator
        )
        low, high = max(begin, first), min(end, last)
        local[low - first : high - first].copy_(
            values[low - begin : high - begin][(slice(None), *columns)]
        )


def _local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _offsets(parameter: Tensor) -> tuple[int, ...]:
    """Start of the local shard in the full parameter, per dim."""
    if not hasattr(parameter, "to_local"):
        return (0,) * parameter.ndim
    sharded: Any = parameter
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    return tuple(offsets)
