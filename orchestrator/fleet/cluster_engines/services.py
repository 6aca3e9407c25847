"""Adds, changes and removes engines and their pools; reads them. Does not contact an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from django.conf import settings as django_settings
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from pydantic import ValidationError

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import secret_text
from orchestrator.common.errors import Refusal, conflict, invalid, missing_object
from orchestrator.common.redis import wake_scheduler
from orchestrator.common.units import iso
from orchestrator.fleet.cluster_engines.kinds import KINDS
from orchestrator.fleet.models import Engine, Pool
from workers.contracts.catalog.devices import DEVICES

_PURPOSE = "credentials of an engine"
_WITH_TOKEN = frozenset(("token", "ca"))  # a login to Kubernetes
_LOGINS = _WITH_TOKEN | {"kubeconfig"}
_NAME = re.compile(r"^[a-z][a-z0-9-]{0,19}$")


def engines_visible_to(*, user: User) -> QuerySet[Engine]:
    """All engines by name, with their pools."""
    rows = Engine.objects.order_by("name").prefetch_related("pools")
    return rows if user.is_active else rows.none()


def engine_get(*, user: User, name: str) -> Engine:
    """The engine of this name. Raises 404."""
    engine = engines_visible_to(user=user).filter(name=name).first()
    if engine is None:
        raise missing_object("engine", name)
    return engine


def state_counts() -> dict[str, int]:
    """Engines by state: answering, failing, disabled, or unknown before the first contact."""
    counts = dict.fromkeys(("answering", "failing", "disabled", "unknown"), 0)
    for enabled, status in Engine.objects.values_list("enabled", "status"):
        ok = (status or {}).get("ok")
        state = "unknown" if ok is None else "answering" if ok else "failing"
        counts[state if enabled else "disabled"] += 1
    return counts


def engine_pools() -> dict[str, int]:
    """`{pool name: engine id}` of the pools whose runs an engine schedules."""
    rows = Pool.objects.filter(engine__isnull=False)
    return {name: engine for name, engine in rows.values_list("name", "engine_id") if engine}


def engine_of_pool(name: str) -> Engine | None:
    """The engine that schedules the pool's runs; None: Orrery's own scheduler."""
    pool = Pool.objects.select_related("engine").filter(name=name).first()
    return pool.engine if pool else None


def redis_url(engine: Engine) -> str:
    """How the engine's nodes reach the broker. Raises `secret_text.Unreadable`."""
    return credentials_of(engine).redis_url or str(django_settings.REDIS_URL)


def credentials_of(engine: Engine) -> Any:
    """The engine's credentials, decrypted. Raises `secret_text.Unreadable`."""
    stored = json.loads(secret_text.decrypt(engine.credentials, purpose=_PURPOSE))
    return KINDS[engine.kind].credentials.from_dict(stored)


def engine_add(
    *,
    by: User | None,
    name: str,
    kind: str = "slurm",
    settings: Mapping[str, Any] | None = None,
    credentials: Mapping[str, Any] | None = None,
) -> Engine:
    """Add an engine. Raises 403 for users who are not administrators, 409 for a known name."""
    _require_admin(by, "add engines")
    if not _NAME.fullmatch(name):
        raise invalid(
            "name",
            f"{name!r} is not an engine's name",
            "Use 1 to 20 lower-case letters, digits and hyphens, first a letter.",
        )
    if kind not in Engine.Kind.values:
        raise invalid(
            "kind",
            f"{kind!r} is not a kind of engine",
            f"Use one of {', '.join(Engine.Kind.values)}.",
        )
    checked = _checked(KINDS[kind].settings, settings or {}, "settings")
    secrets = _checked(KINDS[kind].credentials, credentials or {}, "credentials")
    try:
        with transaction.atomic():
            engine = Engine.objects.create(
                name=name,
                kind=kind,
                settings=checked.to_dict(),
                credentials=_sealed(secrets),
            )
            accounts.audit(actor=by, action="engine.add", target=f"engine:{name}", data={})
    except IntegrityError:
        raise conflict(f"An engine named {name} exists.", type="engine-exists") from None
    return engine


def engine_update(
    *,
    engine: Engine,
    by: User | None,
    settings: Mapping[str, Any] | None = None,
    credentials: Mapping[str, Any] | None = None,
    enabled: bool | None = None,
) -> Engine:
    """Change settings (merged with the stored ones), credentials, or stop new submissions.

    Credentials that are not given stay; a kubeconfig replaces token and ca, and these a kubeconfig.
    """
    _require_admin(by, "change engines")
    changed = [
        name
        for name, value in (("settings", settings), ("credentials", credentials))
        if value is not None
    ]
    if settings is not None:
        merged = {**engine.settings, **settings}
        engine.settings = _checked(KINDS[engine.kind].settings, merged, "settings").to_dict()
    if credentials is not None:
        stored = credentials_of(engine).to_dict() if engine.credentials else {}
        merged = {**_unchanged(stored, credentials), **credentials}
        engine.credentials = _sealed(
            _checked(KINDS[engine.kind].credentials, merged, "credentials")
        )
    if enabled is not None:
        engine.enabled = enabled
        changed.append("enabled")
    with transaction.atomic():
        engine.save(update_fields=["settings", "credentials", "enabled"])
        accounts.audit(
            actor=by,
            action="engine.update",
            target=f"engine:{engine.name}",
            data={"fields": changed},
        )
        wake_scheduler()
    return engine


def engine_pool_set(
    *, engine: Engine, by: User | None, pool: str, settings: Mapping[str, Any]
) -> Pool:
    """Let the engine schedule the pool's runs. Raises 409 if the pool has nodes or another engine.

    `settings` is a `SlurmPool` or a `KubernetesPool`; whether its partition or queue exists is
    checked when the engine is contacted.
    """
    _require_admin(by, "change pools of engines")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", pool):
        raise invalid(
            "pool", f"{pool!r} is not a pool's name", "Use letters, digits, '.', '_', '-'."
        )
    checked = _checked(KINDS[engine.kind].pool, settings, "settings")
    if checked.device is not None and checked.device not in DEVICES:
        raise invalid(
            "settings.device",
            f"{checked.device!r} is not in the device catalogue",
            "Use a device such as h100-80g.",
        )
    with transaction.atomic():
        row = Pool.objects.select_for_update().filter(name=pool).first() or Pool(name=pool)
        if row.pk and row.nodes.exists():
            raise conflict(
                f"Pool {pool} has nodes of Orrery's own agents. Choose another name.",
                type="pool-has-nodes",
            )
        if row.engine_id not in (None, engine.pk):
            raise conflict(f"Pool {pool} belongs to another engine.", type="pool-has-engine")
        row.engine, row.engine_settings = engine, checked.to_dict()
        row.save()
        accounts.audit(
            actor=by,
            action="engine.pool",
            target=f"engine:{engine.name}",
            data={"pool": pool, KINDS[engine.kind].target: checked.target},
        )
        wake_scheduler()
    return row


def engine_pool_remove(*, engine: Engine, by: User | None, pool: str) -> None:
    """Take the pool from the engine; it keeps its name and has no devices. Raises 404."""
    _require_admin(by, "change pools of engines")
    with transaction.atomic():
        if not Pool.objects.filter(name=pool, engine=engine).update(
            engine=None, engine_settings={}
        ):
            raise missing_object("pool", pool)
        accounts.audit(
            actor=by,
            action="engine.pool_remove",
            target=f"engine:{engine.name}",
            data={"pool": pool},
        )


def engine_remove(*, engine: Engine, by: User | None) -> None:
    """Remove an engine without pools. Raises 409 while pools name it."""
    _require_admin(by, "remove engines")
    if names := sorted(engine.pools.values_list("name", flat=True)):
        raise conflict(
            f"Engine {engine.name} has the pools {', '.join(names)}. Remove them first.",
            type="engine-has-pools",
        )
    with transaction.atomic():
        accounts.audit(actor=by, action="engine.remove", target=f"engine:{engine.name}", data={})
        engine.delete()


def secrets_renew(*, dry_run: bool) -> int:
    """Encrypt credentials that are stored under an earlier key again; how many engines."""
    changed = 0
    for row in Engine.objects.order_by("pk"):
        try:
            value = secret_text.renewed(row.credentials, purpose=_PURPOSE)
        except secret_text.Unreadable:
            continue
        if value is not None:
            changed += 1
            if not dry_run:
                unchanged = Engine.objects.filter(pk=row.pk, credentials=row.credentials)
                unchanged.update(credentials=value)
    return changed


def serialize_engine(engine: Engine) -> dict[str, Any]:
    """The REST representation of an engine; credentials are never shown."""
    status = engine.status or {}
    return {
        "name": engine.name,
        "kind": engine.kind,
        "enabled": engine.enabled,
        "settings": engine.settings,
        "created": iso(engine.created),
        "ok": status.get("ok"),
        "message": status.get("message", "Not contacted yet."),
        "problem": status.get("problem", ""),
        "version": status.get("version"),
        "contacted": status.get("time"),
        "partitions": status.get("partitions", []),
        "pools": [
            {"name": pool.name, **pool.engine_settings}
            for pool in sorted(engine.pools.all(), key=lambda pool: pool.name)
        ],
    }


def _require_admin(by: User | None, action: str) -> None:
    """None: a command on the control plane's machine."""
    if by is not None:
        accounts.require_role(by, Role.ADMIN, action)


def _unchanged(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored credentials that stay after a change to the given ones."""
    removed: frozenset[str] = frozenset()
    if "kubeconfig" in given:
        removed = _LOGINS
    elif _LOGINS & given.keys():
        removed = _LOGINS - _WITH_TOKEN
    return {name: value for name, value in stored.items() if name not in removed}


def _sealed(credentials: Any) -> str:
    return secret_text.encrypt(json.dumps(credentials.to_dict()), purpose=_PURPOSE)


def _checked(contract: Any, values: Mapping[str, Any], field: str) -> Any:
    try:
        return contract.from_dict(dict(values))
    except ValidationError as error:
        problems = [
            {
                "field": ".".join([field, *(str(part) for part in problem["loc"])]),
                "message": problem["msg"].removeprefix("Value error, "),
                "hint": "See docs/install.md for the settings of an engine.",
            }
            for problem in error.errors()
        ]
        detail = "; ".join(f"{item['field']}: {item['message']}" for item in problems)
        raise Refusal(
            "invalid", "The engine's settings are invalid", 422, detail, errors=problems
        ) from None
