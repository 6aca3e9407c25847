"""Replicas behind one endpoint: which of them takes a prompt, by what each has computed before and
how busy it is.

Knows tokens and counts; what is on a replica is guessed from what was sent there, nobody is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.inference.blocks import block_key
from workers.inference.server.errors import ApiError
from workers.inference.server.relay import Relay

_REMEMBERED = 200_000  # blocks


@dataclass(eq=False, slots=True)
class Replica:
    """`relay` is None for the one in this process; `inside` counts answers on their way, `taken`
    all so far.
    """

    rank: int
    relay: Relay | None
    inside: int = 0
    taken: int = 0


class Fleet:
    """`choose` a replica for a prompt: of those with room the one that was sent the longest
    beginning of it.

    Of equally idle ones it is the one that had least so far, so that one request after another
    fills all caches.
    One that is busier than the idlest by `slack` answers is passed over: a shared prefix saves a
    prompt's time, a queue
    costs several answers'. Each holds `capacity` at most.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, block_size: int, capacity: int, slack: int
    ) -> None:
        self.replicas = list(replicas)
        self._block_size, self._capacity, self._slack = block_size, capacity, slack
        self._sent: OrderedDict[bytes, Replica] = OrderedDict()

    def choose(self, prompt: Sequence[int], answers: int) -> Replica:
        """Its answers count as on their way from now on. Raises ApiError 429 where all are full."""
        idlest = min(self.replicas, key=lambda each: (each.inside, each.taken, each.rank))
        if idlest.inside and idlest.inside + answers > self._capacity:
            message = (
                f"{sum(each.inside for each in self.replicas)} answers are on their way and "
                "all replicas are full"
            )
            raise ApiError(
                f"{message}; ask again later", status=429, code="queue_full", retry_after_s=1.0
            )
        keys = self._keys(prompt)
        known = next((self._sent[key] for key in reversed(keys) if key in self._sent), None)
        chosen = idlest
        if known is not None and known.inside <= idlest.inside + self._slack:
            chosen = known if known.inside + answers <= self._capacity else idlest
        for key in keys:
            self._sent[key] = chosen
            self._sent.move_to_end(key)
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        chosen.inside += answers
        chosen.taken += answers
        return chosen

    @property
    def away(self) -> int:
        """Answers on their way in other processes."""
        return sum(each.inside for each in self.replicas if each.relay is not None)

    async def close(self) -> None:
        for each in self.replicas:
            if each.relay is not None:
                await each.relay.close()

    def _keys(self, prompt: Sequence[int]) -> list[bytes]:
        keys: list[bytes] = []
        for end in range(self._block_size, len(prompt) + 1, self._block_size):
            keys.append(block_key(keys[-1] if keys else b"", prompt[end - self._block_size : end]))
        return keys
