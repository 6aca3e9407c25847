"""Slots for low-rank updates in a decoder's linears: stacked factors, applied by forward hooks.

A row of a step uses the factors in its request's slot. Does not depend on files or requests.
Shapes: S slots, R rank, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.contracts.catalog.adapter_shapes import block_linears
from workers.inference.adapters.grouped_updates import Updates, batched_updates
from workers.inference.adapters.token_groups import group_tokens
from workers.inference.cpu.matmul import joined_product
from workers.inference.parallel.sharding import Shard
from workers.models.adapters.peft_files import LowRank
from workers.models.decoder import Decoder

# which part of a factor this rank has, by the parameter's name within a block
Shards = Callable[[str], Shard | None]
_ONE_INPUT = (("q", "k", "v"), ("gate", "up"))  # linears of one module


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """How many adapters are in the model's memory at a time, and their largest rank."""

    count: int
    rank: int

    @property
    def padded_rank(self) -> int:
        """The rank that slots have room for: rows of 16 bytes, as grouped products require."""
        return -(-self.rank // 8) * 8


class LowRankSlots:
    """Call `begin` before a pass through the decoder and `end` after it; `fill` sets a slot.

    Updates are added to the outputs of linears in the decoder's blocks, also joined, quantized and
    sharded ones; routed experts are not included. Without `begin` the decoder computes its base.
    """

    def __init__(self, decoder: Decoder, spec: SlotSpec, *, shards: Shards) -> None:
        self.spec, self._shards = spec, shards
        self.updates: Updates | None = None  # of the current pass
        weight = next(decoder.parameters())
        self._device, self._itemsize = weight.device, weight.element_size()
        self._factors: list[Factors] = []
        for layer, block in decoder.blocks.items():
            for names in _with_one_input(block_linears(decoder.spec, int(layer))):
                modules: list[Any] = [block.get_submodule(name) for name in names]
                full = [f"blocks.{layer}.{name}" for name in names]
                factors = Factors(spec, full, modules, weight)
                self._factors.append(factors)
                for owner, places in _owners(modules):
                    owner.register_forward_hook(_AddUpdates(self, factors, places))

    def begin(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """The slots (-1: none) and row ends of the sequences in the next pass."""
        self.updates = None
        if slots:
            groups = group_tokens(slots, ends, count=self.spec.count, device=self._device)
            self.updates = None if groups is None else batched_updates(groups, self._itemsize)

    def end(self) -> None:
        """The pass is over."""
        self.updates = None
        for factors in self._factors:
            factors.input = factors.inner = None

    @torch.no_grad()
    def fill(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        """Put this rank's part of an adapter into a slot; `updates` by the linears' full names."""
        for factors in self._factors:
            factors.clear(slot)
            for place, name in enumerate(factors.names):
                if (update := updates.get(name)) is None:
                    continue
                local = name.split(".", 2)[2]
                a, b = update.a.float(), update.b.float() * update.scale
                for_a, for_b = self._shards(f"{local}.lora_A"), self._shards(f"{local}.lora_B")
                factors.fill(
                    slot,
                    place,
                    a if for_a is None else for_a.take(a),
                    b if for_b is None else for_b.take(b),
                )


class Factors:
    """The factors of all slots for linears `names` that have one input.

    `a` is `[S, R of each linear, K]`, `b` one `[S, R, N]` per linear. `inner` is the product of the
    pass's `input` with `a`, which the linears share.
    """

    def __init__(self, spec: SlotSpec, names: list[str], modules: list[Any], like: Tensor) -> None:
        self.names, self.rank = names, spec.padded_rank
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        width = modules[0].in_features
        self.a = torch.zeros(spec.count, len(names) * self.rank, width, **options)
        self.b = [
            torch.zeros(spec.count, self.rank, each.out_features, **options) for each in modules
        ]
        self.input: Tensor | None = None
        self.inner: Tensor | None = None

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.a[slot].zero_()
        for b in self.b:
            b[slot].zero_()

    def fill(self, slot: int, place: int, a_RK: Tensor, b_NR: Tensor) -> None:
        """Set the factors of one linear; smaller ranks leave zeros."""
        first = place * self.rank
        self.a[slot, first : first + a_RK.shape[0]] = a_RK.to(self.a)
        self.b[place][slot, : b_NR.shape[1]] = b_NR.T.to(self.b[place])

    def add(self, updates: Updates, x: Tensor, out_TN: Tensor, places: Sequence[int]) -> None:
        """Add the updates of the linears `places`, whose outputs are next to each other."""
        if self.input is not x or self.inner is None:
            self.input, self.inner = x, updates.project(x.flatten(0, -2), self.a)
        start = 0
        for place in places:
            b, first = self.b[place], place * self.rank
            part = out_TN if len(places) == 1 else out_TN[:, start : start + b.shape[2]]
            updates.expand(self.inner[..., first : first + self.rank], b, part)
            start += b.shape[2]


class _AddUpdates:
    """A forward hook that adds updates to the output of one linear, or of several joined ones.

    Copies of the module share it.
    """

    def __init__(self, owner: LowRankSlots, factors: Factors, places: list[int]) -> None:
        self.owner, self.factors, self.places = owner, factors, places

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        """The hook."""
        updates = self.owner.updates
        if updates is None:
            return None
        out = out.contiguous()
        self.factors.add(updates, args[0], out.view(-1, out.shape[-1]), self.places)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> _AddUpdates:
        return self


def _with_one_input(names: Iterable[str]) -> list[list[str]]:
    """Linears that read the same input, in the order in which joined ones are computed."""
    sets: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        shared = next((each for each in _ONE_INPUT if leaf in each), None)
        sets.setdefault(name if shared is None else f"{parent}.{shared[0]}", []).append(name)
    order = [leaf for each in _ONE_INPUT for leaf in each]
    return [
        sorted(group, key=lambda name: order.index(name.rpartition(".")[2]))
        if len(group) > 1
        else group
        for group in sets.values()
    ]


def _owners(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, list[int]]]:
    """The modules whose forward computes these linears, and which of them each computes."""
    joined = joined_product(modules[0])
    if joined is not None and len(joined.layers) == len(modules):
        return [(joined, list(range(len(modules))))]
    return [(module, [place]) for place, module in enumerate(modules)]
