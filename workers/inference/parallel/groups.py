"""The ranks that compute one model together, and their communication.

gloo on CPUs; on GPUs hidden states go by NCCL, numbers still by gloo, which waits without using a
core. Does not depend on requests or steps.
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

from workers.contracts.specs.inference_support import placement_of
from workers.contracts.specs.plan import ParallelPlan
from workers.inference.parallel.messages import END
from workers.metrics.beacon import INFERENCE_GROUP
from workers.runtime.environment import Environment, check_world
from workers.runtime.exit_codes import UserError, first_line, is_out_of_memory

# one rank may load much longer than another; a rank that exits is noticed at once
_TIMEOUT = timedelta(minutes=60)
_FIRST_CHUNK = 2048  # numbers of a message's first send; the rest follows in a second one
_MAX_SENDS = 8  # sends in flight to one rank before the oldest is awaited
_FIRST, _REST, _HIDDEN = 1, 2, 3  # tags


class RankGroup:
    """This rank's `place` among the ranks of one model.

    The driver broadcasts numbers and workers receive them; hidden states go from each stage to the
    next. A lost rank raises ConnectionError on those that wait for it.
    """

    def __init__(self, plan: ParallelPlan, environment: Environment, device: torch.device) -> None:
        self.place = placement_of(plan, environment.rank)
        self.device, self.local_world_size = device, environment.local_world_size
        self._owns_group = not dist.is_initialized()  # an existing one is used and kept
        with connection_errors():
            if not self._owns_group:
                pass
            elif device.type == "cuda":
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=_TIMEOUT)
            self._create_groups(plan)
        self._others = [rank for rank in self.place.ranks if rank != self.place.ranks.start]
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._hidden_sends: deque[tuple[Any, Tensor]] = deque()
        self._hidden_receives: deque[Callable[[], Tensor]] = deque()
        self._next: tuple[Any, Tensor] | None = None
        self._broken = False

    def _create_groups(self, plan: ParallelPlan) -> None:
        """Every rank creates every group in the same order, as torch requires."""
        places = [placement_of(plan, rank) for rank in range(plan.world_size)]
        members = sorted({(place.ranks.start, place.ranks.stop) for place in places})
        shares = sorted(
            {
                tuple(place.rank(stage=place.stage, share=n) for n in range(place.shares))
                for place in places
            }
        )
        own = self.place.rank(stage=self.place.stage, share=self.place.share)
        self.model_group = _create_own([range(*bounds) for bounds in members], own)
        self.tensor_group = _create_own(shares, own) if plan.tp > 1 else None
        drivers = [[first for first, _ in members]]
        self.driver_group = _create_own(drivers, own) if plan.dp > 1 else None

    @property
    def is_driver(self) -> bool:
        """Whether this rank schedules the steps."""
        return self.place.leads

    def broadcast(self, kind: int, numbers: Sequence[int] = ()) -> None:
        """Send a message to all other ranks; returns before they read it."""
        message = torch.tensor([kind, len(numbers), *numbers])
        first, rest = torch.zeros(_FIRST_CHUNK, dtype=torch.int64), message[_FIRST_CHUNK:]
        first[: len(message)] = message[:_FIRST_CHUNK]
        with connection_errors():
            for rank in self._others:
                self._sends.append((dist.isend(first, rank, tag=_FIRST), first))
                if len(rest):
                    self._sends.append((dist.isend(rest, rank, tag=_REST), rest))
            _wait(self._sends, left=_MAX_SENDS * len(self._others))

    def flush(self) -> None:
        """Wait until all messages are read."""
        with connection_errors():
            _wait(self._sends)

    def receive(self) -> tuple[int, list[int]]:
        """Block until the driver's next message; its kind and numbers."""
        with connection_errors():
            handle, first = self._next or self._post_receive()
            handle.wait()
            kind, count, *numbers = first.tolist()
            if (more := count - len(numbers)) > 0:
                rest = torch.empty(more, dtype=torch.int64)
                dist.recv(rest, self.place.ranks.start, tag=_REST)
                numbers += rest.tolist()
            self._next = None if kind == END else self._post_receive()
        return kind, numbers[:count]

    def _post_receive(self) -> tuple[Any, Tensor]:
        first = torch.empty(_FIRST_CHUNK, dtype=torch.int64)
        return dist.irecv(first, self.place.ranks.start, tag=_FIRST), first

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage; returns before they are read."""
        rank = self.place.rank(stage=self.place.stage + 1, share=self.place.share)
        with connection_errors():
            hidden = hidden.contiguous()
            self._hidden_sends.append((dist.isend(hidden, rank, tag=_HIDDEN), hidden))
            _wait(self._hidden_sends, left=self.place.stages)

    def receive_hidden(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Receive hidden states of the previous stage.

        The result waits for them; results must be called in the order of these calls.
        """
        hidden = torch.empty(*shape, dtype=dtype, device=self.device)
        rank = self.place.rank(stage=self.place.stage - 1, share=self.place.share)

        def receive() -> Any:
            with connection_errors():
                return dist.irecv(hidden, rank, tag=_HIDDEN)

        # a waiting NCCL kernel keeps a part of the GPU busy: there, post the receive when waiting
        posted = receive() if self.device.type == "cpu" else None

        def wait() -> Tensor:
            with connection_errors():
                (posted or receive()).wait()
            return hidden

        self._hidden_receives.append(wait)
        return lambda: self._hidden_receives.popleft()()

    def min_over_ranks(self, number: int) -> int:
        """The minimum over all ranks of the model."""
        result = torch.tensor(number)
        with connection_errors():
            dist.all_reduce(result, dist.ReduceOp.MIN, group=self.model_group)
        return int(result)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Context of the driver's work; workers are released at its end.

        After an error that may have interrupted a step, its sends and receives are not awaited.
        """
        try:
            yield
        except BaseException as error:
            self._broken = not isinstance(error, UserError)
            raise
        finally:
            with suppress(ConnectionError):
                self.broadcast(END)

    def close(self) -> None:
        """Finish what is in flight and destroy the process group if this object created it."""
        with suppress(ConnectionError), connection_errors():
            if not self._broken:
                while self._hidden_receives:
                    self._hidden_receives.popleft()()
                _wait(self._sends)
                _wait(self._hidden_sends)
        if self._owns_group:
            with suppress(RuntimeError):
                dist.destroy_process_group()


def join(plan: ParallelPlan, environment: Environment, device: torch.device) -> RankGroup | None:
    """Join the ranks of the model; None if this rank computes its model alone.

    Raises UserError if plan and torchrun disagree, ConnectionError if other ranks do not join.
    """
    check_world(plan, environment)
    return RankGroup(plan, environment, device) if plan.tp * plan.pp > 1 else None


def driving(rank_group: RankGroup | None) -> AbstractContextManager[None]:
    """`rank_group.driving()`, or no context for one rank."""
    return nullcontext() if rank_group is None else rank_group.driving()


@contextmanager
def connection_errors() -> Iterator[None]:
    """Convert torch's errors about a lost rank or network to ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConnectionError(f"a rank of this model disconnected: {first_line(error)}") from error


def _create_own(groups: Sequence[Sequence[int]], rank: int) -> Any:
    """Create all groups of ranks; the one that contains `rank`, or None."""
    created = [(dist.new_group(list(ranks), group_desc=INFERENCE_GROUP), ranks) for ranks in groups]
    return next((group for group, ranks in created if rank in ranks), None)


def _wait(handles: deque[tuple[Any, Tensor]], *, left: int = 0) -> None:
    while len(handles) > left:
        handles.popleft()[0].wait()
