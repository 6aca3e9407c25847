"""Factories for users, clients, nodes and runs, built on the product's own services."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from itertools import count
from typing import Any

from django.test import Client

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import Team, User
from orchestrator.accounts.roles import Role
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.tracking import media
from orchestrator.tracking import services as tracking
from orchestrator.tracking.models import MediaItem
from workers.contracts.wire import envelope
from workers.contracts.wire.node_messages import DeviceInfo, NodeInventory
from workers.recorder import orrery_media

PASSWORD = "a long enough password"
_numbers = count(1)


@dataclass(frozen=True)
class People:
    owner: User  # submitter in team "lab"
    teammate: User  # submitter in team "lab"
    stranger: User  # viewer in no team
    operator: User
    admin: User


def people() -> People:
    people = People(
        owner=user("owner"),
        teammate=user("teammate"),
        stranger=user("stranger", Role.VIEWER),
        operator=user("operator", Role.OPERATOR),
        admin=user("admin", Role.ADMIN),
    )
    team = Team.objects.create(name="lab")
    team.members.add(people.owner, people.teammate)
    return people


def user(username: str, role: Role = Role.SUBMITTER) -> User:
    return accounts.user_create(username=username, password=PASSWORD, role=role)


def client_for(user: User, **more: Any) -> Client:
    """A browser client with this user logged in."""
    client = Client(**more)
    client.force_login(user)
    return client


def api(user: User, *, scopes: list[str] | None = None) -> Client:
    """A client that sends a bearer token of this user with every request."""
    _, text = accounts.token_create(
        user=user, name=f"test {next(_numbers)}", scopes=scopes, by=user
    )
    return Client(headers={"Authorization": f"Bearer {text}"})


def spec(**changes: Any) -> dict[str, Any]:
    """Spec of a small training run with `devices` data-parallel ranks.

    Other keyword arguments replace spec fields.
    """
    devices = changes.pop("devices", 1)
    plan = {"dp": devices, "micro_batch_size": 2, "global_batch_size": 2 * devices}
    document = {"kind": "train", "plan": plan, "train": {"steps": 20, "seq_len": 64}}
    return {**document, **changes}


def run(owner: User, *, name: str = "", **changes: Any) -> Run:
    """A queued run of this user; `changes` go into its spec as in `spec`."""
    return runs.run_submit(owner=owner, name=name or f"run {next(_numbers)}", spec=spec(**changes))


def external_run(owner: User, *, name: str = "") -> Run:
    """An external run, which Orrery only monitors: running, attempt 1."""
    return runs.run_submit(
        owner=owner, name=name or f"run {next(_numbers)}", spec={"kind": "external"}
    )


def image_item(run: Run) -> Any:
    """An image of 2 × 1 pixels that the run's program logged."""
    data = base64.b64encode(orrery_media.png([[0, 255]])).decode()
    checked = media.check(
        name="sample", kind="image", step=1, index=0, caption="", time=0.0, data=data
    )
    tracking.media_store(run=run, items=[checked])
    return MediaItem.objects.get(run=run, name="sample")


def node(
    name: str = "",
    *,
    devices: int = 4,
    kind: str = "cpu",
    pool: str = "default",
    catalogue: str = "cpu",
    memory_bytes: int = 4 * 2**30,
) -> Node:
    """A node that has joined by a token and is up."""
    text = fleet.join_token_create(by=None, pool=pool)
    name = name or f"node-{next(_numbers)}"
    report = inventory(
        name, devices=devices, kind=kind, catalogue=catalogue, memory_bytes=memory_bytes
    )
    request = envelope.join_request(text, name=report.name)
    return fleet.node_joined(request=request, inventory=report)[0]


def inventory(
    name: str,
    *,
    devices: int = 4,
    kind: str = "cpu",
    catalogue: str = "cpu",
    memory_bytes: int = 4 * 2**30,
) -> NodeInventory:
    return NodeInventory(
        name=name,
        address="127.0.0.1",
        hostname=f"{name}.test",
        cores=8,
        memory_bytes=16 * 2**30,
        devices=[_device(index, kind, catalogue, memory_bytes) for index in range(devices)],
    )


def _device(index: int, kind: str, catalogue: str, memory_bytes: int) -> DeviceInfo:
    return DeviceInfo(
        index=index,
        kind=kind,
        name=f"{kind} {index}",
        memory_bytes=memory_bytes,
        catalogue=catalogue,
        cores=[index],
    )


def placement(on: Node, devices: int = 1) -> list[dict[str, Any]]:
    """The first `devices` devices of one node, in the scheduler's format."""
    return [
        {"node": on.name, "address": on.address, "devices": list(range(devices)), "node_rank": 0}
    ]


def running(run: Run, on: Node) -> Attempt:
    """Moves a queued run to `running` on the node and returns its attempt."""
    attempt = runs.attempt_create(run=run, placement=placement(on, run.devices), resume_from=None)
    assert attempt is not None, f"{run} is {run.state}, not queued"
    runs.attempt_launching(attempt=attempt)
    runs.attempt_running(attempt=attempt)
    run.refresh_from_db()
    attempt.refresh_from_db()
    return attempt
