"""Requests that decode one token in every step, updated together.

What a step needs of them changes by a constant from step to step, so that a step costs no work per
request. Does not know prompts, queues or time.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Decoding(Protocol):
    """The state of a request that the group changes."""

    number: int
    output: int
    computed: int
    produced: int
    held: int
    shared: int


R = TypeVar("R", bound=Decoding)


class DecodeGroup(Generic[R]):
    """`steps` counts the group's steps; members are up to date after they `leave`."""

    def __init__(self, block_size: int) -> None:
        self.block_size, self.steps = block_size, 0
        self.context = 0  # cached tokens of all members
        # with the steps at which it joined and will have all tokens
        self._members: dict[int, tuple[R, int, int]] = {}
        self._ends: list[tuple[int, int]] = []  # heap of (step, number), also of those that left
        # members by the step, modulo a block's tokens, in which they take their next block
        self._takes_at = [0] * block_size

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, number: int) -> bool:
        return number in self._members

    def join(self, request: R) -> None:
        """Add a request that has computed all but its newest token."""
        end = self.steps + request.output - request.produced
        self._members[request.number] = request, self.steps, end
        self.context += request.computed
        heapq.heappush(self._ends, (end, request.number))
        self._takes_at[self._place(request)] += 1

    def leave(self, number: int) -> R:
        """Remove a member and bring it up to date."""
        request, since, _ = self._members.pop(number)
        self._takes_at[self._place(request, since)] -= 1
        done = self.steps - since
        request.computed += done
        request.produced += done
        request.held = -(-request.computed // self.block_size) - request.shared
        self.context -= request.computed
        return request

    def leave_all(self) -> list[R]:
        """Remove all members."""
        return [self.leave(number) for number in list(self._members)]

    def steps_to_end(self) -> int:
        """Steps until the first member has all its tokens."""
        while not self._is_current(*self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.steps

    def blocks_needed(self, steps: int) -> int:
        """Blocks that the next steps take."""
        page, first = self.block_size, self.steps
        whole, rest = divmod(steps, page)
        taken = sum(self._takes_at[(first + ahead) % page] for ahead in range(rest))
        return whole * len(self) + taken

    def advance(self, steps: int) -> list[R]:
        """Compute steps, none beyond `steps_to_end`; the members that have all tokens leave."""
        self.steps += steps
        self.context += steps * len(self)
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            end, number = heapq.heappop(self._ends)
            if self._is_current(end, number):
                ended.append(self.leave(number))
        return ended

    def _is_current(self, end: int, number: int) -> bool:
        return number in self._members and self._members[number][2] == end

    def _place(self, request: R, since: int | None = None) -> int:
        """The next step that takes a block: its cached tokens fill all of its blocks then."""
        joined = self.steps if since is None else since
        return (joined - request.computed) % self.block_size
