"""Guarantees of pools to teams: order, lending, preemption, limits, page, REST."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.accounts import teams
from orchestrator.accounts.models import AuditEntry, Team, User
from orchestrator.common.errors import Refusal
from orchestrator.fleet.models import Pool
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.models import TeamGuarantee
from orchestrator.scheduling.ordering.guarantees import guaranteed_first, held_by_team
from orchestrator.scheduling.placement.capacity import NodeView, Window
from orchestrator.scheduling.policy import place
from orchestrator.scheduling.preemption.victims import Holder, Victims, choose, takeable
from orchestrator.scheduling.reserved import guarantees
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.orchestrator.scheduling.test_policy import NOW, T, node, placed, run
from tests.orchestrator.scheduling.test_preemption import holders, running, waiting

VISION = {("default", "vision"): 4}


def held(name: str, runs: dict[int, int], team: str) -> NodeView:
    view = node(name, sum(runs.values()), held=dict(enumerate_devices(runs)))
    return replace(view, slots=tuple(replace(slot, team=team) for slot in view.slots))


def enumerate_devices(runs: dict[int, int]) -> list[tuple[int, int]]:
    return list(enumerate(each for each, devices in runs.items() for _ in range(devices)))


def test_a_run_within_its_teams_guarantee_comes_before_higher_priorities() -> None:
    queue = [run(1, 4, priority=50, team="speech"), run(2, 4, team="vision", waited=0.5)]
    assert list(placed(place(queue, [node("a", 4)], NOW))) == [1]
    assert list(placed(place(queue, [node("a", 4)], NOW, guarantees=VISION))) == [2]
    # a second run would exceed it, and has no precedence
    queue = [run(1, 4, team="speech"), *(run(n, 2, team="vision", waited=0.5) for n in (2, 3, 4))]
    decision = place(queue, [node("a", 5)], NOW, guarantees=VISION)
    assert list(placed(decision)) == [2, 3] and decision.waits[0].run == 1


@pytest.mark.parametrize(
    "blocked",
    [
        {"owner": "ann"},  # holds a device, so that the run exceeds her quota
        {"checkpoint_nodes": ("gone",)},
        {"needs": ("images",)},
        {"device": "h100-80g"},
        {"devices": 3},
        {"max_seconds": 1800.0},  # may last into a window
    ],
)
def test_a_run_blocked_otherwise_uses_up_no_guarantee(blocked: dict[str, Any]) -> None:
    soon = (Window(T + 900, T + 1800),) if "max_seconds" in blocked else ()
    silent = node("gone", 4, usable=False, unusable_reason="silent")
    taken = node("c", 2, held={0: 8, 1: 8}, until=T + 60)
    nodes = [node("a", 2, windows=soon), node("b", 2), silent, taken]
    first = replace(run(1, 4, team="vision", waited=9), **blocked)
    queue = [
        first,
        run(2, 4, team="vision", max_seconds=600.0),
        run(3, 4, priority=50, max_seconds=60.0),
    ]
    quotas = {"default": 4}
    if soon:
        nodes = nodes[:3]
    if blocked == {"devices": 3}:
        nodes[3] = node("c", 2, pool="other")
    decision = place(queue, nodes, NOW, guarantees=VISION, quotas=quotas)
    assert list(placed(decision)) == [2]


def test_a_queued_run_uses_up_the_quota_of_its_owner() -> None:
    """The second run of ann's exceeds her quota after the first, so that bob's comes before it."""
    queue = [
        run(1, 2, team="vision", owner="ann", waited=9),
        run(2, 2, team="vision", owner="ann", waited=8),
        run(3, 2, team="vision", owner="bob", waited=7),
        run(4, 2, priority=50),
    ]
    decision = place(queue, [node("a", 4)], NOW, guarantees=VISION, quotas={"default": 2})
    assert list(placed(decision)) == [1, 3]


def test_devices_that_a_team_does_not_need_are_lent() -> None:
    queue = [run(1, 8, team="speech")]
    assert placed(place(queue, [node("a", 8)], NOW, guarantees={("default", "vision"): 8}))


def test_only_runs_beyond_their_guarantees_are_taken_back_lowest_priority_first() -> None:
    nodes = [held("a", {1: 4}, "speech"), held("b", {2: 4}, "speech"), held("c", {3: 4}, "audio")]
    limits = {**VISION, ("default", "audio"): 4, ("default", "speech"): 4}
    known = holders(Holder(1, 90, 4, 0.0), Holder(2, 80, 4, 900.0), Holder(3, 0, 4, 0.0))
    wanted = run(9, 4, team="vision")
    assert takeable(wanted, nodes, known, limits) == {2}  # then speech holds what it is due
    assert choose(wanted, nodes, known, T, limits) == Victims((2,))
    assert choose(wanted, nodes, known, T) == Victims()
    # beyond its guarantee, or of another team, it takes nothing
    assert choose(replace(wanted, devices=5), nodes, known, T, limits) == Victims()
    assert choose(replace(wanted, team="speech"), nodes, known, T, limits) == Victims()
    leaving = {**known, 2: replace(known[2], leaving=True)}
    assert choose(wanted, nodes, leaving, T, limits) == Victims()  # it already gets these devices


def test_a_priority_takes_no_devices_within_a_guarantee() -> None:
    """Else the preempted run, within its guarantee, would be placed first and preempted again."""
    limits = {("default", "vision"): 8}
    waiting_run = run(9, 8, priority=101, team="speech")
    nodes, known = [held("a", {1: 8}, "vision")], holders(Holder(1, 0, 8, 5.0))
    assert choose(waiting_run, nodes, known, T, limits) == Victims()
    assert choose(waiting_run, nodes, known, T) == Victims((1,))
    # its own team's neither: the gang exceeds the guarantee, the preempted run does not
    assert choose(replace(waiting_run, team="vision"), nodes, known, T, limits) == Victims()
    # beyond the guarantee the priority counts, and the preempted run comes after it
    nodes, known = (
        [held("a", {1: 4, 2: 6}, "vision")],
        holders(Holder(1, 0, 4, 5.0), Holder(2, 50, 6, 5.0)),
    )
    waiting_run = replace(waiting_run, devices=4)
    assert choose(waiting_run, nodes, known, T, limits) == Victims((1,))
    queue = [run(1, 4, team="vision", waited=0.5), waiting_run]
    rest = [node("a", 4), held("b", {2: 6}, "vision")]
    assert list(placed(place(queue, rest, NOW, guarantees=limits))) == [9]


def test_a_run_that_can_never_fit_stops_no_preemption() -> None:
    queue = [run(1, 3, priority=300, waited=60), run(2, 2, priority=200, waited=60)]
    nodes = [node("a", 2, held={0: 5, 1: 5})]
    decision = place(queue, nodes, NOW)
    assert [(wait.run, wait.lacks_devices) for wait in decision.waits] == [(1, False), (2, True)]


names = st.sampled_from(["a", "b", "c"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), names, st.integers(-5, 200)), max_size=8),
    st.dictionaries(names, st.integers(0, 12), max_size=3),
    st.integers(1, 8),
)
def test_no_team_loses_devices_while_it_is_within_its_guarantee(
    runs: list[tuple[int, str, int]], promised: dict[str, int], devices: int
) -> None:
    nodes = [held(f"n{i}", {i + 1: size}, team) for i, (size, team, _) in enumerate(runs)]
    known = {
        i + 1: Holder(i + 1, priority, size, 1.0) for i, (size, _, priority) in enumerate(runs)
    }
    limits = {("default", team): count for team, count in promised.items()}
    wanted = run(99, devices, team="a", priority=-9)
    chosen = takeable(wanted, nodes, known, limits)
    before = held_by_team(nodes)
    for team in {runs[each - 1][1] for each in chosen}:
        lost = sorted(runs[each - 1][0] for each in chosen if runs[each - 1][1] == team)
        # without the largest of them the team was still above what it is due
        assert before["default", team] - sum(lost[:-1]) > limits.get(("default", team), 0)
        assert team != "a"
    if before.get(("default", "a"), 0) + devices > limits.get(("default", "a"), 0):
        assert not chosen


@given(st.permutations(range(6)), st.integers(0, 8))
def test_the_order_within_both_parts_stays(numbers: list[int], promised: int) -> None:
    queue = [run(number, 1 + number % 3, team="ab"[number % 2]) for number in numbers]
    limits = {("default", "a"): promised}
    ordered = guaranteed_first(queue, limits, {}, T)
    assert sorted(each.run for each in ordered) == sorted(numbers)
    for keep in (True, False):
        part = [each for each in ordered if (each in _first(ordered, promised)) is keep]
        assert part == [each for each in queue if each in part]


def _first(ordered: list[Any], promised: int) -> list[Any]:
    taken, first = 0, []
    for each in ordered:
        if each.team != "a" or taken + each.devices > promised:
            break
        taken += each.devices
        first.append(each)
    return first


@pytest.mark.django_db
def test_a_team_takes_back_what_it_lent_after_a_checkpoint(
    broker: Broker, people: factories.People, owner: User, admin: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    lent = running(factories.user("other"), fake, devices=4)
    lab = Team.objects.get(name="lab")
    guarantees.guarantee_set(team=lab, pool=fake.node.pool, devices=2, by=admin)
    beyond = waiting(owner, devices=3)
    services.tick()
    assert not Attempt.objects.filter(requested="preempt").exists()
    Run.objects.filter(pk=beyond.pk).update(state="cancelled")
    wanted = waiting(owner, devices=2)
    services.tick()
    attempt = Attempt.objects.get(run=lent)
    assert attempt.requested == "preempt"
    event = RunEvent.objects.get(run=lent, type="preempted")
    assert event.data["reason"].startswith(
        f"Run {wanted.pk} needs its devices: pool default guarantees 2 to team lab."
    )
    wanted.refresh_from_db()
    assert wanted.wait_reason.endswith("because of the guarantee of team lab.")
    fake.exited(attempt, "preempted", step=6)
    services.tick()
    wanted.refresh_from_db()
    lent.refresh_from_db()
    assert (wanted.state, lent.state, lent.budgets_used) == ("starting", "queued", {})
    use = guarantees.team_use(lab)
    assert [(each.held, each.guaranteed, each.borrowed) for each in use.pools] == [(2, 2, 0)]


@pytest.mark.django_db
def test_a_higher_priority_waits_for_a_run_within_its_guarantee(
    broker: Broker, people: factories.People, owner: User, operator: User, admin: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    lab = Team.objects.get(name="lab")
    guarantees.guarantee_set(team=lab, pool=fake.node.pool, devices=4, by=admin)
    running(owner, fake, devices=4)
    wanted = waiting(factories.user("other"), devices=4)
    Run.objects.filter(pk=wanted.pk).update(priority=101)
    services.tick()
    assert not Attempt.objects.filter(requested="preempt").exists()
    guarantees.guarantee_set(team=lab, pool=fake.node.pool, devices=3, by=admin)
    services.tick()
    assert Attempt.objects.filter(requested="preempt").count() == 1


@pytest.mark.django_db
def test_impossible_guarantees_are_refused(people: factories.People, admin: User) -> None:
    pool = factories.node("n1", devices=4).pool
    lab, rivals = Team.objects.get(name="lab"), Team.objects.create(name="empty")
    for team, devices, message in (
        (lab, -1, "below 0"),
        (lab, 5, "has 4 devices, and 0 are guaranteed"),
        (rivals, 1, "has no members"),
    ):
        with pytest.raises(Refusal, match=message):
            guarantees.guarantee_set(team=team, pool=pool, devices=devices, by=admin)
    with pytest.raises(Refusal, match="pool bare has no devices"):
        guarantees.guarantee_set(
            team=lab, pool=Pool.objects.create(name="bare"), devices=1, by=admin
        )
    teams.team_update(team=lab, by=admin, max_devices=2)
    with pytest.raises(Refusal, match="the quota of team lab is 2 devices"):
        guarantees.guarantee_set(team=lab, pool=pool, devices=3, by=admin)
    guarantees.guarantee_set(team=lab, pool=pool, devices=2, by=admin)
    guarantees.guarantee_set(team=lab, pool=pool, devices=0, by=admin)
    assert not TeamGuarantee.objects.exists()


@pytest.mark.django_db
def test_a_quota_below_current_use_describes_what_follows(
    broker: Broker, people: factories.People, owner: User, admin: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    first = running(owner, fake, devices=3)
    lab, rest = Team.objects.get(name="lab"), factories.api(admin)
    body = rest.patch(
        f"/api/v1/teams/{lab.pk}", {"max_devices": 2, "share": 2.5}, content_type="application/json"
    ).json()
    assert (body["max_devices"], body["share"], body["held_devices"]) == (2, 2.5, 3)
    assert body["notes"] == [
        "Team lab holds 3 devices, more than its quota of 2. Its runs continue; no other run of "
        "the team starts until it holds less."
    ]
    factories.run(owner, devices=1)
    services.tick()
    first.refresh_from_db()
    assert first.state == "running" and Attempt.objects.count() == 1
    page = factories.client_for(admin)
    assert "more than its quota of 2" in page.get(f"/account/teams/{lab.pk}/").content.decode()
    url = f"/api/v1/teams/{lab.pk}/guarantees/default"
    body = rest.put(url, {"devices": 2}, content_type="application/json").json()
    assert body["pools"] == [
        {"pool": "default", "held_devices": 3, "guaranteed_devices": 2, "borrowed_devices": 1}
    ]
    assert rest.put(url, {"devices": 9}, content_type="application/json").status_code == 422
    answer = rest.patch(
        f"/api/v1/teams/{lab.pk}", {"max_devices": None}, content_type="application/json"
    )
    assert answer.json()["max_devices"] is None
    assert AuditEntry.objects.filter(action="team.guarantee").count() == 1


@pytest.mark.django_db
def test_admins_set_limits_on_the_page(people: factories.People, owner: User, admin: User) -> None:
    factories.node("n1", devices=4)
    lab = Team.objects.get(name="lab")
    page, url = factories.client_for(admin), f"/account/teams/{lab.pk}/"
    assert page.post(url + "change/", {"max_devices": "3", "share": "1.5"}).status_code == 302
    assert page.post(url + "guarantee/", {"pool": "default", "devices": "2"}).status_code == 302
    lab.refresh_from_db()
    assert (lab.max_devices, lab.share, lab.guarantees.get().devices) == (3, 1.5, 2)
    text = page.get(url).content.decode()
    assert "Its quota is 3 in all pools." in text and "weight is 1.5" in text
    refused = page.post(url + "change/", {"max_devices": "many", "share": "1"})
    assert refused.status_code == 422 and "is not a number" in refused.content.decode()
    assert page.post(url + "change/", {"max_devices": "", "share": "-1"}).status_code == 422
    assert page.post(url + "change/", {"max_devices": "", "share": "1"}).status_code == 302
    lab.refresh_from_db()
    assert lab.max_devices is None
    own = factories.client_for(owner).post(url + "change/", {"max_devices": "9", "share": "1"})
    assert own.status_code == 403
