"""The page of engines: state and partitions of each, pools; administrators add and change them."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse, QueryDict
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.cluster_engines.kinds import KINDS
from orchestrator.fleet.cluster_engines.kubernetes_settings import KubernetesSettings
from orchestrator.fleet.cluster_engines.settings import SlurmSettings
from webui.views.access import PageRequest, has_role, page, redirect_with_message, require_role

_SETTINGS = {
    "slurm": (
        "home",
        "python",
        "source",
        "config",
        "commands",
        "identity",
        "rest",
        "rest_user",
        "rest_ca",
    ),
    "kubernetes": ("server", "namespace", "image", "image_pull_secret", "claim", "home"),
}
_CREDENTIALS = {
    "slurm": ("redis_url", "rest_token"),
    "kubernetes": ("redis_url", "kubeconfig", "token", "ca"),
}
_LINES = ("kubeconfig", "ca")  # credentials of several lines
_POOL_SETTINGS = ("partition", "account", "qos", "queue", "priority_class", "device")
_POOL_NUMBERS = ("devices_per_node", "cpus_per_device")


@page
@never_cache
@require_http_methods(["GET", "POST"])
def listed(request: PageRequest) -> HttpResponse:
    """Show all engines; a POST adds one, changes one, or sets a pool of one."""
    context: dict[str, Any] = {
        "admin": has_role(request.user, Role.ADMIN),
        "typed": _typed_by_form(None),
    }
    status = 200
    if request.method == "POST":
        require_role(request.user, Role.ADMIN, _("Changing engines"))
        try:
            action = next((_FORMS[name] for name in _FORMS if name in request.POST), _add)
            message = action(request)
            return redirect_with_message(request, message, "engines")
        except Refusal as refusal:
            context |= {"refusal": refusal, "typed": _typed_by_form(request.POST)}
            status = refusal.status
    typed = context["typed"]
    rows = [engines.serialize_engine(row) for row in engines.engines_visible_to(user=request.user)]
    for row in rows:
        kind = "Kubernetes" if row["kind"] == "kubernetes" else "Slurm"
        row["title"] = f"{kind} {row['version'] or ''}".strip()
        row["changing"] = typed["change"].get("change") == row["name"]
        values = typed["change"] if row["changing"] else row["settings"]
        row["fields"] = [
            {"name": field, "value": values.get(field) or ""} for field in _SETTINGS[row["kind"]]
        ]
        row["secrets"] = [
            {"name": name, "lines": name in _LINES} for name in _CREDENTIALS[row["kind"]]
        ]
        row["typed_pool"] = typed["pool"] if typed["pool"].get("engine") == row["name"] else {}
        for one in row["partitions"]:
            one["nodes_used"] = one["nodes"] - one["nodes_idle"]
            one["quota"] = [{**part, "text": _quota(part)} for part in one.get("quota") or []]
    defaults = {
        kind: {name: field.default for name, field in contract.model_fields.items()}
        for kind, contract in (("slurm", SlurmSettings), ("kubernetes", KubernetesSettings))
    }
    context |= {"engines": rows, "sentence": _sentence(rows), "defaults": defaults}
    return render(request, "webui/engines.html", context, status=status)


@page
@require_POST
def change(request: PageRequest, name: str) -> HttpResponse:
    """Enable, disable or remove an engine, or take a pool from it."""
    require_role(request.user, Role.ADMIN, _("Changing engines"))
    engine = engines.engine_get(user=request.user, name=name)
    action = request.POST.get("action", "")
    if action == "remove":
        engines.engine_remove(engine=engine, by=request.user)
        return redirect_with_message(request, _("The engine is removed."), "engines")
    if action == "remove-pool":
        pool = request.POST.get("pool", "")
        engines.engine_pool_remove(engine=engine, by=request.user, pool=pool)
        return redirect_with_message(request, _("The pool is removed from the engine."), "engines")
    enabled = action == "enable"
    engines.engine_update(engine=engine, by=request.user, enabled=enabled)
    message = _("The engine gets new jobs.") if enabled else _("The engine gets no new jobs.")
    return redirect_with_message(request, message, "engines")


def _add(request: PageRequest) -> str:
    kind = request.POST.get("kind", "slurm")
    name = request.POST.get("name", "").strip()
    engines.engine_add(
        by=request.user,
        name=name,
        kind=kind,
        settings=_typed(request, _SETTINGS.get(kind, ())),
        credentials=_typed(request, _CREDENTIALS.get(kind, ())),
    )
    return _("Engine %(name)s is added; the scheduler contacts it within seconds.") % {"name": name}


def _set_pool(request: PageRequest) -> str:
    engine = engines.engine_get(user=request.user, name=request.POST.get("engine", ""))
    settings = _typed(request, (*_POOL_SETTINGS, *_POOL_NUMBERS))
    pool = request.POST.get("pool", "").strip()
    engines.engine_pool_set(engine=engine, by=request.user, pool=pool, settings=settings)
    return _("Runs of pool %(pool)s are submitted to %(engine)s.") % {
        "pool": pool,
        "engine": engine.name,
    }


def _change(request: PageRequest) -> str:
    """Change settings; an empty one gets its default, an empty credential stays as it is."""
    engine = engines.engine_get(user=request.user, name=request.POST.get("change", ""))
    fields = KINDS[engine.kind].settings.model_fields
    typed = _typed(request, _SETTINGS[engine.kind])
    settings = {
        name: typed[name] if name in typed else fields[name].get_default()
        for name in _SETTINGS[engine.kind]
        if name in typed or not fields[name].is_required()
    }
    secrets = _typed(request, _CREDENTIALS[engine.kind])
    engines.engine_update(
        engine=engine, by=request.user, settings=settings, credentials=secrets or None
    )
    return _("Engine %(name)s is changed.") % {"name": engine.name}


def _typed(request: PageRequest, names: tuple[str, ...]) -> dict[str, Any]:
    """What was typed into these fields."""
    values = {name: request.POST.get(name, "").strip() for name in names}
    return {name: text for name, text in values.items() if text}


_FORMS = {"pool": _set_pool, "change": _change}  # by the field that only this form has


def _typed_by_form(values: QueryDict | None) -> dict[str, Any]:
    """What was typed, by the form that shows it again: change, pool, slurm, kubernetes."""
    by_form: dict[str, Any] = {form: {} for form in ("change", "pool", "slurm", "kubernetes")}
    if values is not None:
        form = next((name for name in _FORMS if name in values), values.get("kind", "slurm"))
        by_form[form] = values
    return by_form


def _quota(part: dict[str, Any]) -> str:
    """`cpu 2.5 of 8`; memory in GiB."""
    scale, unit = (2**30, " GiB") if part["resource"] == "memory" else (1, "")
    used = f"{part['used'] / scale:g}"
    if part["total"] is None:
        return f"{part['resource']} {used}{unit}"
    values = {"resource": part["resource"], "used": used, "total": f"{part['total'] / scale:g}"}
    return _("%(resource)s %(used)s of %(total)s") % values + unit


def _sentence(rows: list[dict[str, Any]]) -> str:
    """Whether all engines answer, in one line."""
    if not rows:
        return _("No other engine: Orrery's own scheduler places all runs.")
    failing = [row["name"] for row in rows if row["ok"] is False or row["problem"]]
    if failing:
        return _("Problems with %(names)s.") % {"names": ", ".join(failing)}
    if any(row["ok"] is None for row in rows):
        return _("Waiting for the first answer.")
    return _("All engines answer.")
