"""From heartbeats to stored minutes and quarter hours, idle devices and energy of attempts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs import retention
from orchestrator.device_history import idle, recorder, selectors
from orchestrator.device_history.gathering import Gathering
from orchestrator.device_history.models import (
    AttemptHour,
    IdleDevice,
    NodeReadings,
    PoolReadings,
)
from orchestrator.device_history.packing import empty, pack, unpack
from orchestrator.device_history.series import DEVICE, MAX, MEAN, MIN, NODE
from orchestrator.fleet.models import Node
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.accounting.held import held_within
from orchestrator.scheduling.models import Allocation
from tests import factories
from tests.conftest import FakeClock
from workers.contracts.wire.node_messages import DeviceSample, NodeSample

pytestmark = pytest.mark.django_db
START = datetime(2026, 3, 9, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def gathering(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    """Nothing from other tests."""
    fresh = Gathering()
    monkeypatch.setattr(recorder, "gathering", fresh)
    return fresh


def hold(owner: User, node: Node, *, devices: int = 2, since: datetime = START) -> Attempt:
    attempt = factories.running(factories.run(owner, devices=devices), node)
    for rank, device in enumerate(node.devices.order_by("index")[:devices]):
        Allocation.objects.create(attempt=attempt, device=device, rank=rank, created=since)
    return attempt


def minutes(
    gathering: Gathering,
    node: Node,
    *,
    first: int,
    count: int,
    use: tuple[float, ...],
    power: float | None = None,
    machine: NodeSample | None = None,
    write: recorder.Recorder | None = None,
    clock: FakeClock | None = None,
) -> None:
    """Heartbeats every 15 s from minute `first`; each minute is written once it has ended."""
    for minute in range(first, first + count):
        begin = START + timedelta(minutes=minute)
        for part in range(4):
            gathering.add(
                node=node.pk,
                time=begin.timestamp() + 15 * part,
                samples=[
                    DeviceSample(
                        index=index,
                        utilization=value,
                        memory_used_bytes=part * 2**30,
                        power_w=power,
                    )
                    for index, value in enumerate(use)
                ],
                machine=machine,
            )
        if write is not None and clock is not None:
            clock.time = begin + timedelta(seconds=70)
            write.write_due()


def test_packing_keeps_three_statistics_within_their_precision() -> None:
    chunk = empty(15, indexes=(0, 3))
    rng = np.random.default_rng(0)
    chunk.devices[:] = rng.random(chunk.devices.shape) * np.array([1, 8e10, 700, 90])[:, None, None]
    chunk.devices[1, 2, :, 4] = np.nan
    back = unpack(pack(chunk))
    assert back.indexes == (0, 3)
    assert np.isnan(back.devices[1, 2, :, 4]).all() and np.isnan(back.other).all()
    most = np.nanmax(chunk.devices, axis=(0, 2, 3))[None, :, None, None]
    assert np.nanmax(np.abs(back.devices - chunk.devices) / most) < 1e-5


def test_minutes_become_quarters_that_a_new_process_continues(
    gathering: Gathering, clock: FakeClock, owner: User
) -> None:
    node = factories.node("orion", devices=2)
    first = recorder.Recorder(held_within)
    minutes(
        gathering, node, first=0, count=10, use=(0.5, 0.1), power=100.0, write=first, clock=clock
    )
    second = recorder.Recorder(held_within)  # the scheduler has restarted
    minutes(
        gathering, node, first=10, count=7, use=(1.0, 0.1), power=50.0, write=second, clock=clock
    )
    rows = NodeReadings.objects.order_by("step_s", "start").values_list("step_s", "start", "open")
    noon = int(START.timestamp())
    day = noon // 86400 * 86400
    assert list(rows) == [(60, noon, False), (60, noon + 900, True), (900, day, False)]
    quarter = unpack(NodeReadings.objects.get(step_s=900).data).devices[
        0, :, :, (noon - day) // 900
    ]
    use, memory = quarter[DEVICE.index("utilization")], quarter[DEVICE.index("memory_used_bytes")]
    assert (use[MIN], use[MAX]) == (0.5, 1.0)
    assert use[MEAN] == pytest.approx((10 * 0.5 + 5 * 1.0) / 15, rel=1e-4)
    assert (memory[MIN], memory[MAX]) == (0, 3 * 2**30)
    over = selectors.period(until=clock.now(), seconds=3600, points=60)
    history = selectors.node_history(node=node, over=over)
    known = selectors.plain(history.devices[0, 0, MEAN])
    assert [value for value in known if value is not None] == [0.5] * 10 + [1.0] * 7
    # a long period adds the minutes that are not summarized yet
    week = selectors.period(until=clock.now(), seconds=7 * 86400, points=672)
    values = selectors.plain(selectors.node_history(node=node, over=week).devices[0, 0, MEAN])
    assert [value for value in values if value is not None] == [pytest.approx(2 / 3, rel=1e-4), 1.0]
    fleet = selectors.fleet_history(over=over)
    assert {float(value) for value in fleet["devices"][MEAN] if value == value} == {2.0}


def test_attempts_get_energy_and_idle_time_of_what_they_held(
    gathering: Gathering, clock: FakeClock, owner: User
) -> None:
    node = factories.node("orion", devices=4)
    node.devices.update(kind="gpu")
    attempt = hold(owner, node, since=START + timedelta(seconds=30))
    write = recorder.Recorder(held_within)
    cpu = NodeSample(power_w=80.0)
    minutes(
        gathering,
        node,
        first=0,
        count=2,
        use=(0.9, 0.01, 0.0, 0.0),
        power=200.0,
        machine=cpu,
        write=write,
        clock=clock,
    )
    hour = AttemptHour.objects.get()
    assert (hour.attempt, hour.hour) == (attempt, int(START.timestamp()))
    # 30 s and 60 s of two devices; each with a quarter of the CPU's power
    assert (hour.read_s, hour.measured_s, hour.idle_s) == (180.0, 180.0, 90.0)
    assert hour.energy_j == pytest.approx(180 * 220.0)
    assert hour.busy_s == pytest.approx(90 * 0.91)
    pool = unpack(PoolReadings.objects.get().data).other[:, MEAN, 1].tolist()
    assert pool == pytest.approx([4, 2, 1, 1, 0.91, 880, 4], rel=1e-4)


def test_idle_devices_are_listed_until_they_work_or_are_released(
    gathering: Gathering, clock: FakeClock, owner: User
) -> None:
    node = factories.node("orion", devices=2)
    attempt = hold(owner, node)
    write = recorder.Recorder(held_within)
    minutes(gathering, node, first=0, count=12, use=(0.0, 0.02), write=write, clock=clock)
    assert [
        (row.node, row.index, row.since) for row in idle.idle_devices_visible_to(user=owner)
    ] == [
        ("orion", 0, START),
        ("orion", 1, START),
    ]
    minutes(gathering, node, first=12, count=1, use=(0.0, 0.5), write=write, clock=clock)
    assert [row.index for row in idle.idle_devices_visible_to(user=owner)] == [0]
    Allocation.objects.filter(attempt=attempt).update(released=clock.now())
    minutes(gathering, node, first=13, count=1, use=(0.0, 0.0), write=write, clock=clock)
    assert not IdleDevice.objects.exists()


def test_network_counters_become_rates_and_a_restart_is_a_gap(gathering: Gathering) -> None:
    node = factories.node("orion")
    for second, received in ((0, 1000), (10, 21_000), (20, 5), (30, 1005)):
        gathering.add(
            node=node.pk,
            time=START.timestamp() + second,
            samples=[],
            machine=NodeSample(received_bytes=received, sent_bytes=0),
        )
    point = gathering.take(int(START.timestamp()))[node.pk]
    received = point.other[NODE.index("received_bytes_per_s")]
    assert (received[MIN], received[MEAN], received[MAX]) == (100, 1050, 2000)
    assert np.isnan(point.other[NODE.index("rdma_sent_bytes_per_s")]).all()


def test_a_removed_node_and_unknown_power_are_left_out(
    gathering: Gathering, clock: FakeClock, owner: User
) -> None:
    node, other = factories.node("orion", devices=1), factories.node("lyra", devices=1)
    hold(owner, node, devices=1)
    minutes(gathering, node, first=0, count=1, use=(0.5,))
    minutes(gathering, other, first=0, count=1, use=(0.5,))
    other.delete()
    clock.time = START + timedelta(seconds=70)
    assert recorder.Recorder(held_within).write_due() == 1
    assert NodeReadings.objects.get().node == node
    hour = AttemptHour.objects.get()
    assert (hour.read_s, hour.measured_s, hour.energy_j) == (60.0, 0.0, 0.0)


def test_retention_deletes_minutes_before_quarters(clock: FakeClock) -> None:
    node = factories.node("orion", devices=1)
    day = int(START.timestamp()) // 86400 * 86400
    for step, back in ((60, 8), (60, 1), (900, 89), (900, 92)):
        NodeReadings.objects.create(
            node=node, step_s=step, start=day - back * 86400, data=pack(empty(1))
        )
    clock.time = START
    counts = retention.retain(
        policies=retention.POLICIES, now=START, dry_run=False, renew=lambda: None
    )
    assert (counts["node_minutes"], counts["node_quarters"], counts["pool_minutes"]) == (1, 1, 0)
    assert NodeReadings.objects.count() == 2
