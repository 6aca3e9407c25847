"""The adapters of an engine: by name, in host memory, and in the slots of the model's memory.

Least recently used adapters leave slots and host memory; their files stay. All methods except
`read` belong to the engine's thread. Does not depend on scheduling.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from workers.contracts.specs.model import ModelSpec
from workers.inference.adapters.adapter import Adapter
from workers.inference.adapters.files import read_again, read_for_serving
from workers.inference.adapters.low_rank_slots import LowRankSlots
from workers.inference.parallel.groups import RankGroup
from workers.inference.parallel.messages import DROP_ADAPTER, LOAD_ADAPTER, PLACE_ADAPTER
from workers.models.errors import WeightsError

MAX_ADAPTERS = 1_000  # names at a time
_HOST_COPIES = 4  # times the slots


class AdapterStore:
    """`read` and `add` an adapter, `remove` it by name; `ready` and `place` it for requests.

    `base` is the path of the served weights. With a `rank_group` the other ranks read the same
    files and follow every placement.
    """

    def __init__(
        self,
        slots: LowRankSlots,
        model: ModelSpec,
        *,
        base: Path | None,
        rank_group: RankGroup | None = None,
    ) -> None:
        self.slots, self.model, self.base = slots, model, base
        self.by_name: dict[str, Adapter] = {}
        self._rank_group = rank_group
        self._in_slot: list[Adapter | None] = [None] * slots.spec.count
        self._with_copy: list[Adapter] = []
        self._clock = 0

    def read(self, name: str, path: str) -> Adapter:
        """The adapter at a path, checked, not loaded yet. Raises WeightsError."""
        spec = self.slots.spec
        return read_for_serving(name, path, model=self.model, base=self.base, rank=spec.rank)

    def add(self, adapter: Adapter, *, in_use: Collection[Adapter] = ()) -> None:
        """Make an adapter available; raises WeightsError for a name that exists, or too many."""
        if adapter.name in self.by_name:
            raise WeightsError(
                f"an adapter named {adapter.name} is already loaded; unload it first"
            )
        if len(self.by_name) >= MAX_ADAPTERS:
            raise WeightsError(f"{MAX_ADAPTERS:,} adapters are loaded; unload one first")
        self._load_on_ranks(adapter)
        self.by_name[adapter.name] = adapter
        self._keep_copy(adapter, in_use)

    def remove(self, name: str) -> Adapter:
        """Unload by name; running requests finish. Raises KeyError."""
        adapter = self.by_name.pop(name)
        adapter.unloaded = True
        return adapter

    def ready(self, adapter: Adapter, *, in_use: Collection[Adapter]) -> None:
        """Have the factors in host memory for a new request.

        Raises WeightsError if the adapter was unloaded or its files changed.
        """
        if adapter.unloaded:
            raise WeightsError(f"the adapter {adapter.name} was unloaded")
        if adapter.updates is None:
            read_again(adapter, self.model)
            self._load_on_ranks(adapter)
        self._keep_copy(adapter, in_use)

    def place(self, adapter: Adapter, *, running: Collection[Adapter]) -> bool:
        """Put an adapter into a slot; False if `running` ones use all slots."""
        self._clock += 1
        if adapter.slot is None:
            free = [
                (0 if other is None or other.unloaded else other.used, slot)
                for slot, other in enumerate(self._in_slot)
                if other is None or other not in running
            ]
            if not free:
                return False
            slot = min(free)[1]
            if (evicted := self._in_slot[slot]) is not None:
                evicted.slot = None
            assert adapter.updates is not None
            if self._rank_group is not None:
                self._rank_group.broadcast(PLACE_ADAPTER, [adapter.number, slot])
            self.slots.fill(slot, adapter.updates)
            self._in_slot[slot], adapter.slot = adapter, slot
        adapter.used = self._clock
        return True

    def _keep_copy(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        """Note the use of a host copy; drop the oldest ones beyond the limit."""
        if adapter in self._with_copy:
            self._with_copy.remove(adapter)
        self._with_copy.append(adapter)
        limit = _HOST_COPIES * self.slots.spec.count
        for other in self._with_copy[:-1]:
            if len(self._with_copy) <= limit and not other.unloaded:
                continue
            if other not in in_use:
                self._with_copy.remove(other)
                other.updates = None
                if self._rank_group is not None:
                    self._rank_group.broadcast(DROP_ADAPTER, [other.number])

    def _load_on_ranks(self, adapter: Adapter) -> None:
        if self._rank_group is None:
            return
        text = f"{adapter.digest}\n{adapter.folder}".encode()
        self._rank_group.broadcast(LOAD_ADAPTER, [adapter.number, *text])
        if not self._rank_group.min_over_ranks(1):
            raise WeightsError(
                f"another rank of this model cannot read {adapter.folder}; the same files must be "
                "on every node"
            )
