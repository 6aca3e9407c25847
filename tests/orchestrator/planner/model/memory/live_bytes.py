"""Peak of live storages while torch runs, on fake tensors: the memory an allocator must provide."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.training.numerics.precision import DTYPES, cast_copies
from workers.training.objectives.token_losses import token_loss
from workers.training.parallel.zero import shard_decoder


class LiveBytes(TorchDispatchMode):
    """Counts storages from the operation that made them until nothing refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage()._cdata not in self.alive
            ):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.now += storage.nbytes()
        if self.now > self.peak:
            for key in [key for key, (storage, _) in self.alive.items() if storage.expired()]:
                self.now -= self.alive.pop(key)[1]
            self.peak = max(self.peak, self.now)
        return out


def peak_of_a_step(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> int:
    """The second of two steps of the engine's decoder on one device, with AdamW and gradients freed
    between steps.
    """
    with FakeTensorMode(), LiveBytes() as live:
        decoder = Decoder(model)
        if plan.precision != "fp32":
            decoder = cast_copies(decoder, DTYPES[plan.precision])
        optimizer = torch.optim.AdamW(decoder.parameters(), foreach=False)
        for _ in range(2):
            for _ in range(plan.accumulation):
                tokens = torch.zeros(plan.micro_batch_size, seq_len, dtype=torch.long)
                token_loss(decoder(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return live.peak


def peak_of_a_sharded_step(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> int:
    """One rank's first step under the engine's `fully_shard`, as torch's own tracker counts it: no
    gradients yet when
    the loss's backward pass starts. The other ranks are not there (torch's fake process group)."""
    dist.init_process_group("fake", rank=0, world_size=plan.dp, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (plan.dp,), mesh_dim_names=("dp_shard",))
        with FakeTensorMode():
            decoder = Decoder(model)
            shard_decoder(decoder, plan, mesh)
            optimizer = torch.optim.AdamW(decoder.parameters(), foreach=False)
            for parameter in decoder.parameters():  # states are there from the second step on
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tracker = FSDPMemTracker(decoder, optimizer)
            tokens = torch.zeros(plan.micro_batch_size, seq_len, dtype=torch.long)
            with tracker:
                token_loss(decoder(tokens), tokens).backward()
        (result,) = tracker.get_tracker_snapshot("peak").values()
        return int(result["Total"])
    finally:
        dist.destroy_process_group()
