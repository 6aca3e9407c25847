"""The pure policy: complete gangs, exclusive devices, priority, no starvation, reasons."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.scheduling.policy import (
    RESERVE_AFTER_S,
    Decision,
    NodeView,
    QueuedRun,
    Slot,
    place,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
T = NOW.timestamp()


def node(
    name: str,
    devices: int,
    *,
    held: dict[int, int] | None = None,
    until: float | None = None,
    early: float | None = None,
    **more: Any,
) -> NodeView:
    kind = more.pop("kind", "cpu")
    slots = tuple(
        Slot(i, kind, kind != "cpu", by, "ann", until if by else None, early if by else None)
        for i in range(devices)
        for by in [(held or {}).get(i)]
    )
    return NodeView(name, more.pop("pool", "default"), slots, **more)


def run(number: int, devices: int, *, waited: float = 1.0, **more: Any) -> QueuedRun:
    return QueuedRun(number, devices, more.pop("pool", "default"), T - waited, **more)


def placed(decision: Decision) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    return {
        placement.run: [(share.node, share.devices) for share in placement.shares]
        for placement in decision.placements
    }


def reason(decision: Decision, number: int) -> str:
    return next(wait.reason for wait in decision.waits if wait.run == number)


slots = st.builds(
    lambda index, kind, by, until, early: Slot(index, kind, kind != "cpu", by, "ann", until, early),
    st.just(0),
    st.sampled_from(["cpu", "h100-80g"]),
    st.sampled_from([None, None, 900, 901]),
    st.sampled_from([None, T + 30]),
    st.sampled_from([None, T + 20]),
)


def fleet(nodes: list[tuple[str, list[Slot], bool]]) -> list[NodeView]:
    return [
        NodeView(
            f"n{i}",
            pool,
            tuple(replace(slot, index=j) for j, slot in enumerate(slots)),
            up,
            "" if up else "silent",
        )
        for i, (pool, slots, up) in enumerate(nodes)
    ]


fleets = st.lists(
    st.tuples(st.sampled_from(["default", "big"]), st.lists(slots, max_size=6), st.booleans()),
    max_size=5,
).map(fleet)
waiting = st.builds(
    run,
    st.just(0),
    st.integers(1, 9),
    pool=st.sampled_from(["default", "big"]),
    priority=st.integers(-1, 2),
    waited=st.floats(0, 200),
    device=st.sampled_from([None, "cpu", "h100-80g"]),
    owner=st.just("bob"),
    max_seconds=st.sampled_from([None, 10.0, 100.0]),
    checkpoint_nodes=st.sampled_from([(), ("n0",), ("n0", "n1")]),
)
queues = st.lists(waiting, max_size=8).map(
    lambda queue: [replace(run, run=i + 1) for i, run in enumerate(queue)]
)


@settings(max_examples=80, deadline=None)
@given(queue=queues, nodes=fleets)
def test_every_decision_satisfies_the_invariants(
    queue: list[QueuedRun], nodes: list[NodeView]
) -> None:
    decision = place(queue, nodes, NOW)
    assert decision == place(list(reversed(queue)), list(reversed(nodes)), NOW), (
        "the order of the input must not matter"
    )
    by_name, wanted = {item.name: item for item in nodes}, {item.run: item for item in queue}
    assert sorted(
        [item.run for item in decision.placements] + [wait.run for wait in decision.waits]
    ) == sorted(wanted)
    allocated = set()
    for placement in decision.placements:
        queued = wanted[placement.run]
        counts = {len(share.devices) for share in placement.shares}
        assert (
            len(counts) == 1
            and sum(len(share.devices) for share in placement.shares) == queued.devices
        )
        kinds = set()
        for share in placement.shares:
            target = by_name[share.node]
            assert target.usable and target.pool == queued.pool
            for index in share.devices:
                slot = target.slots[index]
                assert slot.run is None and (share.node, index) not in allocated
                allocated.add((share.node, index))
                kinds.add(slot.kind)
        assert len(kinds) == 1 and queued.device in (None, *kinds)
    for wait in decision.waits:
        assert wait.reason.startswith("Waiting ") and len(wait.reason) <= 300
        assert wait.may_start is None or wait.may_start >= T


@settings(max_examples=80, deadline=None)
@given(queue=queues, nodes=fleets)
def test_quotas_are_never_exceeded(queue: list[QueuedRun], nodes: list[NodeView]) -> None:
    decision = place(queue, nodes, NOW, quotas={"default": 3})
    wanted = {item.run: item for item in queue}
    assert (
        sum(
            wanted[placement.run].devices
            for placement in decision.placements
            if wanted[placement.run].pool == "default"
        )
        <= 3
    )


def test_one_node_is_preferred_and_the_fullest_that_has_room() -> None:
    nodes = [node("a", 4), node("b", 4, held={0: 9, 1: 9}), node("c", 2, held={0: 9})]
    assert placed(place([run(1, 2)], nodes, NOW)) == {1: [("b", (2, 3))]}


def test_a_gang_spreads_evenly_over_the_fewest_nodes() -> None:
    nodes = [node("a", 2), node("b", 2), node("c", 2)]
    assert placed(place([run(1, 4)], nodes, NOW)) == {1: [("a", (0, 1)), ("b", (0, 1))]}
    assert placed(place([run(1, 6)], nodes, NOW)) == {
        1: [("a", (0, 1)), ("b", (0, 1)), ("c", (0, 1))]
    }


def test_an_uneven_spread_is_named_as_the_reason() -> None:
    ever = place([run(1, 3)], [node("a", 2), node("b", 1)], NOW)
    assert "have 2 + 1, but" in reason(ever, 1) and "same number of ranks on every node" in reason(
        ever, 1
    )
    now = place([run(1, 3)], [node("a", 3, held={0: 9}), node("b", 1)], NOW)
    assert "in pool default: enough are free, but as 2 + 1 per node" in reason(now, 1)


def test_the_reason_names_the_holders() -> None:
    nodes = [node("a", 4, held=dict.fromkeys(range(4), 12)), node("b", 2)]
    assert reason(place([run(1, 4)], nodes, NOW), 1) == (
        "Waiting for 4 devices in pool default; 2 of 6 are free. Run 12 holds 4."
    )


def test_other_reasons() -> None:
    four = [node("a", 4)]
    assert "has 4 in total. Request 4 or fewer" in reason(place([run(1, 8)], four, NOW), 1)
    assert "pool x has no node" in reason(place([run(1, 1, pool="x")], four, NOW), 1)
    assert "has only cpu" in reason(place([run(1, 1, device="h100-80g")], four, NOW), 1)
    assert "no node of pool default accepts work; a is silent" in reason(
        place([run(1, 1)], [node("a", 4, usable=False, unusable_reason="silent")], NOW), 1
    )
    assert "before its next attempt" in reason(place([run(1, 1, not_before=T + 5)], four, NOW), 1)
    assert "allows bob 2 at a time" in reason(
        place([run(1, 2, owner="bob"), run(2, 1, owner="bob")], four, NOW, quotas={"default": 2}), 2
    )
    assert "waits until an administrator raises the quota" in reason(
        place([run(1, 3, owner="bob")], four, NOW, quotas={"default": 2}), 1
    )


def test_priority_goes_first_then_time() -> None:
    decision = place(
        [run(1, 2, waited=50), run(2, 2, waited=90), run(3, 2, priority=1)], [node("a", 4)], NOW
    )
    assert sorted(placed(decision)) == [2, 3] and decision.waits[0].run == 1


def test_small_runs_overtake_a_large_one_only_for_a_while() -> None:
    nodes = [node("a", 4, held={0: 9, 1: 9})]
    small = run(2, 1, waited=5)
    assert placed(place([run(1, 4, waited=RESERVE_AFTER_S - 1), small], nodes, NOW)) == {
        2: [("a", (2,))]
    }
    late = place([run(1, 4, waited=RESERVE_AFTER_S + 1), small], nodes, NOW)
    assert placed(late) == {} and "reserved for run 1, which has waited longer" in reason(late, 2)


def test_a_short_run_may_backfill_reserved_devices() -> None:
    nodes = [node("a", 4, held={0: 9, 1: 9}, until=T + 200, early=T + 100)]
    big = run(1, 4, waited=RESERVE_AFTER_S + 1)
    assert placed(place([big, run(2, 1, max_seconds=90)], nodes, NOW)) == {2: [("a", (2,))]}
    assert placed(place([big, run(2, 1, max_seconds=110)], nodes, NOW)) == {}


def test_a_limit_of_time_alone_lets_no_run_delay_a_gang() -> None:
    """The holder may end long before its limit; then the gang must find all devices free."""
    nodes = [node("a", 4, held={0: 9, 1: 9}, until=T + 300)]
    big, small = run(1, 4, waited=RESERVE_AFTER_S), run(2, 1, max_seconds=200)
    assert placed(place([big, small], nodes, NOW)) == {}
    ended = [node("a", 4)]
    assert list(placed(place([big, small], ended, NOW))) == [1]


def test_runs_over_their_quota_do_not_block_the_reservation_of_a_gang() -> None:
    nodes = [node("a", 4, held={0: 9, 1: 9})]
    over = [run(i, 5, waited=90, owner="bob", priority=1) for i in range(10, 30)]
    gang, small = run(1, 4, waited=80, owner="eve"), run(2, 1, owner="eve")
    decision = place([*over, gang, small], nodes, NOW, quotas={"default": 4})
    assert placed(decision) == {} and "reserved for run 1" in reason(decision, 2)


def test_a_checkpoint_holder_that_can_never_fit_is_ignored() -> None:
    small, big = node("a", 1), node("b", 4)
    stuck = run(1, 2, checkpoint_nodes=("a",))
    assert placed(place([stuck], [small, big], NOW)) == {1: [("b", (0, 1))]}
    silent = node("a", 1, usable=False, unusable_reason="silent")
    assert placed(place([stuck], [silent, big], NOW)) == {1: [("b", (0, 1))]}
    busy = node("a", 2, held={0: 9})
    waits = place([stuck], [busy, big], NOW)
    assert reason(waits, 1) == (
        "Waiting for 2 devices on a, which stores the run's checkpoint; 1 of 2 are free. "
        "Run 9 holds 1."
    )


def test_starts_are_estimated_if_limits_are_known() -> None:
    nodes = [node("a", 4, held=dict.fromkeys(range(4), 9), until=T + 40)]
    waits = place([run(1, 4, waited=9, max_seconds=20), run(2, 2)], nodes, NOW).waits
    assert [wait.may_start for wait in waits] == [T + 40, T + 60]
    unknown = place([run(1, 4)], [node("a", 4, held={0: 9})], NOW).waits
    assert unknown[0].may_start is None


def test_a_run_waits_for_the_nodes_of_its_checkpoint_unless_they_are_lost() -> None:
    a, b = node("a", 4, held={0: 9, 1: 9, 2: 9}), node("b", 4)
    assert placed(place([run(1, 2, checkpoint_nodes=("a",))], [a, b], NOW)) == {}, (
        "its node is up but busy"
    )
    assert placed(place([run(1, 1, checkpoint_nodes=("a",))], [a, b], NOW)) == {1: [("a", (3,))]}
    silent = node("a", 4, usable=False, unusable_reason="silent")
    assert "which stores the run's checkpoint" in reason(
        place([run(1, 1, checkpoint_nodes=("a",))], [silent, b], NOW), 1
    )
    lost = node("a", 4, usable=False, unusable_reason="lost")
    assert placed(place([run(1, 1, checkpoint_nodes=("a",))], [lost, b], NOW)) == {1: [("b", (0,))]}


def test_gpus_precede_cpu_slots_and_kinds_do_not_mix() -> None:
    nodes = [node("a", 4), node("b", 4, kind="h100-80g")]
    assert placed(place([run(1, 2)], nodes, NOW)) == {1: [("b", (0, 1))]}
    assert placed(place([run(1, 8)], nodes, NOW)) == {}


def test_a_run_with_an_image_or_limits_waits_for_a_node_that_supports_them() -> None:
    able = frozenset({"images", "limits", "limits of images"})
    fleet = [node("a", 4), node("b", 2, supports=able), node("c", 2, supports=able)]
    queue = [
        run(1, 2, needs=("images",)),
        run(2, 2, needs=("images", "limits of images")),
        run(3, 2, needs=("limits",)),
        run(4, 4),
    ]
    decision = place(queue, fleet, NOW)
    shares = placed(decision)
    assert {shares[1][0][0], shares[2][0][0]} == {"b", "c"}
    assert shares[4] == [("a", (0, 1, 2, 3))]
    assert "0 of 4 are free" in reason(decision, 3), "those nodes are in use"
    decision = place([run(1, 2, needs=("images", "limits of images"))], fleet[:1], NOW)
    assert reason(decision, 1) == (
        "Waiting for 2 devices: no usable node of pool default can run images (Docker or "
        "Apptainer) and limit memory, CPU time or processes of images (Docker, or systemd). "
        "Choose another pool, or install it on a node and restart its agent."
    )
    down = [node("b", 2, supports=able, usable=False, unusable_reason="drained")]
    assert "no node of pool default accepts work" in reason(
        place([run(1, 2, needs=("images",))], down, NOW), 1
    )
