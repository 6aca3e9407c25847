"""Orders, reports and heartbeats survive JSON and refuse what a node could not act upon."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire.names import acked_field, acked_key, node_queue
from workers.contracts.wire.node_messages import (
    AttemptReport,
    ControlOrder,
    Heartbeat,
    LaunchOrder,
    NodeInventory,
)


def test_messages_round_trip() -> None:
    order = LaunchOrder.from_dict(
        {
            "run": 12,
            "kind": "train",
            "attempt": 1,
            "attempt_id": 40,
            "fence": "f",
            "spec": {"kind": "train"},
            "local_devices": [0, 1],
            "local_ranks": 2,
            "world_size": 4,
            "rank_offset": 2,
            "node_rank": 1,
            "nodes": 2,
            "run_dir": "runs/12/attempt-1",
            "resume_from": {"path": "runs/12/checkpoints/step-5", "step": 5},
        }
    )
    heartbeat = Heartbeat.from_dict(
        {
            "node": "n1",
            "time": 1.0,
            "samples": [{"index": 0, "power_w": 80.5}],
            "attempts": [{"fence": "f", "state": "running"}],
        }
    )
    inventory = NodeInventory.from_dict(
        {
            "name": "n1",
            "address": "10.0.0.1",
            "hostname": "a",
            "cores": 2,
            "memory_bytes": 1,
            "devices": [{"index": 0, "kind": "cpu", "name": "CPU slot", "memory_bytes": 1}],
            "versions": {"python": "3.11"},
        }
    )
    report = AttemptReport.from_dict(
        {
            "attempt_id": 40,
            "fence": "f",
            "node": "n1",
            "seq": 1,
            "time": 1.0,
            "type": "exited",
            "data": {"class": ExitClass.HANG},
        }
    )
    for message in (order, heartbeat, inventory, report):
        assert type(message).from_dict(json.loads(json.dumps(message.to_dict()))) == message
    assert (order.run, order.attempt_id) == ("12", "40")


@pytest.mark.parametrize("change", [{"action": "dance"}, {"grace_s": -1}])
def test_a_wrong_order_is_refused(change: dict[str, object]) -> None:
    right = {"attempt_id": "1", "fence": "f", "action": "cancel"}
    ControlOrder.from_dict(right)
    with pytest.raises(ValidationError):
        ControlOrder.from_dict({**right, **change})


def test_names_on_the_wire() -> None:
    assert (node_queue("n1"), acked_key(4), acked_field("points", 0)) == (
        "node.n1",
        "orrery:acked:4",
        "points/0",
    )


def test_a_field_of_a_newer_sender_is_ignored() -> None:
    right = {"attempt_id": "1", "fence": "f", "action": "cancel"}
    assert ControlOrder.from_dict({**right, "later": 1}) == ControlOrder.from_dict(right)
