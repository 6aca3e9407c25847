"""Elastic runs in the policy: sizes within the range, others first, no size without devices."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.scheduling.placement.requests import QueuedRun, Size
from orchestrator.scheduling.policy import NodeView, Window, place
from tests.orchestrator.scheduling.test_policy import NOW, T, node, placed, reason, run


def elastic(number: int, *sizes: int, **more: object) -> QueuedRun:
    """A run with these sizes, largest first."""
    item = run(number, sizes[0], **more)  # type: ignore[arg-type]
    return replace(item, smaller=tuple(Size(size, sizes[0] / size) for size in sizes[1:]))


def sizes_of(queue: list[QueuedRun], nodes: list[NodeView], **more: object) -> dict[int, int]:
    decision = place(queue, nodes, NOW, **more)  # type: ignore[arg-type]
    return {each.run: each.devices for each in decision.placements}


def test_it_starts_with_the_largest_size_that_fits() -> None:
    run_ = elastic(1, 4, 2, 1)
    assert sizes_of([run_], [node("a", 4)]) == {1: 4}
    assert sizes_of([run_], [node("a", 4, held={0: 9})]) == {1: 2}
    assert sizes_of([run_], [node("a", 4, held={0: 9, 1: 9, 2: 9})]) == {1: 1}
    assert sizes_of([run_], [node("a", 2), node("b", 2)]) == {1: 4}


def test_it_waits_below_its_smallest_size_and_names_the_range() -> None:
    decision = place([elastic(1, 4, 2)], [node("a", 4, held={0: 9, 1: 9, 2: 9})], NOW)
    assert not decision.placements
    assert reason(decision, 1).startswith("Waiting for 2 to 4 devices in pool default; 1 of 4")


def test_runs_of_its_priority_come_before_its_larger_sizes() -> None:
    nodes = [node("a", 4)]
    assert sizes_of([elastic(1, 4, 2, waited=9), run(2, 2)], nodes) == {1: 2, 2: 2}
    assert sizes_of([elastic(1, 4, 2, waited=9, priority=5), run(2, 2)], nodes) == {1: 4}
    assert sizes_of([elastic(1, 4, 2), elastic(2, 4, 2)], nodes) == {1: 2, 2: 2}
    assert sizes_of([elastic(1, 4, 2), run(2, 2, priority=5)], nodes) == {1: 2, 2: 2}


def test_a_run_that_keeps_its_place_comes_first_at_its_smallest_size() -> None:
    nodes, continues = [node("a", 4)], replace(elastic(1, 4, 2), keeps_place=True)
    assert sizes_of([run(2, 2, waited=99), run(3, 2, waited=99), continues], nodes) == {1: 2, 2: 2}
    assert sizes_of([run(2, 4, waited=99, priority=9), continues], nodes) == {1: 2}


def test_quotas_limit_the_size_and_not_the_start() -> None:
    run_ = replace(elastic(1, 4, 2, 1), owner="ann", team="red")
    assert sizes_of([run_], [node("a", 4)], quotas={"default": 3}) == {1: 2}
    assert sizes_of([run_], [node("a", 4)], team_quotas={"red": 1}) == {1: 1}
    guarantee = {("default", "red"): 2}
    other = replace(run(2, 2, waited=500), team="blue")
    assert sizes_of([other, run_], [node("a", 4)], guarantees=guarantee) == {1: 2, 2: 2}


def test_it_stays_on_the_node_of_its_checkpoint() -> None:
    nodes = [node("a", 2), node("b", 4)]
    bound = replace(elastic(1, 4, 2, 1), checkpoint_nodes=("a",))
    assert placed(place([bound], nodes, NOW)) == {1: [("a", (0, 1))]}
    far = replace(elastic(1, 4, 3), checkpoint_nodes=("a",))  # a is too small for its sizes
    assert placed(place([far], nodes, NOW)) == {1: [("b", (0, 1, 2, 3))]}


def test_a_checkpoint_that_one_node_can_read_is_not_divided() -> None:
    nodes = [node("a", 2), node("b", 2)]
    run_ = replace(elastic(1, 4, 2, 1), expected_s=10.0)
    assert sizes_of([run_], nodes) == {1: 4}
    bound = run_.undivided_on(2)
    assert sizes_of([bound], nodes) == {1: 2} and bound.at(1).expected_s == 40.0
    assert run_.undivided_on(1).sizes == (1,) and run_.undivided_on(0) is run_
    assert sizes_of([bound], [node("a", 2, held={0: 9}), node("b", 1)]) == {1: 1}


def test_reserved_devices_do_not_enlarge_it() -> None:
    nodes = [node("a", 4, held={0: 9}, until=T + 50, early=T + 50)]
    head = run(1, 4, waited=100)
    assert sizes_of([head, elastic(2, 3, 1, waited=50)], nodes) == {}
    short = replace(elastic(2, 3, 1, waited=50), max_seconds=20.0)
    assert sizes_of([head, short], nodes) == {2: 3}


def test_a_window_limits_sizes_by_their_duration() -> None:
    window = Window(T + 100, T + 900)
    nodes = [node("a", 4, windows=(window,)), node("b", 2)]
    long = replace(elastic(1, 4, 2), expected_s=300.0)
    assert placed(place([long], nodes, NOW)) == {1: [("b", (0, 1))]}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=4),
    st.lists(
        st.tuples(
            st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
            st.integers(-1, 1),
            st.floats(0, 500),
            st.booleans(),
            st.sampled_from([None, 30.0, 1000.0]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_placements_are_legal_sizes_on_free_devices_and_a_pass_is_final(
    fleet: list[tuple[int, int]],
    wanted: list[tuple[set[int], int, float, bool, float | None]],
) -> None:
    nodes = [
        node(f"n{number}", devices, held=dict.fromkeys(range(min(held, devices)), 900 + number))
        for number, (devices, held) in enumerate(fleet)
    ]
    queue = [
        replace(
            elastic(number, *sorted(sizes, reverse=True), waited=waited, priority=priority),
            keeps_place=continues,
            max_seconds=limit,
        )
        for number, (sizes, priority, waited, continues, limit) in enumerate(wanted)
    ]
    decision = place(queue, nodes, NOW)
    assert decision == place(list(reversed(queue)), list(reversed(nodes)), NOW)
    used: set[tuple[str, int]] = {
        (each.name, slot.index) for each in nodes for slot in each.slots if slot.run is not None
    }
    for placement in decision.placements:
        assert placement.devices in queue[placement.run].sizes
        assert len({len(share.devices) for share in placement.shares}) == 1
        for share in placement.shares:
            for index in share.devices:
                assert (share.node, index) not in used
                used.add((share.node, index))
    assert sorted([each.run for each in decision.placements] + [w.run for w in decision.waits]) == (
        list(range(len(queue)))
    )
