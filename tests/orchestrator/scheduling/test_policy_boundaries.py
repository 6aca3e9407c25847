"""Boundaries of the scheduling policy: quotas, reservations, backfill, back-off, estimates."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from orchestrator.scheduling.placement import reasons
from orchestrator.scheduling.policy import (
    ESTIMATE_LIMIT,
    RESERVATION_DEPTH,
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
    free: int,
    held: int = 0,
    *,
    until: float | None = None,
    early: float | None = None,
    kind: str = "cpu",
    owner: str = "ann",
    **fields: Any,
) -> NodeView:
    """A node whose first devices are free; run 99 holds the others until `until`."""
    slots = [Slot(i, kind, kind != "cpu") for i in range(free)]
    slots += [Slot(free + i, kind, kind != "cpu", 99, owner, until, early) for i in range(held)]
    return NodeView(name, fields.pop("pool", "default"), tuple(slots), **fields)


def run(number: int, devices: int, waited: float = 0.0, **fields: Any) -> QueuedRun:
    return QueuedRun(number, devices, fields.pop("pool", "default"), T - waited, **fields)


def placed(decision: Decision) -> list[int]:
    return [placement.run for placement in decision.placements]


def starts(decision: Decision) -> dict[int, float | None]:
    """Seconds from now until each waiting run may start."""
    return {
        wait.run: None if wait.may_start is None else wait.may_start - T for wait in decision.waits
    }


def reason(decision: Decision, number: int) -> str:
    return next(wait.reason for wait in decision.waits if wait.run == number)


def test_the_constants() -> None:
    assert (RESERVE_AFTER_S, RESERVATION_DEPTH, ESTIMATE_LIMIT) == (5.0, 8, 50)


@pytest.mark.parametrize(("quota", "starts_now"), [(4, False), (5, True), (6, True)])
def test_a_quota_includes_its_last_device(quota: int, starts_now: bool) -> None:
    nodes = [node("a", 8, 2, owner="bob"), node("b", 8, 8, owner="eve")]
    nodes.append(node("c", 1, 4, owner="bob", pool="other"))
    three = run(1, 3, owner="bob")
    decision = place([three], nodes, NOW, quotas={"default": quota})
    assert placed(decision) == ([1] if starts_now else [])
    if not starts_now:
        assert reason(decision, 1) == reasons.over_quota(3, "default", "bob", quota, 2)


def test_the_reason_above_the_whole_quota_names_what_to_change() -> None:
    quotas = {"default": 2}
    text = reason(place([run(1, 3)], [node("a", 8)], NOW, quotas=quotas), 1)
    assert "Request 2 or fewer" in text and "an administrator raises" in text


def test_a_placement_counts_toward_the_quota_of_its_owner_and_pool_only() -> None:
    nodes = [node("a", 8), node("b", 8, pool="other")]
    queue = [
        run(1, 3, owner="bob"),
        run(2, 3, owner="bob"),
        run(3, 1, owner="bob"),
        run(4, 3, owner="eve"),
        run(5, 3, owner="bob", pool="other"),
    ]
    decision = place(queue, nodes, NOW, quotas={"default": 4, "other": 3})
    assert placed(decision) == [1, 3, 4, 5]
    assert reason(decision, 2) == reasons.over_quota(3, "default", "bob", 4, 3)
    assert starts(decision) == {2: None}


def test_a_back_off_ends_at_its_time() -> None:
    nodes = [node("a", 4)]
    assert placed(place([run(1, 1, not_before=T)], nodes, NOW)) == [1]
    later = place([run(1, 1, not_before=T + 0.5)], nodes, NOW)
    assert placed(later) == [] and starts(later) == {1: 0.5}
    busy = place([run(1, 4, not_before=T + 5)], [node("a", 0, 4, until=T + 9)], NOW)
    assert starts(busy) == {1: 9.0}
    assert starts(place([run(1, 4, not_before=T + 12)], [node("a", 0, 4, until=T + 9)], NOW)) == {
        1: 12.0
    }


@pytest.mark.parametrize(("waited", "reserved"), [(4.5, False), (5.0, True), (5.5, True)])
def test_devices_are_reserved_after_exactly_five_seconds(waited: float, reserved: bool) -> None:
    small = run(2, 1)
    decision = place([run(1, 4, waited), small], [node("a", 2, 2)], NOW)
    assert placed(decision) == ([] if reserved else [2])
    if reserved:
        assert reason(decision, 2) == reasons.reserved(small, 1, 2)


def test_a_run_in_back_off_reserves_nothing() -> None:
    nodes = [node("a", 2, 2)]
    assert placed(place([run(1, 4, 90, not_before=T + 1), run(2, 1)], nodes, NOW)) == [2]
    assert placed(place([run(1, 4, 90, not_before=T), run(2, 1)], nodes, NOW)) == []


@pytest.mark.parametrize(
    ("max_seconds", "starts_now"), [(9.5, True), (10.0, True), (10.5, False), (None, False)]
)
def test_a_backfilled_run_may_end_when_the_reservation_starts(
    max_seconds: float | None, starts_now: bool
) -> None:
    queue = [run(1, 4, 90), run(2, 1, max_seconds=max_seconds)]
    decision = place(queue, [node("a", 2, 2, until=T + 20, early=T + 10)], NOW)
    assert placed(decision) == ([2] if starts_now else [])
    # neither measured progress beyond the limit nor a limit alone says more
    decision = place(queue, [node("a", 2, 2, until=T + 10, early=T + 20)], NOW)
    assert placed(decision) == ([2] if starts_now else [])
    assert placed(place(queue, [node("a", 2, 2, until=T + 10)], NOW)) == []
    # without a reservation, nothing is held back
    assert placed(place(queue[1:], [node("a", 2, 2, until=T + 10)], NOW)) == [2]


def test_a_reservation_leaves_the_devices_that_it_does_not_need() -> None:
    nodes = [node("a", 4), node("b", 1, 2)]  # three ranks per node: a has one device to spare
    decision = place([run(1, 6, 90), run(2, 1), run(3, 1)], nodes, NOW)
    assert placed(decision) == [2] and decision.placements[0].shares[0].node == "a"
    assert reason(decision, 3) == reasons.reserved(run(3, 1), 1, 4)


def test_only_the_first_late_run_of_a_pool_reserves() -> None:
    nodes = [node("a", 2, 2, early=T + 10), node("b", 1, 1, pool="other")]
    queue = [run(1, 4, 95, max_seconds=20), run(2, 4, 90), run(3, 1, max_seconds=10)]
    decision = place([*queue, run(4, 1, pool="other")], nodes, NOW)
    assert placed(decision) == [3, 4]
    late = place([*queue[:2], run(3, 1, max_seconds=11)], nodes, NOW)
    assert reason(late, 3) == reasons.reserved(run(3, 1), 1, 2)


@pytest.mark.parametrize(("before", "reserved"), [(7, True), (8, False)])
def test_reservations_reach_to_the_eighth_waiting_run(before: int, reserved: bool) -> None:
    queue = [run(i, 2, priority=1) for i in range(1, before + 1)]
    queue += [run(50, 2, 90), run(60, 1, priority=-1)]
    decision = place(queue, [node("a", 1, 1)], NOW)
    assert placed(decision) == ([] if reserved else [60])


def test_starts_are_estimated_one_after_the_other_up_to_the_limit() -> None:
    nodes = [node("a", 0, 2, until=T + 10)]
    queue = [run(i, 2, 20 - i, max_seconds=5.0) for i in range(1, 12)]
    for limit in (1, 8):
        decision = place(queue, nodes, NOW, estimated=limit)
        assert [wait.position for wait in decision.waits] == list(range(1, 12))
        expected = {i: 10.0 + 5 * (i - 1) if i <= limit else None for i in range(1, 12)}
        assert starts(decision) == expected
    assert starts(place(queue, nodes, NOW, estimated=10))[10] == 55.0
    assert starts(place(queue, nodes, NOW, estimated=10))[11] is None
    # each pool has its own limit
    other = [run(20, 1, pool="other")]
    held = [*nodes, node("b", 0, 1, until=T + 3, pool="other")]
    assert starts(place(queue + other, held, NOW, estimated=8))[20] == 3.0


def test_the_end_of_a_placed_run_is_the_start_of_the_next() -> None:
    known = place([run(1, 2, 9, max_seconds=30), run(2, 2)], [node("a", 2)], NOW)
    assert (placed(known), starts(known)) == ([1], {2: 30.0})
    unknown = place([run(1, 2, 9), run(2, 2)], [node("a", 2)], NOW)
    assert starts(unknown) == {2: None}
    after_unknown = place(
        [run(1, 2, 9), run(2, 2, 8), run(3, 2)], [node("a", 0, 2, until=T + 4)], NOW
    )
    assert starts(after_unknown) == {1: 4.0, 2: None, 3: None}


def test_a_gang_on_two_nodes_books_its_share_of_each() -> None:
    nodes = [node("a", 0, 2, until=T + 4), node("b", 0, 2, until=T + 6)]
    queue = [run(1, 4, 9, max_seconds=10), run(2, 1, 8, max_seconds=1), run(3, 1)]
    assert starts(place(queue, nodes, NOW)) == {1: 6.0, 2: 16.0, 3: 16.0}
    half = [run(1, 2, 9, max_seconds=10), run(2, 2, 8, max_seconds=1), run(3, 4)]
    assert starts(place(half, nodes, NOW)) == {1: 4.0, 2: 6.0, 3: 14.0}
    shares = place([run(1, 4)], [node("a", 2), node("b", 2)], NOW).placements[0].shares
    assert [(share.node, share.devices) for share in shares] == [("a", (0, 1)), ("b", (0, 1))]


def test_the_earliest_of_two_kinds_is_the_estimate() -> None:
    nodes = [
        node("a", 0, 2, until=T + 20, kind="h100-80g"),
        node("b", 0, 2, until=T + 5),
        node("c", 0, 4, kind="l4"),
    ]
    assert starts(place([run(1, 2)], nodes, NOW)) == {1: 5.0}
    assert starts(place([run(1, 2, device="h100-80g")], nodes, NOW)) == {1: 20.0}
    assert starts(place([run(1, 2, device="l4")], nodes, NOW)) == {1: None}


def test_the_order_is_priority_pool_priority_time_then_number() -> None:
    nodes = [node("a", 0, 1), node("b", 0, 1, pool="other")]
    queue = [
        run(5, 1, 10),
        run(4, 1, 10),
        run(3, 1, 20),
        run(2, 1, 0, pool="other"),
        run(1, 1, 0, priority=-1, pool="other"),
        run(6, 1, 0, priority=2),
    ]
    ordered = [wait.run for wait in place(queue, nodes, NOW, pool_priority={"other": 1}).waits]
    assert ordered == [6, 2, 3, 4, 5, 1]
    ordered = [wait.run for wait in place(queue, nodes, NOW, pool_priority={"other": -1}).waits]
    assert ordered == [6, 3, 4, 5, 2, 1]


def test_the_reason_names_totals_and_holders() -> None:
    nodes = [node("a", 1, 3), node("b", 0, 2, kind="l4")]
    for devices, expected in [
        (4, reasons.busy(run(1, 4), 1, 4, "Run 99 holds 3.")),
        (5, reasons.too_few_devices(run(1, 5), 4, nodes)),
    ]:
        assert reason(place([run(1, devices)], nodes, NOW), 1) == expected
    uneven = [node("a", 2), node("b", 1)]
    assert reason(place([run(1, 3)], uneven, NOW), 1) == reasons.uneven(
        run(1, 3), [2, 1], ever=True
    )
    now = [node("a", 3, 1), node("b", 1)]
    assert reason(place([run(1, 4)], now, NOW), 1) == reasons.uneven(run(1, 4), [3, 1], ever=False)
    # a reservation for fewer devices than are free is not the reason
    mixed = [run(1, 4, 90, pool="other"), run(2, 4)]
    pools = [*now, node("c", 2, 2, pool="other")]
    assert reason(place(mixed, pools, NOW), 2) == reasons.uneven(run(2, 4), [3, 1], ever=False)


def test_holders_are_counted_again_after_a_placement_in_their_pool() -> None:
    nodes = [node("a", 3, 1), node("b", 1, 1, pool="other")]
    queue = [
        run(1, 4, 4.5),
        run(2, 2, 4, pool="other"),
        run(3, 2, 3.5),
        run(4, 4, 3),
        run(5, 2, 2.5, pool="other"),
        run(6, 4, 2, checkpoint_nodes=("a",)),
    ]
    decision = place(queue, nodes, NOW)
    assert placed(decision) == [3]
    assert reason(decision, 1) == reasons.busy(run(1, 4), 3, 4, "Run 99 holds 1.")
    after = reasons.busy(run(4, 4), 1, 4, "Run 3 holds 2, run 99 holds 1.")
    assert reason(decision, 4) == after
    assert reason(decision, 6) == reasons.checkpoint_busy(
        queue[5], ["a"], 1, 4, "Run 3 holds 2, run 99 holds 1."
    )
    elsewhere = reasons.busy(run(5, 2, pool="other"), 1, 2, "Run 99 holds 1.")
    assert (reason(decision, 2), reason(decision, 5)) == (elsewhere, elsewhere)


def test_a_checkpoint_run_does_not_change_the_reasons_of_others() -> None:
    nodes = [node("a", 0, 2), node("b", 1, 1)]
    first = run(1, 2, 9, checkpoint_nodes=("a",))
    decision = place([first, run(2, 4, 8)], nodes, NOW)
    assert reason(decision, 1) == reasons.checkpoint_busy(first, ["a"], 0, 2, "Run 99 holds 2.")
    assert reason(decision, 2) == reasons.busy(run(2, 4), 1, 4, "Run 99 holds 3.")
    decision = place([run(2, 4, 9), run(1, 2, 8, checkpoint_nodes=("a",))], nodes, NOW)
    assert reason(decision, 1) == reasons.checkpoint_busy(first, ["a"], 0, 2, "Run 99 holds 2.")


def test_a_checkpoint_holds_its_run_unless_one_of_its_nodes_is_unusable() -> None:
    lost = node("b", 2, usable=False, unusable_reason="lost")
    silent = node("c", 2, usable=False, unusable_reason="silent")
    nodes = [node("a", 0, 2), lost, silent, node("d", 2)]
    for names, expected in [(("a",), []), (("a", "b"), [1]), (("a", "unknown"), [1])]:
        assert placed(place([run(1, 2, checkpoint_nodes=names)], nodes, NOW)) == expected
    both = run(1, 2, checkpoint_nodes=("a", "c"))
    decision = place([both], nodes, NOW)
    assert reason(decision, 1) == reasons.checkpoint_unavailable(both, ["c"])
    assert starts(decision) == {1: None}
    # a node that holds the checkpoint, but can never host the run
    small = run(1, 2, checkpoint_nodes=("f",))
    assert placed(place([small], [node("d", 2), node("f", 1)], NOW)) == [1]
    # the checkpoint's nodes have no device of the requested kind
    other = run(1, 1, device="l4", checkpoint_nodes=("a",))
    assert placed(place([other], [*nodes, node("e", 1, kind="l4")], NOW)) == [1]


def test_a_gang_takes_only_its_share_of_each_node() -> None:
    decision = place([run(1, 4), run(2, 1)], [node("a", 3), node("b", 3)], NOW)
    shares = decision.placements[0].shares
    assert [(share.node, share.devices) for share in shares] == [("a", (0, 1)), ("b", (0, 1))]
    assert placed(decision) == [1, 2]


def test_the_devices_of_a_holder_are_added_up_over_nodes() -> None:
    decision = place([run(1, 6)], [node("a", 1, 2), node("b", 1, 2)], NOW)
    assert reason(decision, 1) == reasons.busy(run(1, 6), 2, 6, "Run 99 holds 4.")
