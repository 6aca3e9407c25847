"""Shrinking and growth ask the policy itself: what they choose happens, and nothing oscillates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.scheduling.placement.elastic_runs import ElasticRun
from orchestrator.scheduling.placement.requests import Decision, Placement, QueuedRun
from orchestrator.scheduling.placement.snapshot import Snapshot
from orchestrator.scheduling.policy import NodeView, place
from orchestrator.scheduling.preemption.growth import is_worth, larger_sizes, without
from orchestrator.scheduling.preemption.victims import Holder, Victims, choose
from tests.orchestrator.scheduling.test_elastic_policy import elastic
from tests.orchestrator.scheduling.test_policy import NOW, T, node, run


def snapshot(queue: Sequence[QueuedRun], nodes: Sequence[NodeView]) -> Snapshot:
    return Snapshot(list(queue), list(nodes), {}, {}, {}, {})


def holding(nodes: Sequence[NodeView], placements: Sequence[Placement]) -> list[NodeView]:
    """The nodes after these placements."""
    held = {
        (share.node, index): placement.run
        for placement in placements
        for share in placement.shares
        for index in share.devices
    }
    return [
        replace(
            each,
            slots=tuple(
                replace(slot, run=held.get((each.name, slot.index), slot.run))
                for slot in each.slots
            ),
        )
        for each in nodes
    ]


def running(item: QueuedRun, devices: int) -> ElasticRun:
    queued = replace(item, keeps_place=True, queued_at=T)
    return ElasticRun(item.run, queued, devices, True, NOW - timedelta(hours=1), None)


def holder(item: QueuedRun, devices: int) -> Holder:
    shrunk = replace(item, keeps_place=True, queued_at=T) if devices > item.least else None
    return Holder(item.run, item.priority, devices, 60.0, shrunk=shrunk)


def of_run(decision: Decision, number: int) -> int:
    return next((each.devices for each in decision.placements if each.run == number), 0)


def test_shrinking_comes_before_stopping_and_takes_the_least_unsaved_work() -> None:
    items = [replace(elastic(number, 2, 1), priority=-1) for number in (1, 2)]
    nodes = [node("a", 4, held={0: 1, 1: 1, 2: 2, 3: 2})]
    known = {item.run: holder(item, 2) for item in items}
    known[2] = replace(known[2], unsaved_s=5.0)
    assert choose(run(9, 1), nodes, known, T) == Victims(shrunk=(2,))
    assert choose(run(9, 2), nodes, known, T) == Victims(shrunk=(2, 1))
    assert choose(run(9, 3), nodes, known, T) == Victims(stopped=(1,), shrunk=(2,))
    assert choose(run(9, 4), nodes, known, T) == Victims(stopped=(2, 1))
    assert choose(run(9, 1, priority=-2), nodes, known, T) == Victims()


def test_guaranteed_devices_are_not_taken() -> None:
    item = elastic(1, 4, 2)
    nodes = [
        replace(each, slots=tuple(replace(slot, team="red") for slot in each.slots))
        for each in [node("a", 4, held=dict.fromkeys(range(4), 1))]
    ]
    known = {1: holder(item, 4)}
    assert choose(run(9, 2), nodes, known, T, {("default", "red"): 2}) == Victims(shrunk=(1,))
    assert choose(run(9, 2), nodes, known, T, {("default", "red"): 3}) == Victims()


def test_growth_needs_idle_devices_and_a_gain() -> None:
    item = elastic(1, 4, 2)
    nodes = [node("a", 4, held={0: 1, 1: 1})]
    small = running(item, 2)
    assert larger_sizes(snapshot([], nodes), {1: small}, NOW) == {1: 4}
    assert larger_sizes(snapshot([run(2, 2)], nodes), {1: small}, NOW) == {}
    low = run(2, 2, priority=-1)
    assert larger_sizes(snapshot([low], nodes), {1: small}, NOW) == {1: 4}
    assert not is_worth(replace(small, left_s=60.0), 4) and is_worth(replace(small, left_s=90.0), 4)
    assert larger_sizes(snapshot([], nodes), {1: replace(small, running=False)}, NOW) == {}
    assert larger_sizes(snapshot([], nodes), {1: running(item, 4)}, NOW) == {}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sets(st.integers(1, 8), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(-1, 1), st.floats(0, 100)), min_size=1, max_size=4
    ),
    st.integers(0, 4),
)
def test_what_is_decided_happens_and_the_next_pass_changes_nothing(
    fleet: list[int], sizes: set[int], wanted: list[tuple[int, int, float]], busy: int
) -> None:
    item = elastic(1, *sorted(sizes, reverse=True))
    nodes = [node(f"n{number}", devices) for number, devices in enumerate(fleet)]
    nodes = holding(nodes, place([run(50, busy)] if busy else [], nodes, NOW).placements)
    first = place([item], nodes, NOW)
    assume(first.placements)
    size = of_run(first, 1)
    nodes = holding(nodes, first.placements)
    queue = [
        run(10 + number, devices, priority=priority, waited=waited)
        for number, (devices, priority, waited) in enumerate(wanted)
    ]
    fitting = place(queue, nodes, NOW)
    queue = [each for each in queue if not of_run(fitting, each.run)]
    nodes = holding(nodes, fitting.placements)
    assume(queue)
    waiting = next(each for each in queue if each.run == place(queue, nodes, NOW).waits[0].run)

    chosen = choose(waiting, nodes, {1: holder(item, size)}, T)
    if chosen.shrunk:
        assert waiting.priority >= item.priority
        again = replace(item, keeps_place=True, queued_at=T)
        free = without(nodes, 1)
        after = place([*queue, again], free, NOW)
        assert item.least <= of_run(after, 1) <= size, "it may also move"
        assert of_run(after, waiting.run) == waiting.devices
        size, nodes = of_run(after, 1), holding(free, after.placements)
        queue = [each for each in queue if not of_run(after, each.run)]

    grown = larger_sizes(snapshot(queue, nodes), {1: running(item, size)}, NOW)
    assert not (chosen.shrunk and grown), "it does not grow back while nothing has ended"
    if grown:
        free = without(nodes, 1)
        after = place([*queue, running(item, size).queued], free, NOW)
        assert of_run(after, 1) == grown[1] > size
        nodes = holding(free, after.placements)
        queue = [each for each in queue if not of_run(after, each.run)]
        assert larger_sizes(snapshot(queue, nodes), {1: running(item, grown[1])}, NOW) == {}
        for each in queue:  # devices that it got are not taken back at once
            assert not choose(each, nodes, {1: holder(item, grown[1])}, T).shrunk
