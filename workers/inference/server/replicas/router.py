"""Routes prompts to replicas, by what each has cached and how busy it is.

What a replica has cached is inferred from the prompts that were sent to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.inference.kv_cache.block_pool import hash_block
from workers.inference.server.http.errors import ApiError
from workers.inference.server.replicas.forwarding import Upstream

_MAX_BLOCKS = 200_000  # remembered


@dataclass(eq=False, slots=True)
class Replica:
    """`upstream` is None for the replica in this process; `total` counts all answers so far."""

    rank: int
    upstream: Upstream | None
    in_progress: int = 0
    total: int = 0


class ReplicaRouter:
    """Chooses, among replicas with room, the one that was sent the longest prefix of a prompt.

    A replica with `slack` more answers than the idlest one is passed over: a shared prefix saves
    one prefill, a queue costs several answers. Ties go to the replica with the lowest total, so
    that sequential requests fill all caches. Each holds at most `capacity` answers.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, block_size: int, capacity: int, slack: int
    ) -> None:
        self.replicas = list(replicas)
        self._block_size, self._capacity, self._slack = block_size, capacity, slack
        self._sent_to: OrderedDict[bytes, Replica] = OrderedDict()

    @property
    def upstreams(self) -> list[Upstream]:
        """The replicas in other processes."""
        return [replica.upstream for replica in self.replicas if replica.upstream is not None]

    @property
    def forwarded(self) -> int:
        """Answers in progress in other processes."""
        return sum(replica.in_progress for replica in self.replicas if replica.upstream is not None)

    def route(self, prompt: Sequence[int], answers: int, *, adapter: str | None = None) -> Replica:
        """Choose a replica and count its answers. Raises ApiError 429 if all are full.

        A replica that was last sent requests of the `adapter` has it in its memory: it is chosen if
        none has a longer prefix.
        """
        idlest = min(
            self.replicas, key=lambda replica: (replica.in_progress, replica.total, replica.rank)
        )
        if idlest.in_progress and idlest.in_progress + answers > self._capacity:
            in_progress = sum(replica.in_progress for replica in self.replicas)
            raise ApiError(
                f"all replicas are full, {in_progress} answers are in progress. Try again later.",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )
        keys = self._block_keys(prompt, adapter)
        cached = next((self._sent_to[key] for key in reversed(keys) if key in self._sent_to), None)
        chosen = idlest
        if cached is not None and cached.in_progress <= idlest.in_progress + self._slack:
            chosen = cached if cached.in_progress + answers <= self._capacity else idlest
        for key in keys:
            self._sent_to[key] = chosen
            self._sent_to.move_to_end(key)
        while len(self._sent_to) > _MAX_BLOCKS:
            self._sent_to.popitem(last=False)
        chosen.in_progress += answers
        chosen.total += answers
        return chosen

    async def close(self) -> None:
        """Close the connections to all replicas."""
        for upstream in self.upstreams:
            await upstream.close()

    def _block_keys(self, prompt: Sequence[int], adapter: str | None) -> list[bytes]:
        keys: list[bytes] = [] if adapter is None else [f"adapter {adapter}".encode()]
        for end in range(self._block_size, len(prompt) + 1, self._block_size):
            tokens = prompt[end - self._block_size : end]
            keys.append(hash_block(keys[-1] if keys else b"", tokens))
        return keys
