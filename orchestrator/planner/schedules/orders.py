"""Operations of each device of a pipeline, in order, for every schedule.

Does not depend on time, memory or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from workers.contracts.specs.plan import INTERLEAVED, V_SHAPED, Schedule

SCHEDULES: tuple[str, ...] = get_args(Schedule)

# F forward, B full backward, I input gradient, W weight gradient, FB a forward overlapped with a
# full backward
Kind = Literal["F", "B", "I", "W", "FB"]


class Operation(NamedTuple):
    """One computation on one device.

    The last two fields are the backward half of an `FB`, else -1.
    """

    kind: Kind
    stage: int
    micro_batch: int
    backward_stage: int = -1
    backward_micro_batch: int = -1


Order = list[Operation]


def device_of_stage(schedule: str, pp: int, stage: int) -> int:
    """The device of a stage.

    V schedules are folded once (stages i and 2·pp-1-i together), others assign stages round robin.
    Folding moves layers without copies: `dualpipev` is one half of DualPipe, each device holds 2 of
    the 2·pp stages and the model's parameters once (arXiv 2412.19437; the original DualPipe has two
    copies on the same devices).
    """
    return 2 * pp - 1 - stage if schedule in V_SHAPED and stage >= pp else stage % pp


@lru_cache(maxsize=256)
def problem_of(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> str | None:
    """Message on why this pipeline cannot run; None if it can."""
    pipeline = (
        f"{schedule} with pp {pp}, virtual_stages {virtual_stages}, {micro_batches} micro-batches"
    )
    if schedule not in SCHEDULES:
        return f"unknown schedule {schedule!r}; known are {', '.join(SCHEDULES)}"
    for name, count in (
        ("pp", pp),
        ("virtual_stages", virtual_stages),
        ("micro-batches", micro_batches),
    ):
        if count < 1:
            return f"{pipeline}: {name} is {count}, must be at least 1"
    if schedule in V_SHAPED and virtual_stages != 2:
        return f"{pipeline}: it folds the pipeline in two, virtual_stages must be 2"
    if schedule in INTERLEAVED and virtual_stages < 2:
        return (
            f"{pipeline}: virtual_stages must be at least 2; one stage per device is schedule 1f1b"
        )
    if schedule not in V_SHAPED | INTERLEAVED and virtual_stages != 1:
        return (
            f"{pipeline}: it has one stage per device, virtual_stages must be 1; several are "
            "schedule "
            "interleaved_1f1b"
        )
    if schedule in INTERLEAVED and micro_batches % _rounds(pp, micro_batches):
        return (
            f"{pipeline}: micro-batches must divide into {_rounds(pp, micro_batches)} equal "
            "rounds. Use a multiple of pp."
        )
    if schedule == "dualpipev" and micro_batches < 2 * pp:
        return f"{pipeline}: at least 2 x pp = {2 * pp} micro-batches are needed. Use schedule zbv."
    return None


def check(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> None:
    """Raises ValueError with the problem and a hint if this pipeline cannot run."""
    if problem := problem_of(schedule, pp, virtual_stages, micro_batches):
        raise ValueError(problem)


def device_orders(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> list[Order]:
    """Operations of each of the `pp` devices in execution order.

    They are the orders of torch.distributed.pipelining 2.13 if it has the schedule: GPipe (arXiv
    1811.06965), 1F1B and interleaved 1F1B (2104.04473), `zb1p` its interleaved zero bubble and
    `zbv` (2401.10241), `dualpipev` (2412.19437). `naive` finishes a micro-batch before it starts
    the next one. `pipedream` (1806.03377) runs the order of 1F1B without flushing; this is its
    start. Raises ValueError for a pipeline that cannot run.
    """
    check(schedule, pp, virtual_stages, micro_batches)
    return [
        list(_ORDERS[schedule](pp, virtual_stages, micro_batches, device)) for device in range(pp)
    ]


def _rounds(pp: int, micro_batches: int) -> int:
    return max(1, micro_batches // pp)


def _naive(pp: int, v: int, m: int, device: int) -> Iterator[Operation]:
    for micro_batch in range(m):
        yield Operation("F", device, micro_batch)
        yield Operation("B", device, micro_batch)


def _gpipe(pp: int, v: int, m: int, device: int) -> Iterator[Operation]:
    yield from (Operation("F", device, micro_batch) for micro_batch in range(m))
    yield from (Operation("B", device, micro_batch) for micro_batch in range(m))


def _one_forward_one_backward(pp: int, v: int, m: int, device: int) -> Iterator[Operation]:
    ahead = min(m, pp - 1 - device)
    yield from (Operation("F", device, micro_batch) for micro_batch in range(ahead))
    for micro_batch in range(m):
        if ahead + micro_batch < m:
            yield Operation("F", device, ahead + micro_batch)
        yield Operation("B", device, micro_batch)


def _interleaved(pp: int, v: int, m: int, device: int, split: bool = False) -> Iterator[Operation]:
    """Chunks alternate, one round of micro-batches each; `split` delays weight gradients by
    the index of the device.
    """
    per_round = m // _rounds(pp, m)
    forwards = ((chunk * pp + device, mb) for chunk, mb in _turns(range(v), per_round, m))
    backwards = deque(
        (chunk * pp + device, mb) for chunk, mb in _turns(range(v)[::-1], per_round, m)
    )
    weights = deque(backwards)
    warm_up = min((v - 1) * per_round + (1 if split else 2) * (pp - 1 - device), v * m)
    for _ in range(warm_up):
        yield Operation("F", *next(forwards))
    for turn in range(v * m):
        if turn < v * m - warm_up:
            yield Operation("F", *next(forwards))
        yield Operation("I" if split else "B", *backwards.popleft())
        if split and turn >= device:
            yield Operation("W", *weights.popleft())
    if split:
        yield from (Operation("W", *weight) for weight in weights)


def _turns(chunks: range, per_round: int, m: int) -> Iterator[tuple[int, int]]:
    for start in range(0, m, per_round):
        for chunk in chunks:
            yield from ((chunk, micro_batch) for micro_batch in range(start, start + per_round))


def _zb1p(pp: int, v: int, m: int, device: int) -> Iterator[Operation]:
    return _interleaved(pp, v, m, device, split=True)


def _zbv(pp: int, v: int, m: int, device: int) -> Iterator[Operation]:
    """The order of at least 2·pp-1 micro-batches, without those that a smaller batch lacks."""
    down, up = device, 2 * pp - 1 - device
    planned = max(m, 2 * pp - 1)
    count = _Counter(down, up)

    def plan() -> Iterator[Operation]:
        for _ in range(2 * (pp - device) - 1):
            yield count("F", down)
        for _ in range(device):
            yield count("F", up)
            yield count("F", down)
        for _ in range(pp - device):
            yield count("F", up)
            yield count("I", up)
            yield count("W", up)
        while count.of["F", up] < planned:
            if count.of["F", down] < planned:
                yield count("F", down)
            yield count("I", down)
            yield count("W", down)
            yield count("F", up)
            yield count("I", up)
            yield count("W", up)
        for _ in range(device):
            yield count("I", down)
            yield count("I", up)
        for _ in range(pp - device):
            yield count("I", down)
            yield count("W", down)
        for stage in (up, down):
            while count.of["W", stage] < count.of["I", stage]:
                yield count("W", stage)

    return (operation for operation in plan() if operation.micro_batch < m)


def _dualpipev(pp: int, v: int, m: int, device: int) -> Iterator[Operation]:
    down, up = device, 2 * pp - 1 - device
    after = pp - 1 - device
    count = _Counter(down, up)
    weights: deque[Operation] = deque()

    def input_gradient(stage: int) -> Operation:
        operation = count("I", stage)
        weights.append(Operation("W", stage, operation.micro_batch))
        return operation

    def pair(forward: int, backward: int) -> Operation:
        return Operation("FB", *count("F", forward)[1:3], *count("I", backward)[1:3])

    for _ in range(2 * after):
        yield count("F", down)
    for _ in range(device + 1):
        yield count("F", down)
        yield count("F", up)
    for _ in range(after):
        yield input_gradient(up)
        yield weights.popleft()
        yield count("F", up)
    for turn in range(m - 2 * pp + device + 1):
        # the last device runs its first pair separately, so that the backward starts earlier
        if turn == 0 and after == 0:
            yield count("F", down)
            yield count("I", up)._replace(kind="B")
        else:
            yield pair(down, up)
        yield pair(up, down)
    for _ in range(after):
        yield count("I", up)._replace(kind="B")
        yield pair(up, down)
    # in the second half weight gradients are delayed to fill the end
    for turn in range(2 * (device + 1)):
        stage = down if turn % 2 else up
        yield input_gradient(stage) if turn > device else count("I", stage)._replace(kind="B")
    for _ in range(after):
        if weights:
            yield weights.popleft()
        yield input_gradient(down)
    yield from weights


class _Counter:
    """Numbers the micro-batches of each (kind, stage): 0, 1, 2, …"""

    def __init__(self, *stages: int) -> None:
        self.of: dict[tuple[Kind, int], int] = {
            (kind, s): 0 for kind in get_args(Kind) for s in stages
        }

    def __call__(self, kind: Kind, stage: int) -> Operation:
        micro_batch = self.of[kind, stage]
        self.of[kind, stage] += 1
        return Operation(kind, stage, micro_batch)


_ORDERS: dict[str, Callable[[int, int, int, int], Iterator[Operation]]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "zb1p": _zb1p,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
    "pipedream": _one_forward_one_backward,
}
