"""The serve runs that a produce, evaluate or training run asks: rights, state and addresses.

The run's owner must see them, when the run is submitted and whenever it is launched. Does not
depend on how an address reaches a node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.db.models import Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.runs.outputs import endpoint
from orchestrator.runs.outputs.endpoint import EndpointStatus
from orchestrator.runs.states import ENDED
from workers.contracts import Problem, RunSpec
from workers.contracts.specs.finetuning.chat_servers import SERVERS_VARIABLE
from workers.contracts.wire.node_messages import RunState
from workers.contracts.wire.serving_reports import Serving

# bodies and their fields that hold a ServerSpec
_FIELDS: Final = {"produce": ("server", "judge"), "evaluate": ("judge",)}
_POLICIES: Final = ("grpo", "ppo")  # bodies of a training run whose rewards may be served
KINDS: Final = (*_FIELDS, "train")
_COLUMNS: Final = (
    *(f"spec__{kind}__{name}__run" for kind, names in _FIELDS.items() for name in names),
    *(f"spec__train__{name}__rewards" for name in _POLICIES),
)
MAY_NAME_SERVERS: Final = (
    Q(kind="produce", spec__produce__server__run__isnull=False)
    | Q(kind="produce", spec__produce__judge__run__isnull=False)
    | Q(kind="evaluate", spec__evaluate__judge__run__isnull=False)
    | Q(kind="train", spec__train__grpo__rewards__icontains='"run"')  # in the list's JSON text
    | Q(kind="train", spec__train__ppo__rewards__icontains='"run"')
)
_MISSING: Final = "there is no serve run {id}, or its owner may not see it"


def named(spec: Mapping[str, Any]) -> dict[str, int]:
    """The serve runs that a stored spec names, by field."""
    servers = {
        f"{kind}.{name}": body.get(name)
        for kind, names in _FIELDS.items()
        if isinstance(body := spec.get(kind), Mapping)
        for name in names
    }
    train = spec.get("train")
    bodies: Mapping[str, Any] = train if isinstance(train, Mapping) else {}
    for name in _POLICIES:
        policy = bodies.get(name)
        rewards = policy.get("rewards") if isinstance(policy, Mapping) else None
        for number, reward in enumerate(rewards if isinstance(rewards, Sequence) else ()):
            servers[f"train.{name}.rewards.{number}"] = reward
    return {
        field: int(server["run"])
        for field, server in servers.items()
        if isinstance(server, Mapping) and isinstance(server.get("run"), int)
    }


def server_problems(spec: RunSpec, *, by: User | None) -> list[Problem]:
    """Servers that the submitter may not use, and those that will not serve.

    One that is not serving yet is no problem: the run waits for it.
    """
    problems = []
    for place, id in named(spec.model_dump(mode="json", exclude_none=True)).items():
        field, run = f"{place}.run", _visible([id], by).get(id)
        if run is None:
            message = f"there is no serve run {id} that you may see"
            hint = "Use the id of a serve run of yours or your team's: GET /api/v1/runs?kind=serve."
            problems.append(Problem(field=field, message=message, hint=hint))
            continue
        status = endpoint.status(run=run)
        if run.state in ENDED:
            message = f"run {run.pk} is {run.state} and serves no longer"
            hint = "Retry it, or use a run that serves."
            problems.append(Problem(field=field, message=message, hint=hint))
        elif status.serving is not None:
            problems += _model_problems(spec, place, run.pk, status.serving)
    return problems


def _model_problems(spec: RunSpec, place: str, id: int, serving: Serving) -> list[Problem]:
    """Whether the served model does what the run asks it for: answers, or scores of answers."""
    body = spec.produce
    scores = set[str]()
    if body is not None and place == ("produce.judge" if body.judge else "produce.server"):
        scores = body.requested_scores
    if spec.evaluate is not None and spec.evaluate.judge_by == "reward":
        scores = {"reward"}
    policy = spec.train.policy if spec.train is not None else None
    if policy is not None:
        reward = policy.rewards[int(place.rpartition(".")[2])]
        scores = {"reward"} if reward.kind == "model" else set()
        if scores and not serving.pooling:
            message = f"the model of run {id} writes texts, and rewards come from a reward model"
            hint = "Use a serve run of a model that objective reward trained, or kind judge."
            return [Problem(field=f"{place}.run", message=message, hint=hint)]
    field, chat_model = f"{place}.run", "Use an instruction-tuned model"
    needs_answers = place == "produce.server" or "reward" not in scores or "judge" in scores
    if needs_answers and serving.pooling:
        message = f"the model of run {id} is a reward model, which scores answers and writes none"
        if spec.evaluate is not None:
            chat_model += ', or set evaluate.judge_by to "reward"'
        if policy is not None:
            chat_model += ", or a reward of kind model"
        return [Problem(field=field, message=message, hint=f"{chat_model}.")]
    if needs_answers and not serving.chat:
        message = f"the model of run {id} has no chat template, so it cannot be asked"
        return [Problem(field=field, message=message, hint=f"{chat_model}.")]
    if "reward" in scores and not serving.pooling and serving.backend == "orrery":
        message = f"the model of run {id} writes texts, and reward scores come from a reward model"
        hint = f"Use a serve run of a model that objective reward trained, as {spec.kind}.judge."
        return [Problem(field=field, message=message, hint=hint)]
    return []


def wait_reason(*, owner: User, ids: Sequence[int]) -> str:
    """Why a queued run of this owner waits for one of these serve runs; "" if all serve."""
    visible = _visible(ids, owner)
    for id in ids:
        run = visible.get(id)
        if run is None:
            return f"Waiting for a server: {_MISSING.format(id=id)}."
        status = endpoint.status(run=run)
        if status.phase != "serving":
            return _waiting(run, status)
    return ""


def phases(ids: Sequence[int]) -> list[tuple[int, str, str]]:
    """`(id, phase, key)` of the runs: changes whenever a waiting run may start."""
    rows = Run.objects.filter(pk__in=ids, kind="serve").order_by("pk")
    statuses = [(run.pk, endpoint.status(run=run)) for run in rows]
    return [(id, status.phase, status.key) for id, status in statuses]


def waited_for() -> list[int]:
    """The serve runs that queued runs name."""
    rows = _queued_with_servers().values_list(*_COLUMNS).distinct()
    return sorted({id for row in rows for id in _ids(row)})


def wait_reasons() -> dict[int, str]:
    """`{queued run: reason}` of the runs with a server that does not serve.

    Reads only the parts of specs that name servers, and each owner's servers once.
    """
    reasons: dict[tuple[int, tuple[int, ...]], str] = {}
    clients = {
        run: (owner, _ids(row))
        for run, owner, *row in _queued_with_servers().values_list("pk", "owner_id", *_COLUMNS)
    }
    owners = User.objects.in_bulk({owner for owner, _ in clients.values()})
    for owner, ids in set(clients.values()):
        reasons[owner, ids] = wait_reason(owner=owners[owner], ids=ids) if ids else ""
    return {run: reason for run, client in clients.items() if (reason := reasons[client])}


def _queued_with_servers() -> QuerySet[Run]:
    """The queued runs that may name serve runs."""
    return Run.objects.filter(MAY_NAME_SERVERS, state=RunState.QUEUED).order_by()


def _ids(row: Sequence[Any]) -> tuple[int, ...]:
    """The serve runs in a row of `_COLUMNS`."""
    ids = set[int]()
    for value in row:
        rewards = value if isinstance(value, list) else [{"run": value}]
        ids |= {
            reward["run"]
            for reward in rewards
            if isinstance(reward, Mapping) and isinstance(reward.get("run"), int)
        }
    return tuple(sorted(ids))


def variables(*, run: Run) -> dict[str, str] | str:
    """The variable with the addresses of the run's servers, or the reason why it waits.

    Empty for a run that names no serve run.
    """
    ids = sorted(set(named(run.spec).values()))
    if not ids:
        return {}
    visible, addresses = _visible(ids, run.owner), {}
    for id in ids:
        server = visible.get(id)
        if server is None:
            return _MISSING.format(id=id)
        status = endpoint.status(run=server)
        if status.phase != "serving" or status.serving is None:
            return _waiting(server, status)
        addresses[str(id)] = {
            "url": f"{status.url}/v1",
            "model": status.serving.model,
            "headers": status.headers,
        }
    return {SERVERS_VARIABLE: json.dumps(addresses)}


def _waiting(run: Run, status: EndpointStatus) -> str:
    if status.phase == "ended":
        return f"Waiting for run {run.pk} to serve; it is {run.state}. Retry it."
    if run.state == RunState.PAUSED:
        return f"Waiting for run {run.pk} to serve; it is paused. Resume it."
    return f"Waiting for run {run.pk} to serve; it is {_PHASES.get(status.phase, run.state)}."


_PHASES: Final = {"loading": "loading its model", "draining": "stopping"}


def visible_server(run_id: int | None, by: User | None) -> Run | None:
    """The serve run with this id, if the user may see it."""
    return _visible([run_id], by).get(run_id) if run_id is not None else None


def _visible(ids: Sequence[int], user: User | None) -> dict[int, Run]:
    """The serve runs with these ids that the user may see; None: a local command."""
    owners = people.visible_owners(user) if user is not None else None
    rows = Run.objects.filter(pk__in=ids, kind="serve")
    if owners is not None:
        rows = rows.filter(owner__in=owners)
    return {run.pk: run for run in rows}
