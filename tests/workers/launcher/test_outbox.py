"""An outbox holds back what ingest does not acknowledge, and loses nothing by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.launcher.shipping import outbox
from workers.launcher.shipping.outbox import STALLED_AFTER_S, STALLED_BYTES, Outbox

Clock = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Advances the monotonic clock of outboxes."""
    now = [1000.0]
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.fixture
def box(tmp_path: Path, wait: Clock, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    """An outbox with 2 MiB of lines, which reads 64 KiB at once."""
    monkeypatch.setattr(outbox, "READ_BYTES", 64 * 1024)
    row = "x" * 1000
    lines = (json.dumps({"seq": number, "text": row}) for number in range(1, 2001))
    (tmp_path / "logs.jsonl").write_text("\n".join(lines) + "\n")
    return Outbox(tmp_path / "logs.jsonl")


def send(box: Outbox, most: int = 1000) -> int:
    """Send what the window allows, at most this many batches; how many bytes."""
    sent = 0
    for _ in range(most):
        chunk = box.read()
        if chunk is None:
            break
        box.sent(chunk[1])
        sent += chunk[1].size
    return sent


def test_little_is_in_flight_while_nothing_is_acknowledged(box: Outbox, wait: Clock) -> None:
    assert send(box, 2) < STALLED_BYTES
    wait(STALLED_AFTER_S + 1)
    send(box)
    in_flight = box.last_sent
    assert 200 < in_flight < 400, "256 KiB and the batch that exceeds it"
    wait(600)
    assert send(box) == 0 and not box.drained
    # a reconnection sends the same lines again, and no more
    box.rewind()
    send(box)
    assert box.last_sent == in_flight
    # one acknowledgement opens the window
    assert box.acknowledge(in_flight)
    assert send(box) > 1_000_000
    assert box.last_sent == 2000 and box.acknowledge(2000) and box.drained


def test_the_window_is_wide_while_acknowledgements_arrive(box: Outbox, wait: Clock) -> None:
    assert send(box, 5) > STALLED_BYTES
    wait(STALLED_AFTER_S / 2)
    assert box.acknowledge(100)
    wait(STALLED_AFTER_S - 1)
    assert send(box) > 1_000_000


def test_a_pause_of_the_program_is_no_stall(box: Outbox, wait: Clock) -> None:
    wait(3600)
    assert send(box) > 1_000_000


def test_the_files_of_an_attempt_share_a_window(
    box: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "ATTEMPT_BYTES", 8 * 128 * 1024)
    outbox.share_window([box, *(Outbox(box.path) for _ in range(7))])
    assert 128 * 1024 < send(box) <= 128 * 1024 + 2 * outbox.READ_BYTES
