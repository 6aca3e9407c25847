"""Log lines: carriage returns, long lines, limits with gap records, full disks, floods."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest

from tests.workers.launcher.flood import FLOOD, LOUD, disk_bytes, peak_bytes
from tests.workers.launcher.harness import Node, script
from workers.launcher.rundir import write_json
from workers.launcher.shipping import log_capture
from workers.launcher.shipping.log_capture import LogCollector
from workers.launcher.shipping.outbox import LONGEST_ROW, Outbox

MIB = 1024 * 1024


def texts(folder: Path) -> list[str]:
    return [row["text"] for row in rows(folder)]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "logs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b" 10%\r 50%\r100%\n", ["100%"]),
        (b"windows\r\nline\r\n", ["windows", "line"]),
        (b"\r" * 2000 + b"shown\n", ["shown"]),
        (b"\n\n", ["", ""]),
        (b"no end", ["no end"]),
        (b"bad \xff utf\n", ["bad � utf"]),
        (b"zero\x00\n", ["zero�"]),
    ],
)
def test_lines_are_stored_as_a_terminal_shows_them(tmp_path, output, lines) -> None:
    (tmp_path / "stdout.log").write_bytes(output)
    LogCollector(tmp_path).collect(final=True)
    assert texts(tmp_path) == lines
    assert rows(tmp_path)[-1]["end"] == len(output)


def test_a_long_line_is_split_and_loses_nothing(tmp_path) -> None:
    line = bytes(ord("a") + i % 26 for i in range(700_000))
    (tmp_path / "stdout.log").write_bytes(line + b"\nnext\n")
    LogCollector(tmp_path).collect(final=True)
    *parts, last = texts(tmp_path)
    assert "".join(parts).encode() == line and last == "next"
    assert max(len(part) for part in parts) <= 8192


def test_an_overwritten_line_without_an_end_takes_no_memory(tmp_path) -> None:
    with open(tmp_path / "stdout.log", "wb") as file:
        for step in range(100_000):
            file.write(b"\rstep %d of 100000" % step)
    collector = LogCollector(tmp_path)
    while collector.collect():
        pass
    collector.collect(final=True)
    assert texts(tmp_path)[-1] == "step 99999 of 100000"
    assert len(texts(tmp_path)) <= 10  # not one per overwrite


def test_a_progress_bar_is_stored_while_it_runs(tmp_path, monkeypatch) -> None:
    (tmp_path / "stdout.log").write_bytes(b"\r10%\r20%")
    collector = LogCollector(tmp_path)
    assert collector.collect() == 0
    monkeypatch.setattr(log_capture, "_PROGRESS_S", 0.0)
    assert collector.collect() == 1 and texts(tmp_path) == ["20%"]


def test_what_exceeds_the_limit_is_dropped_and_recorded(tmp_path) -> None:
    written = 40_000
    with open(tmp_path / "stdout.log", "wb") as file:
        for number in range(written):
            file.write(b"line %06d\n" % number)
    collector = LogCollector(tmp_path, limit=512 * 1024)
    collector.collect(final=True)
    lines = texts(tmp_path)
    announced = next(i for i, line in enumerate(lines) if line.startswith("[orrery: the limit"))
    gap = next(line for line in lines if "were dropped" in line)
    dropped = int(gap.split()[1].replace(",", ""))
    assert "512" in lines[announced] or "0.5 MiB" in lines[announced]
    assert dropped + sum(line.startswith("line ") for line in lines) == written
    assert lines[-1] == f"line {written - 1:06d}"  # the end is stored
    seqs = [row["seq"] for row in rows(tmp_path)]
    assert seqs == list(range(1, len(seqs) + 1))  # the receiver acknowledges without gaps


def test_read_output_frees_its_disk_space(tmp_path) -> None:
    path = tmp_path / "stdout.log"
    collector = LogCollector(tmp_path, limit=MIB)
    with open(path, "ab", buffering=0) as file:
        for _ in range(20):
            file.write(b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 5000)
            collector.collect()
            assert path.stat().st_blocks * 512 <= 2.5 * MIB
        file.write(b"the end\n")
    assert path.stat().st_size > 9 * MIB
    assert path.read_bytes().startswith(b"[orrery:")
    collector.collect(final=True)
    assert texts(tmp_path)[-1] == "the end"


def test_output_written_faster_than_it_is_read_is_dropped_and_recorded(tmp_path) -> None:
    (tmp_path / "stdout.log").write_bytes(b"a line\n" * 1_000_000 + b"the end\n")
    LogCollector(tmp_path, limit=MIB).collect(final=True)
    lines = texts(tmp_path)
    assert "bytes of stdout.log were dropped" in lines[0] and lines[-1] == "the end"


def test_a_final_read_is_bounded_in_time_and_continues(tmp_path) -> None:
    (tmp_path / "stdout.log").write_bytes(b"a line\n" * 100_000 + b"without an end")
    collector = LogCollector(tmp_path)
    assert 0 < collector.collect(final=True, seconds=0.0) < 100_000
    assert collector.behind
    collector.collect(final=True)
    assert not collector.behind and collector.seq == 100_001
    assert texts(tmp_path)[-1] == "without an end"


def test_a_successor_continues_behind_the_stored_lines(tmp_path) -> None:
    (tmp_path / "stdout.log").write_bytes(b"one\rtwo\nthree\n")
    LogCollector(tmp_path).collect()
    with open(tmp_path / "stdout.log", "ab") as file:
        file.write(b"four\n")
    LogCollector(tmp_path).collect(final=True)
    assert texts(tmp_path) == ["two", "three", "four"]


def test_a_full_disk_loses_no_line(tmp_path, monkeypatch) -> None:
    (tmp_path / "stdout.log").write_bytes(b"one\ntwo\n")
    collector = LogCollector(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LogCollector, "_append", full)
        with pytest.raises(OSError, match="No space left"):
            collector.collect()
    assert collector.collect() == 2 and texts(tmp_path) == ["one", "two"]


def test_a_row_that_is_too_long_is_skipped_and_counted(tmp_path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_bytes(b'{"seq":1}\n' + b"x" * (LONGEST_ROW * 2) + b'\n{"seq":2}\n')
    box, seqs = Outbox(path), []
    while (chunk := box.read()) is not None:
        seqs += [row["seq"] for row in chunk[0]]
        box.sent(chunk[1])
        box.acknowledge(chunk[1].last_seq)
    assert seqs == [1, 2] and box.skipped == 1
    assert box.drained


def test_a_flood_is_bounded_in_memory_and_disk(node: Node, monkeypatch) -> None:
    monkeypatch.setenv("ORRERY_LOG_MB", "4")
    order = node.order(script(FLOOD.replace("BYTES", "60_000_000")), ranks=1)
    run_dir = node.launch(order)
    peak = 0
    deadline = time.monotonic() + 100
    while not any(r["type"] == "exited" for r in list(node.reports)):
        peak = max(peak, peak_bytes(run_dir))
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert node.exited(order)["class"] == "ok"
    node.until(lambda: "the end" in node.lines(0), 30, "the last line")
    assert peak <= 150 * MIB, peak
    assert any("dropped" in line for line in node.lines(0))
    # stored lines, and the raw file: its unread part, and one limit that is not freed yet
    assert disk_bytes(run_dir) <= 4 * 4 * MIB


def test_a_flooding_run_can_be_cancelled(node: Node, monkeypatch) -> None:
    """It would write for hours."""
    monkeypatch.setenv("ORRERY_LOG_MB", "4")
    order = node.order(script(LOUD.replace("BYTES", "10**12")), ranks=1)
    run_dir = node.launch(order)
    node.until(lambda: any("the limit" in line for line in node.lines(0)), 60, "the limit")
    write_json(
        run_dir.request,
        {"action": "cancel", "grace_s": 2.0, "attempt_id": "71", "fence": order["fence"]},
    )
    assert node.exited(order)["class"] == "cancelled"
    assert any("were dropped" in line for line in node.lines(0))
