"""Messages between training ranks and rollout ranks, in a store that all of them reach.

Rank 0 posts prompts by their position; a rollout rank takes them one by one and posts the group of
answers of each. Does not depend on what a group holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from workers.runtime.environment import Environment

_PREFIX = "rollouts"
# numbers that a rollout rank reads in each of its steps
_STATE = ("version", "posted", "finished", "oldest", "stopping")
POLL_S = 0.003
_STOP, _ERROR = "stop", "error"


class RolloutRankError(RuntimeError):
    """A rollout rank failed with an exit class of `CODES`."""

    def __init__(self, message: str, *, exit_class: str) -> None:
        super().__init__(message)
        self.exit_class = exit_class


@dataclass(frozen=True, slots=True)
class State:
    """`version`: the newest weights that can be received (-1: none yet). Of `posted` prompts
    `finished` have their answers. Groups of positions before `oldest` are not needed any more.
    `stopping`: rank 0 leaves.
    """

    version: int
    posted: int
    finished: int
    oldest: int
    stopping: int = 0


def join_store(environment: Environment) -> Store:
    """The store of torchrun's rendezvous, which every rank of the run joins."""
    joining = rendezvous("env://", rank=environment.rank, world_size=environment.world_size)
    store, _, _ = next(joining)
    joined: Store = store
    return joined


class Exchange:
    """The messages over a `store`. Every rank has its own object; not shared between threads."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(_PREFIX, store)

    def open(self, attempt: int) -> None:
        """Rank 0: let rollout ranks begin with this attempt."""
        for name, number in zip(_STATE, (-1, 0, 0, 0, 0), strict=True):
            self._store.set(name, str(number))
        self._store.set("attempt", str(attempt))

    def attempt(self) -> int | None:
        """The attempt's number, once rank 0 has begun."""
        known = self._store.check(["attempt"])
        return int(self._store.get("attempt")) if known else None

    def state(self) -> State:
        """What rollout ranks act on."""
        return State(*(int(each) for each in self._store.multi_get(list(_STATE))))

    def set_version(self, version: int) -> None:
        """Rank 0: ask all rollout ranks to receive weights."""
        self._store.set("version", str(version))

    def set_oldest(self, position: int) -> None:
        """Rank 0: groups of earlier positions are stored elsewhere, or learned from."""
        self._store.set("oldest", str(position))

    # prompts

    def post(self, positions: Iterable[int]) -> None:
        """Rank 0: request the answers of prompts."""
        for position in positions:
            number = self._store.add("posted", 1)
            self._store.set(f"prompt/{number}", str(position))

    def take_ticket(self) -> int:
        """The number of the next prompt for this rank, which may not be posted yet."""
        return int(self._store.add("tickets", 1))

    def prompt(self, ticket: int) -> int:
        """The position of a posted prompt."""
        position = int(self._store.get(f"prompt/{ticket}"))
        self._store.delete_key(f"prompt/{ticket}")
        return position

    # groups

    def finish(self, position: int, group: str, *, posted: bool = True) -> None:
        """Rollout rank: the answers to a prompt; those of an earlier attempt were not `posted`."""
        self._store.set(f"group/{position}", group)
        if posted:
            self._store.add("finished", 1)

    def announce(self, rank: int, positions: Iterable[int]) -> None:
        """Rollout rank: the positions of groups that an earlier attempt finished."""
        self._store.set(f"earlier/{rank}", ",".join(str(each) for each in positions))

    def earlier(self, ranks: Iterable[int], alive: Callable[[], None]) -> set[int]:
        """Rank 0: all announced positions; waits for every rollout rank."""
        positions: set[int] = set()
        for rank in ranks:
            self._wait(f"earlier/{rank}", alive)
            text = self._store.get(f"earlier/{rank}").decode()
            positions |= {int(each) for each in text.split(",") if each}
        return positions

    def has_group(self, position: int) -> bool:
        """Whether the answers to a prompt are there."""
        return bool(self._store.check([f"group/{position}"]))

    def group(self, position: int, alive: Callable[[], None]) -> str:
        """Rank 0: take the answers to a prompt; waits for them. Raises RolloutRankError."""
        self._wait(f"group/{position}", alive)
        text = self._store.get(f"group/{position}").decode()
        self.drop(position)
        return text

    def drop(self, position: int) -> None:
        """Rank 0: drop the answers to a prompt."""
        self._store.delete_key(f"group/{position}")

    # ends

    def stop(self, exit_class: str, reason: str, step: int) -> None:
        """Rank 0: rollout ranks leave with this outcome."""
        self._store.set(_STOP, f"{exit_class}\n{step}\n{reason}")
        self._store.set("stopping", "1")

    def outcome(self) -> tuple[str, str, int]:
        """The class, reason and step with which rank 0 leaves."""
        exit_class, step, reason = self._store.get(_STOP).decode().split("\n", 2)
        return exit_class, reason, int(step)

    def fail(self, message: str, *, exit_class: str) -> None:
        """Rollout rank: it cannot continue."""
        self._store.set(_ERROR, f"{exit_class}\n{message}")

    def raise_error(self) -> None:
        """Raises RolloutRankError if a rollout rank failed."""
        if self._store.check([_ERROR]):
            exit_class, message = self._store.get(_ERROR).decode().split("\n", 1)
            raise RolloutRankError(message, exit_class=exit_class)

    def leave(self, ranks: int, limit_s: float = 10.0) -> None:
        """Wait until all `ranks` leave: torchrun ends the others when the first one exits."""
        self._store.add("leaving", 1)
        end = time.monotonic() + limit_s
        while int(self._store.add("leaving", 0)) < ranks and time.monotonic() < end:
            time.sleep(POLL_S)

    def _wait(self, key: str, alive: Callable[[], None]) -> None:
        while not self._store.check([key]):
            self.raise_error()
            alive()
            time.sleep(POLL_S)
