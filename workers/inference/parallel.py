"""Tensor parallel inference: a decoder's heads and feed-forward width over the ranks of a run (arXiv 1909.08053).

Rank 0 plans and samples; what a step computes goes to the others as plain numbers, and all compute it together. Knows
no requests and no files. Every rank has the embedding, the head and the norms whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.contracts.exits import UserError
from workers.inference.cache import PagedCache
from workers.inference.load import Loaded, device_here
from workers.inference.runner import Runner
from workers.inference.scheduler import StepPlan
from workers.inference.work import Work, work_of
from workers.models.attention import Attention
from workers.models.decoder import Decoder
from workers.models.mla import LatentAttention


class Team:
    """The ranks that compute one model; torchrun's variables say which this one is. Raises RuntimeError where the
    others do not come."""

    def __init__(self, local_rank: int = 0) -> None:
        self.device = device_here()
        if self.device.type == "cuda":
            torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def tell(self, told: Any) -> Any:
        """What rank 0 tells, on every rank."""
        box = [told]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    @contextmanager
    def led(self) -> Iterator[None]:
        """Around all that rank 0 does: the others are let go at its end, and where a user's error ends it."""
        try:
            yield
        except UserError:
            self.tell(None)
            raise
        self.tell(None)

    def leave(self) -> None:
        dist.destroy_process_group()


class LeadingRunner(Runner):
    """Rank 0's: each step is told before it is computed."""

    def __init__(self, decoder: Decoder, cache: PagedCache, team: Team) -> None:
        super().__init__(decoder, cache)
        self.team = team
        team.tell((cache.blocks, cache.block_size, cache.swap))

    def run(self, plan: StepPlan) -> Tensor:
        return self.compute(self.team.tell(work_of(plan, self.cache.block_size)))


def follow(loaded: Loaded, team: Team) -> None:
    """Every other rank's: compute what rank 0 tells, until it ends."""
    told = team.tell(None)
    if told is None:
        return
    blocks, block_size, swap = told
    weight = next(loaded.decoder.parameters())
    cache = PagedCache(
        loaded.spec, blocks=blocks, block_size=block_size, dtype=loaded.cache_dtype or weight.dtype,
        device=weight.device, swap=swap, shares=team.size,
    )  # fmt: skip
    runner = Runner(loaded.decoder, cache)
    while True:
        work: Work | None = team.tell(None)
        if work is None:
            return
        runner.compute(work)


def shard(decoder: Decoder, team: Team) -> None:
    """Keep this rank's part of every layer. Raises UserError for a model that does not divide so."""
    spec, size = decoder.spec, team.size
    if spec.moe is not None:
        raise UserError("plan.tp: this engine version does not spread experts over ranks; try tp 1")
    wrong = [name for name in ("heads", "kv_heads") if _heads(decoder, name) % size]
    if wrong:
        says = f"{spec.name} has {_heads(decoder, wrong[0])} {wrong[0]}, which {size} ranks cannot share evenly"
        raise UserError(f"plan.tp: {says}; try a tp that divides them")
    for block in decoder.blocks.values():
        attention: Any = block.attn
        mlp: Any = block.mlp
        if isinstance(attention, Attention):
            rows = [attention.q, attention.k, attention.v]
        elif isinstance(attention, LatentAttention):
            rows = [attention.q_up if attention.mla.q_lora_rank else attention.q, attention.kv_up]
        else:
            rows = [attention.q_up]
        rows += [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
        _check_plain([*rows, attention.o, mlp.down])
        for linear in rows:
            _keep(linear, 0, team)
        for linear in (attention.o, mlp.down):
            _keep(linear, 1, team)
            linear.register_forward_hook(_summed)


def _heads(decoder: Decoder, name: str) -> int:
    spec = decoder.spec
    if spec.mla is not None or spec.mfa is not None:  # one latent, or one key, for all heads
        return spec.mfa.heads if spec.mfa is not None else spec.heads
    return int(getattr(spec, name))


def _check_plain(layers: Sequence[nn.Module]) -> None:
    if not all(type(each) is nn.Linear for each in layers):
        raise UserError("quantize: quantised weights are not spread over ranks yet; try tp 1")


def _keep(linear: nn.Linear, axis: int, team: Team) -> None:
    """This rank's rows, or columns; a bias that comes after the sum is rank 0's."""
    linear.weight = _part(linear.weight, axis, team)
    if linear.bias is not None:
        if axis == 0:
            linear.bias = _part(linear.bias, 0, team)
        elif team.rank:
            linear.bias = nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)
    linear.out_features, linear.in_features = linear.weight.shape


def _part(whole: Tensor, axis: int, team: Team) -> nn.Parameter:
    mine = whole.detach().tensor_split(team.size, axis)[team.rank]
    return nn.Parameter(mine.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _summed(layer: nn.Module, given: Any, out: Tensor) -> Tensor:
    dist.all_reduce(out)
    return out
