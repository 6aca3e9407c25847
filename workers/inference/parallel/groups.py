"""The ranks that compute one model between them, and how they reach each other.

Knows ranks and tensors; knows no requests and no steps. Over gloo on CPUs; on GPUs hidden states go
by NCCL, numbers
still by gloo, which waits without a core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.specs.inference_support import place_of
from workers.contracts.specs.plan import ParallelPlan
from workers.metrics.beacon import INFERENCE_GROUP
from workers.runtime.environment import Environment, check_world
from workers.runtime.exits import UserError, first_line, is_out_of_memory

# one rank may load much longer than another; who ends is noticed at once
_PATIENCE = timedelta(minutes=60)
_NUMBERS = 2048  # of a message that go at once; more follow by themselves
_SENT = 8  # messages to one rank that may be on their way before the oldest is waited for
_FIRST, _REST, _HIDDEN = 1, 2, 3  # tags
END = 0  # the kind of a message after which none comes


class Team:
    """This rank's `place` among them. The leader `tell`s numbers, the others are `told` them;
    hidden states go from
    each stage to the next (`pass_on`, `given`). A rank that is gone raises ConnectionError on those
    that wait for it.
    """

    def __init__(self, plan: ParallelPlan, around: Environment, device: torch.device) -> None:
        self.place = place_of(plan, around.rank)
        self.device, self.local_world_size = device, around.local_world_size
        self._joined = not dist.is_initialized()  # one that exists already is used, and stays
        with reached():
            if not self._joined:
                pass
            elif device.type == "cuda":
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_PATIENCE, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=_PATIENCE)
            self._set_groups(plan)
        self._others = [rank for rank in self.place.ranks if rank != self.place.ranks.start]
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._states: deque[tuple[Any, Tensor]] = deque()
        self._coming: deque[Callable[[], Tensor]] = deque()
        self._next: tuple[Any, Tensor] | None = None
        self._broken = False

    def _set_groups(self, plan: ParallelPlan) -> None:
        """Every rank makes every group, in the same order, as torch wants it."""
        places = [place_of(plan, rank) for rank in range(plan.world_size)]
        members = sorted({(each.ranks.start, each.ranks.stop) for each in places})
        shares = sorted(
            {
                tuple(each.rank(stage=each.stage, share=n) for n in range(each.shares))
                for each in places
            }
        )
        own = self.place.rank(stage=self.place.stage, share=self.place.share)
        self.all = _mine([range(*each) for each in members], own)
        self.sharers = _mine(shares, own) if plan.tp > 1 else None
        self.leaders = _mine([[first for first, _ in members]], own) if plan.dp > 1 else None

    @property
    def leads(self) -> bool:
        return self.place.leads

    def tell(self, kind: int, numbers: Sequence[int] = ()) -> None:
        """To all others; returns before they have read it, so that they may still compute."""
        whole = torch.tensor([kind, len(numbers), *numbers])
        first, rest = torch.zeros(_NUMBERS, dtype=torch.int64), whole[_NUMBERS:]
        first[: len(whole)] = whole[:_NUMBERS]
        with reached():
            for rank in self._others:
                self._sent.append((dist.isend(first, rank, tag=_FIRST), first))
                if len(rest):
                    self._sent.append((dist.isend(rest, rank, tag=_REST), rest))
            _wait(self._sent, left=_SENT * len(self._others))

    def settle(self) -> None:
        """All that was told is read."""
        with reached():
            _wait(self._sent)

    def told(self) -> tuple[int, list[int]]:
        """Blocks until the leader tells something; what comes after it is awaited from then on."""
        with reached():
            handle, first = self._next or self._awaited()
            handle.wait()
            kind, count, *numbers = first.tolist()
            if (more := count - len(numbers)) > 0:
                rest = torch.empty(more, dtype=torch.int64)
                dist.recv(rest, self.place.ranks.start, tag=_REST)
                numbers += rest.tolist()
            self._next = None if kind == END else self._awaited()
        return kind, numbers[:count]

    def _awaited(self) -> tuple[Any, Tensor]:
        first = torch.empty(_NUMBERS, dtype=torch.int64)
        return dist.irecv(first, self.place.ranks.start, tag=_FIRST), first

    def pass_on(self, hidden: Tensor) -> None:
        """To the next stage; returns before it is read."""
        rank = self.place.rank(stage=self.place.stage + 1, share=self.place.share)
        with reached():
            hidden = hidden.contiguous()
            self._states.append((dist.isend(hidden, rank, tag=_HIDDEN), hidden))
            _wait(self._states, left=self.place.stages)

    def given(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Hidden states of the stage before, awaited from now on; the call gives them, in the order
        of the asking.
        """
        hidden = torch.empty(*shape, dtype=dtype, device=self.device)
        rank = self.place.rank(stage=self.place.stage - 1, share=self.place.share)

        def receive() -> Any:
            with reached():
                return dist.irecv(hidden, rank, tag=_HIDDEN)

        # a kernel of NCCL's that waits keeps a part of the GPU busy: there it is begun when it is
        # wanted
        awaited = receive() if self.device.type == "cpu" else None

        def arrived() -> Tensor:
            with reached():
                (awaited or receive()).wait()
            return hidden

        self._coming.append(arrived)
        return lambda: self._coming.popleft()()

    def least(self, number: int) -> int:
        """Over all ranks of the model."""
        found = torch.tensor(number)
        with reached():
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self.all)
        return int(found)

    @contextmanager
    def led(self) -> Iterator[None]:
        """Around all that the leader does. The others are let go at its end; after an error that
        may have caught them
        in the midst of a step, nothing of it is waited for."""
        try:
            yield
        except BaseException as error:
            self._broken = not isinstance(error, UserError)
            raise
        finally:
            with suppress(ConnectionError):
                self.tell(END)

    def leave(self) -> None:
        """What is still on its way comes to its end."""
        with suppress(ConnectionError), reached():
            if not self._broken:
                while self._coming:
                    self._coming.popleft()()
                _wait(self._sent)
                _wait(self._states)
        if self._joined:
            with suppress(RuntimeError):
                dist.destroy_process_group()


def join(plan: ParallelPlan, around: Environment, device: torch.device) -> Team | None:
    """None where this rank computes its model alone. Raises UserError where plan and torchrun
    disagree, ConnectionError
    where the others do not come."""
    check_world(plan, around)
    return Team(plan, around, device) if plan.tp * plan.pp > 1 else None


def led(team: Team | None) -> AbstractContextManager[None]:
    """`team.led`, where there is one."""
    return nullcontext() if team is None else team.led()


@contextmanager
def reached() -> Iterator[None]:
    """Torch's words for a rank that is gone or a network that is, as ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConnectionError(
            f"a rank that computes this model too is gone: {first_line(error)}"
        ) from error


def _mine(groups: Sequence[Sequence[int]], rank: int) -> Any:
    """Of groups of ranks, all of which are made, the one with this rank in it."""
    made = [(dist.new_group(list(ranks), group_desc=INFERENCE_GROUP), ranks) for ranks in groups]
    return next((group for group, ranks in made if rank in ranks), None)


def _wait(waiting: deque[tuple[Any, Tensor]], *, left: int = 0) -> None:
    while len(waiting) > left:
        waiting.popleft()[0].wait()
