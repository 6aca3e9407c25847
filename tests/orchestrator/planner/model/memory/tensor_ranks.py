"""One rank of tensor-parallel shards under `fully_shard`, which `test_model_states` calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from workers.contracts.specs.model import ModelSpec
from workers.metrics.memory import held_bytes
from workers.models.decoder import Decoder

COLUMNS, ROWS = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"), ("attn.o", "mlp.down")


def held_after_an_update(model: dict[str, Any], tp: int) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    spec = ModelSpec.from_dict(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        decoder = Decoder(spec)
    parallelize_module(decoder, mesh["tp"], {"embed": RowwiseParallel(), "head": ColwiseParallel()})
    for block in decoder.blocks.values():
        split = {name: ColwiseParallel() for name in COLUMNS} | {
            name: RowwiseParallel() for name in ROWS
        }
        parallelize_module(block, mesh["tp"], split)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(decoder, mesh=mesh["dp"])
    decoder.to_empty(device="cpu")
    parameters = list(decoder.parameters())
    for parameter in parameters:
        torch.nn.init.zeros_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    held = {"params": parameters, "grads": [p.grad for p in parameters], "optimizer": state}
    return {name: float(held_bytes(tensors)) for name, tensors in held.items()}
