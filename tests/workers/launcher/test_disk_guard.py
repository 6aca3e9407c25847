"""Points and events that exceed their disk space: acknowledged lines first, then a recorded gap."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.workers.launcher.flood import disk_bytes
from tests.workers.launcher.harness import Node, script
from workers.launcher.shipping import disk_guard, file_space
from workers.launcher.shipping.outbox import Outbox
from workers.launcher.shipping.telemetry_sender import _gaps

MIB = 1024 * 1024
ENDLESS_POINTS = """
    row = {"run": "?", "attempt": 1, "rank": 0, "tokens": 1, "time": time.time()}
    values = {"metric/%d" % i: 0.5 for i in range(100)}
    for n in range(1, COUNT):
        points.write(json.dumps({**row, "seq": n, "step": n, "values": values}) + "\\n")
    points.flush()
"""


def write(path: Path, numbers: range, size: int = 1000) -> Outbox:
    lines = (json.dumps({"seq": number, "text": "x" * size}) + "\n" for number in numbers)
    with open(path, "a") as file:
        file.writelines(lines)
    return Outbox(path)


def numbers_of(box: Outbox) -> list[int]:
    numbers = []
    while (chunk := box.read()) is not None:
        numbers += [row["seq"] for row in chunk[0]]
        box.sent(chunk[1])
    return numbers


def test_acknowledged_lines_are_freed_before_others_are_dropped(tmp_path: Path) -> None:
    box = write(tmp_path / "points.jsonl", range(1, 3001))
    other = write(tmp_path / "events.jsonl", range(1, 101))
    numbers_of(box)
    assert box.acknowledge(3000)
    write(box.path, range(3001, 4001))
    disk_guard.limit([box, other], 2 * MIB)
    assert box.path.stat().st_blocks * 512 < 1.3 * MIB and box.dropped_bytes == 0
    assert (numbers_of(box), numbers_of(other)) == ([*range(3001, 4001)], [*range(1, 101)])
    box.rewind()  # after a lost connection
    assert numbers_of(box)[0] == 3001


def test_the_oldest_of_the_largest_file_are_dropped_and_counted(tmp_path: Path) -> None:
    box = write(tmp_path / "points.jsonl", range(1, 5001))
    other = write(tmp_path / "events.jsonl", range(1, 101))
    sent = box.read()
    assert sent is not None
    disk_guard.limit([box, other], 2 * MIB)
    box.sent(sent[1])  # was read before the drop
    left = numbers_of(box)
    assert left == [*range(left[0], 5001)] and 1000 < len(left) < 2000
    assert box.path.stat().st_blocks * 512 <= 1.6 * MIB
    assert box.dropped_bytes == pytest.approx((5000 - len(left)) * 1025, rel=0.01)
    assert (box.acknowledge(5000), box.drained, box.skipped) == (True, True, 0)
    assert numbers_of(other) == [*range(1, 101)]


def test_without_hole_punching_lines_are_dropped_only_for_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_space, "punch", lambda path, until: False)
    box = write(tmp_path / "points.jsonl", range(1, 3001))
    numbers_of(box)
    assert box.acknowledge(3000)
    write(box.path, range(3001, 3101))
    for _ in range(5):
        disk_guard.limit([box], 2 * MIB)
    assert (box.dropped_bytes, numbers_of(box)) == (0, [*range(3001, 3101)])
    write(box.path, range(3101, 6101))
    for _ in range(5):
        disk_guard.limit([box], 2 * MIB)
    left = numbers_of(box)
    assert left == [*range(left[0], 6101)] and 1000 < len(left) < 2000, "one drop was enough"


def test_a_drop_ends_at_the_end_of_the_file(tmp_path: Path) -> None:
    box = write(tmp_path / "points.jsonl", range(1, 11))
    for _ in range(3):
        box.drop(10 * MIB)
    assert box.acked_offset == box.dropped_bytes == box.path.stat().st_size
    write(box.path, range(11, 14))
    assert numbers_of(box) == [11, 12, 13]


def test_missing_numbers_are_reported_as_lost() -> None:
    events = [{"seq": number} for number in (5, 6, 9, 4, 10)]
    assert _gaps({"stream": "events", "events": events}, 2) == [[3, 4], [7, 8]]
    assert _gaps({"stream": "points", "batch": {"seq": [3, 4]}}, 2) == []
    assert _gaps(None, 2) == []


def test_a_program_that_floods_its_points_is_limited_and_recorded(node: Node, monkeypatch) -> None:
    monkeypatch.setenv("ORRERY_OUTBOX_MB", "8")
    text = ENDLESS_POINTS.replace("COUNT", "20000")  # 40 MB
    order = node.order(script(text, points=True), ranks=1)
    run_dir = node.launch(order)
    largest = 0
    deadline = time.monotonic() + 100
    while not any(report["type"] == "exited" for report in list(node.reports)):
        largest = max(largest, disk_bytes(run_dir))
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert node.exited(order)["class"] == "ok"
    assert largest < 36 * MIB, "the limit, and what is written between two looks"
    seqs = node.seqs("points", 0)
    assert seqs[-1] == 19_999
    if len(set(seqs)) < 19_999:
        events = [report["data"] for report in node.reports if report["type"] == "event"]
        data = next(event["data"] for event in events if event["type"] == "telemetry_dropped")
        assert data["stream"] == "points" and "ORRERY_OUTBOX_MB" in data["message"]
