"""CPU time and bytes of the history of devices: 1,000 nodes with 8 busy devices each.

Counts this process and the database's server. `--small` uses 100 nodes, `--sqlite` SQLite.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import psutil

from tests.bench.bench_heartbeats import cpu_s
from tests.bench.bench_tick import fill
from tests.bench.record import record
from tests.bench.stack import stack

BEATS = 12  # per minute
MINUTES = 17  # the first quarter hour is summarized
MINUTE_S = 60
DAY_S = 86_400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sqlite", action="store_true")
    args, _ = parser.parse_known_args()
    with stack(postgres=not args.sqlite):
        measure(100 if args.small else 1000)


def measure(count: int) -> None:
    """Gather and write minutes with noisy readings of allocated devices."""
    from django.db import connection
    from django.db.models import Sum
    from django.db.models.functions import Length

    from orchestrator.device_history.gathering import Gathering
    from orchestrator.device_history.models import NodeReadings
    from orchestrator.device_history.packing import empty, pack
    from orchestrator.device_history.series import QUARTER_S
    from orchestrator.device_history.writing import Writer
    from orchestrator.scheduling.accounting.held import held_within
    from tests import factories

    fill(factories.user("bench"), count, count)
    allocate(count)
    server = None
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            server = psutil.Process(cursor.fetchone()[0])
    gathering, writer, noise = Gathering(), Writer(), np.random.default_rng(0)
    nodes = list(factories.Node.objects.values_list("pk", flat=True))
    first = int(time.time()) // QUARTER_S * QUARTER_S
    gathered, written = [], []
    for minute in range(first, first + MINUTES * MINUTE_S, MINUTE_S):
        spent = 0.0
        for beat in range(BEATS):
            messages = [(node, *readings(noise, minute + beat)) for node in nodes]
            before = cpu_s(None)
            for node, samples, machine in messages:
                at = minute + beat * MINUTE_S / BEATS
                gathering.add(node=node, time=at, samples=samples, machine=machine)
            spent += cpu_s(None) - before
        gathered.append(spent)
        before = cpu_s(server)
        assert writer.write(minute, gathering.take(minute), held_within)
        written.append(cpu_s(server) - before)
    rows = NodeReadings.objects.filter(step_s=MINUTE_S, start=first)
    stored = rows.aggregate(size=Sum(Length("data")))["size"]
    per_day = stored / count / 8 * DAY_S / QUARTER_S
    day = empty(DAY_S // QUARTER_S, indexes=range(8))
    for point in range(day.points):
        for index, sample in enumerate(readings(noise, 0)[0]):
            spread = np.array([0.8, 1.0, 1.1])
            values = sample.utilization, sample.memory_used_bytes, sample.power_w
            for metric, value in enumerate((*values, sample.temperature_c)):
                day.devices[index, metric, :, point] = np.float32(value or 0) * spread
    day.other[:] = noise.random(day.other.shape)
    more: dict[str, Any] = {"nodes": count, "devices": 8 * count, "database": connection.vendor}
    share = (sum(gathered) / MINUTES + sum(written) / MINUTES) / MINUTE_S
    file = "device_history"
    record(file, what="CPU in all", value=share, unit="of a core", figure="<= 0.03", **more)
    record(file, what="CPU to gather a minute", value=sum(gathered) / MINUTES, unit="s", **more)
    record(
        file, what="CPU to write a minute", value=sorted(written)[MINUTES // 2], unit="s", **more
    )
    record(file, what="CPU to write and close a quarter", value=written[15], unit="s", **more)
    record(file, what="minutes: bytes per device and day", value=per_day, unit="bytes", **more)
    quarters = len(pack(day)) / 8
    record(file, what="quarters: bytes per device and day", value=quarters, unit="bytes", **more)
    total = count * 8 * (7 * per_day + 90 * quarters) / 2**30
    record(file, what="all that is retained", value=total, unit="GiB", **more)


def allocate(count: int) -> None:
    """Every device is held by the attempt of a run on its node."""
    from django.apps import apps

    from tests import factories

    allocation = apps.get_model("scheduling", "Allocation")
    runs = list(apps.get_model("runs", "Run").objects.order_by("pk")[:count])
    model = apps.get_model("runs", "Attempt")
    attempts = model.objects.bulk_create(
        (model(run=run, number=1, state="running") for run in runs), batch_size=500
    )
    rows = []
    for node, attempt in zip(factories.Node.objects.order_by("pk"), attempts, strict=True):
        for device in node.devices.all():
            rows.append(allocation(attempt=attempt, device=device, rank=device.index))
    allocation.objects.bulk_create(rows, batch_size=500)


def readings(noise: np.random.Generator, at: float) -> tuple[list[Any], Any]:
    """Eight busy GPUs and their node."""
    from workers.contracts.wire.node_messages import DeviceSample, NodeSample

    values = noise.normal(size=(8, 3))
    samples = [
        DeviceSample.model_construct(
            index=index,
            utilization=min(1.0, 0.93 + 0.04 * use),
            memory_used_bytes=70 * 2**30,
            power_w=645.0 + 25 * power,
            temperature_c=float(round(61 + 2 * heat)),
        )
        for index, (use, power, heat) in enumerate(values.tolist())
    ]
    machine = NodeSample.model_construct(
        cpu_utilization=0.2 + 0.02 * values[0, 0],
        memory_used_bytes=300 * 2**30,
        power_w=350.0 + 10 * values[0, 1],
        temperature_c=55.0,
        received_bytes=int(at * 1e9),
        sent_bytes=int(at * 1e9),
        rdma_received_bytes=None,
        rdma_sent_bytes=None,
    )
    return samples, machine


if __name__ == "__main__":
    main()
