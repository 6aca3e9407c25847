"""Pools to choose from in a form: what each is, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.cluster_engines import kinds


def pool_choices() -> list[tuple[str, str]]:
    """`(name, description)` of every pool."""
    return [(pool.name, _described(pool)) for pool in fleet.pools().select_related("engine")]


def _described(pool: Any) -> str:
    if pool.engine is None:
        count = pool.device_count
        return ngettext("%(count)s device", "%(count)s devices", count) % {"count": count}
    engine = pool.engine
    target = kinds.target_of(engine, pool.engine_settings)
    values = {"kind": engine.get_kind_display(), "engine": engine.name, "target": target}
    if engine.kind == engine.Kind.KUBERNETES:
        text = _("%(kind)s %(engine)s, queue %(target)s") % values
    else:
        text = _("%(kind)s %(engine)s, partition %(target)s") % values
    known = next(
        (one for one in engine.status.get("partitions", []) if one.get("name") == target), None
    )
    return f"{text}: {_room(known)}" if known else text


def _room(known: Mapping[str, Any]) -> str:
    """What is free there."""
    if known.get("waiting") is not None:
        values = {"running": known.get("running") or 0, "waiting": known["waiting"]}
        return _("%(running)s running, %(waiting)s waiting") % values
    values = {"idle": known.get("nodes_idle", 0), "nodes": known.get("nodes", 0)}
    return _("%(idle)s of %(nodes)s nodes idle") % values
