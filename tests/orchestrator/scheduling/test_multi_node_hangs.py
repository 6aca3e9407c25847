"""A hang over two nodes gives one event that names the late node, or a node without a report."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Attempt, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.reports import multi_node_hangs
from orchestrator.scheduling.reports.exit_merge import first_cause
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.wire.rank_progress import RankProgress

pytestmark = pytest.mark.django_db


@pytest.fixture
def nodes(broker: Broker, owner: User) -> tuple[Attempt, FakeNode, FakeNode]:
    made = [factories.node(name, devices=2) for name in ("n1", "n2")]
    run = factories.run(owner, devices=4)
    services.tick()
    return Attempt.objects.select_related("run").get(run=run), FakeNode(made[0]), FakeNode(made[1])


def send_progress(node: FakeNode, attempt: Attempt, *ranks: RankProgress) -> None:
    data: dict[str, Any] = {"quiet_s": 9.0, "standings": [rank.to_dict() for rank in ranks]}
    assert node.send_report(attempt, "event", type="hang", data=data)


def progress(rank: int, calls: int) -> RankProgress:
    return RankProgress(
        rank=rank,
        step=9,
        phase="backward",
        idle_s=9.0,
        marks=40,
        stage=rank // 2,
        calls={"all": calls},
    )


def hangs() -> list[tuple[int | None, dict[str, Any]]]:
    return [(event.rank, event.data) for event in RunEvent.objects.filter(type="hang")]


def test_the_node_of_the_late_rank_is_named_once(
    nodes: tuple[Attempt, FakeNode, FakeNode],
) -> None:
    attempt, first, second = nodes
    send_progress(first, attempt, progress(0, 30), progress(1, 30))
    assert hangs() == [], "its ranks only wait; the other node has the cause"
    send_progress(second, attempt, progress(2, 30), progress(3, 29))
    [(rank, data)] = hangs()
    assert (rank, data["node"], data["stage"], data["ranks"], data["waiting"]) == (
        3,
        "n2",
        1,
        [3],
        [0, 1, 2],
    )
    assert "rank 3 on node n2 (stage 1) has not entered the collective" in data["message"]
    for node, ranks in ((first, (0, 1)), (second, (2, 3))):  # repeated while the stall lasts
        send_progress(node, attempt, *(progress(rank, 29 if rank == 3 else 30) for rank in ranks))
    assert len(hangs()) == 1


def test_a_node_without_a_report_is_the_suspect(nodes: tuple[Attempt, FakeNode, FakeNode]) -> None:
    attempt, first, _ = nodes
    send_progress(first, attempt, progress(0, 30), progress(1, 30))
    since = multi_node_hangs._pending[str(attempt.fence)].since
    multi_node_hangs.record_due(now=since + multi_node_hangs.GATHER_S / 2)
    assert hangs() == []
    multi_node_hangs.record_due(now=since + multi_node_hangs.GATHER_S + 1)
    [(rank, data)] = hangs()
    assert (rank, data["nodes"], data["waiting"]) == (
        None,
        ["n2"],
        [0, 1],
    ) and "no report from node n2" in data["message"]


def test_the_hang_that_names_a_rank_is_the_cause() -> None:
    reports = {
        "n1": {"class": "hang", "reason": "they wait", "time": 1.0},
        "n2": {"class": "hang", "reason": "rank 3 is stopped", "rank": 3, "time": 1.2},
    }
    exit_class, exit = first_cause(reports)
    assert (exit_class, exit["node"], exit["rank"]) == ("hang", "n2", 3)
