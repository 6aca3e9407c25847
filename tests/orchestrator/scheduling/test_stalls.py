"""A hang over two nodes: one event for both, naming the node that keeps the other; and a node that
says nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Attempt, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.reports import multi_node_hangs
from orchestrator.scheduling.reports.exit_merge import first_cause
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, Speaker
from workers.contracts.wire.rank_progress import RankProgress

pytestmark = pytest.mark.django_db


@pytest.fixture
def nodes(broker: Broker, owner: User) -> tuple[Attempt, Speaker, Speaker]:
    made = [factories.node(name, devices=2) for name in ("n1", "n2")]
    run = factories.run(owner, devices=4)
    services.tick()
    return Attempt.objects.select_related("run").get(run=run), Speaker(made[0]), Speaker(made[1])


def told(speaker: Speaker, attempt: Attempt, *standings: RankProgress) -> None:
    data: dict[str, Any] = {"quiet_s": 9.0, "standings": [each.to_dict() for each in standings]}
    assert speaker.tells(attempt, "event", type="hang", data=data)


def standing(rank: int, calls: int) -> RankProgress:
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


def test_the_node_whose_rank_has_not_come_is_named_once(
    nodes: tuple[Attempt, Speaker, Speaker],
) -> None:
    attempt, first, second = nodes
    told(first, attempt, standing(0, 30), standing(1, 30))
    assert hangs() == [], "its ranks only wait; whose fault it is the other node knows"
    told(second, attempt, standing(2, 30), standing(3, 29))
    [(rank, data)] = hangs()
    assert (rank, data["node"], data["stage"], data["ranks"], data["waiting"]) == (
        3,
        "n2",
        1,
        [3],
        [0, 1, 2],
    )
    assert "rank 3 on node n2 (stage 1) has not entered the collective" in data["message"]
    for speaker, ranks in ((first, (0, 1)), (second, (2, 3))):  # said again while it lasts
        told(speaker, attempt, *(standing(each, 29 if each == 3 else 30) for each in ranks))
    assert len(hangs()) == 1


def test_a_node_that_says_nothing_is_the_suspect(nodes: tuple[Attempt, Speaker, Speaker]) -> None:
    attempt, first, _ = nodes
    told(first, attempt, standing(0, 30), standing(1, 30))
    since = multi_node_hangs._open[str(attempt.fence)].since
    multi_node_hangs.tell_due(now=since + multi_node_hangs.GATHER_S / 2)
    assert hangs() == []
    multi_node_hangs.tell_due(now=since + multi_node_hangs.GATHER_S + 1)
    [(rank, data)] = hangs()
    assert (rank, data["nodes"], data["waiting"]) == (
        None,
        ["n2"],
        [0, 1],
    ) and "nothing is told by node n2" in data["message"]


def test_of_two_hangs_the_one_that_names_a_rank_is_the_cause() -> None:
    reports = {
        "n1": {"class": "hang", "reason": "they wait", "time": 1.0},
        "n2": {"class": "hang", "reason": "rank 3 stands", "rank": 3, "time": 1.2},
    }
    exit_class, exit = first_cause(reports)
    assert (exit_class, exit["node"], exit["rank"]) == ("hang", "n2", 3)
