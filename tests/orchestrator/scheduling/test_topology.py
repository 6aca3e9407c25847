"""Placement in a tree of switches: the lowest subtree, whole groups, order of the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import services
from orchestrator.scheduling.placement import topology
from orchestrator.scheduling.placement.capacity import NodeView
from orchestrator.scheduling.policy import place
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker
from tests.orchestrator.scheduling.test_policy import NOW, node, placed, run


class Leaf(NamedTuple):
    node: str
    place: tuple[str, ...]


def tree(**racks: int) -> list[Leaf]:
    """Nodes by rack; `a_1` is rack 1 of row a."""
    return [
        Leaf(f"{rack}-{number:02}", tuple(rack.split("_")))
        for rack, size in racks.items()
        for number in range(size)
    ]


def racks_of(nodes: list[Leaf]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in nodes:
        key = "_".join(each.place)
        counts[key] = counts.get(key, 0) + 1
    return counts


def test_the_lowest_subtree_that_fits_and_of_these_the_smallest() -> None:
    nodes = tree(a_1=5, a_2=3, b_1=4, b_2=8)
    assert racks_of(topology.closest(nodes, 3)) == {"a_2": 3}
    assert racks_of(topology.closest(nodes, 4)) == {"b_1": 4}
    assert racks_of(topology.closest(nodes, 7)) == {"b_2": 7}
    assert racks_of(topology.closest(nodes, 9)) == {"b_2": 8, "b_1": 1}
    assert racks_of(topology.closest(nodes, 20)) == {"a_1": 5, "a_2": 3, "b_1": 4, "b_2": 8}
    assert topology.closest(nodes, 21) == []


def test_groups_that_communicate_most_stay_whole() -> None:
    nodes = tree(a_1=5, a_2=5, a_3=4)

    assert racks_of(topology.closest(nodes, 8, unit=4)) in (
        {"a_1": 4, "a_2": 4},
        {"a_1": 4, "a_3": 4},
        {"a_2": 4, "a_3": 4},
    )
    # two groups of six do not fit into racks: the gang starts anyway
    assert len(topology.closest(nodes, 12, unit=6)) == 12


def test_ranks_of_a_stage_or_stages_of_a_pipeline_are_neighbours() -> None:
    names = list("abcdefgh")
    assert topology.in_rank_order(_leaves(names), 2, False) == _leaves(names)
    ordered = topology.in_rank_order(_leaves(names), 2, True)
    assert [leaf.node for leaf in ordered] == ["a", "c", "e", "g", "b", "d", "f", "h"]
    assert topology.unit_of(8, 4, False) == 2 and topology.unit_of(8, 4, True) == 4
    assert topology.unit_of(8, 3, True) == 1


def _leaves(names: list[str]) -> list[Leaf]:
    return [Leaf(name, ()) for name in names]


paths = st.lists(st.sampled_from("ab"), max_size=3).map(tuple)


@given(st.lists(paths, max_size=14), st.integers(1, 14), st.integers(1, 4))
def test_as_many_nodes_as_wanted_each_once(
    places: list[tuple[str, ...]], count: int, unit: int
) -> None:
    nodes = [Leaf(f"n{number:02}", each) for number, each in enumerate(places)]
    chosen = topology.closest(nodes, count, unit)
    assert len(chosen) == (count if count <= len(nodes) else 0)
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(nodes)
    assert chosen == sorted(chosen, key=lambda leaf: (leaf.place, leaf.node))


def racked(name: str, rack: str, **more: Any) -> NodeView:
    return node(name, 2, place=("row", rack), **more)


def test_a_gang_gets_one_rack_although_first_fit_would_take_two() -> None:
    nodes = [racked("a", "1"), racked("b", "2"), racked("c", "2"), node("d", 2)]
    assert placed(place([run(1, 4)], nodes, NOW)) == {1: [("b", (0, 1)), ("c", (0, 1))]}
    # on one node as before, and everything if it needs everything
    assert len(placed(place([run(1, 2)], nodes, NOW))[1]) == 1
    assert len(placed(place([run(1, 8)], nodes, NOW))[1]) == 4


def test_a_tensor_parallel_group_larger_than_every_node_may_span_nodes() -> None:
    nodes = [node("a", 2), node("b", 2)]
    assert placed(place([run(1, 4, together=4)], nodes, NOW))


@pytest.mark.django_db
def test_production_keeps_tensor_groups_on_nodes_and_gangs_in_racks(
    broker: Broker, people: factories.People, owner: User, operator: User
) -> None:
    rest = factories.api(operator)
    for name, rack in (("n1", "1"), ("n2", "2"), ("n3", "2")):
        factories.node(name, devices=2)
        body = {"path": f"row / rack-{rack}/"}
        answer = rest.put(f"/api/v1/nodes/{name}/topology", body, content_type="application/json")
        assert answer.json()["topology"] == f"row/rack-{rack}"
    assert Node.objects.get(name="n2").topology == "row/rack-2"
    assert AuditEntry.objects.filter(action="node.topology").count() == 3
    item = factories.run(owner, devices=4)
    services.tick()
    attempt = Attempt.objects.get(run=item)
    assert [share["node"] for share in attempt.placement] == ["n2", "n3"]
    page = factories.client_for(operator)
    assert page.post("/fleet/n1/topology/", {"path": "x/y"}).status_code == 302
    assert 'value="x/y"' in page.get("/fleet/n1/").content.decode()
    assert page.post("/fleet/n1/topology/", {"path": "/".join("abcdefghi")}).status_code == 422


@pytest.mark.django_db
def test_the_agent_reports_a_path_and_an_operator_may_correct_it(operator: User) -> None:
    node = factories.node("n1")
    labelled = factories.inventory("n1").model_copy(update={"topology": "row-1/ rack-3/"})
    fleet.apply_inventory(node, labelled)
    node.refresh_from_db()
    assert node.topology == "row-1/rack-3"
    fleet.node_topology_set(node=node, by=operator, path="row-1/rack-4")
    fleet.apply_inventory(node, labelled)  # the agent restarted
    node.refresh_from_db()
    assert node.topology == "row-1/rack-4"
    moved = labelled.model_copy(update={"topology": "row-2/rack-1"})
    fleet.apply_inventory(node, moved)
    fleet.apply_inventory(node, factories.inventory("n1"))  # without the option
    node.refresh_from_db()
    assert node.topology == "row-2/rack-1"
