"""Descriptions of the events of every run: states, exits, lineage, nodes, weights, predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.charts import plan_ranks, predicted_vs_measured
from webui.presentation import formatting
from webui.presentation.event_parts import Describer, at_step, message_of, on_rank, with_reason

# causes that add nothing; the last is stored text
_SELF_EVIDENT: Final = ("cancelled", "paused", "resumed", gettext_noop("its ranks run"))
_ONGOING: Final = {
    "running": gettext_noop("is running"),
    "starting": gettext_noop("is starting"),
    "stopping": gettext_noop("is stopping"),
    "launching": gettext_noop("is launching"),
}


def _state(data: Mapping[str, Any], rank: int | None) -> str:
    by, why, new = data.get("by"), data.get("why"), data.get("new")
    by_user = ""
    if by and by not in ("control plane", "node"):
        by_user = _(" by %(user)s") % {"user": by}
    if why == "submitted":
        return _("Run submitted%(by_user)s") % {"by_user": by_user}
    if new == "stopping" and by_user:
        return _("Stop requested%(by_user)s") % {"by_user": by_user}
    if new == "cancelled" and str(why).lower().startswith("cancelled "):
        by_user, why = f" {str(why)[len('cancelled ') :].rstrip('.')}", ""
    cause = f": {why}" if why and why not in (new, *_SELF_EVIDENT) else ""
    text = _("Attempt %(state)s") if data.get("of") == "attempt" else _("Run %(state)s")
    state = _(_ONGOING[str(new)]) if str(new) in _ONGOING else new
    return f"{text % {'state': state}}{by_user}{cause}"


def _invalid(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("The event %(type)s is invalid and has no effect: %(problem)s")
    return text % {"type": data.get("type", "?"), "problem": data.get("problem", "?")}


def _metrics_dropped(data: Mapping[str, Any], rank: int | None) -> str:
    names = ", ".join(str(name) for name in data.get("names") or ())
    text = _(
        "A run has at most %(limit)s metric names; %(count)s new metrics are not stored, for "
        "example: %(names)s"
    )
    return text % {"limit": data.get("limit"), "count": data.get("count"), "names": names}


def _exited(data: Mapping[str, Any], rank: int | None) -> str:
    how = data.get("signal") or ""
    if not how and data.get("code") is not None:
        how = _("code %(code)s") % {"code": data["code"]}
    name = data.get("class")
    number = rank if rank is not None else "?"
    text = _("Rank %(rank)s exited") % {"rank": number}
    if how:
        text = _("Rank %(rank)s exited with %(how)s") % {"rank": number, "how": how}
    return text + (f", {name}" if name else "") + at_step(data)


def _forked(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("into"):
        return _("Forked%(at_step)s into run %(run)s") % {
            "at_step": at_step(data),
            "run": data["into"],
        }
    return _("Forked from run %(run)s") % {"run": data.get("from")} + at_step(data)


def _rewound(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Rewound to step %(step)s") % {"step": data.get("step")}
    if data.get("by"):
        text += _(" by %(user)s") % {"user": data["by"]}
    dropped = data.get("given_up") or data.get("discarded") or []
    if dropped:
        steps = formatting.listed([f"{step:,}" for step in dropped])
        text += _("; checkpoints of step %(steps)s are discarded") % {"steps": steps}
    return text


def _stored(data: Mapping[str, Any], rank: int | None) -> str:
    size = formatting.memory(data.get("bytes") or 0)
    if data.get("name"):
        text = _("Copied %(name)s to the store: %(size)s")
        return text % {"name": data["name"], "size": size}
    return _("Copied the checkpoint of step %(step)s to the store: %(size)s in %(time)s") % {
        "step": f"{data.get('step') or 0:,}",
        "size": size,
        "time": formatting.duration(data.get("seconds") or 0),
    }


def _fetched(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Read the checkpoint of step %(step)s from the store in %(time)s") % {
        "step": f"{data.get('step') or 0:,}",
        "time": formatting.duration(data.get("seconds") or 0),
    }


def _data_fetched(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Read data set %(name)s from the store: %(size)s in %(time)s") % {
        "name": data.get("data_set") or "?",
        "size": formatting.memory(data.get("bytes") or 0),
        "time": formatting.duration(data.get("seconds") or 0),
    }


def _environment(data: Mapping[str, Any], rank: int | None) -> str:
    packages = len(data.get("packages") or [])
    values = {
        "packages": packages,
        "modules": ", ".join(str(each) for each in data.get("modules") or []),
        "time": formatting.duration(data.get("seconds") or 0),
    }
    if not data.get("fingerprint"):
        return _("Loaded modules %(modules)s in %(time)s") % values
    if data.get("built"):
        return _("Installed %(packages)d packages in %(time)s") % values
    return _("Uses %(packages)d packages that were already installed on this node") % values


def _store_problem(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Copies to the store are delayed; training continues: %(message)s %(hint)s")
    return text % {"message": data.get("message", "?"), "hint": data.get("hint", "")}


def _preempted(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("action") == "pause":
        return _("Saved a checkpoint to pause") + at_step(data)
    return with_reason(gettext_noop("Preempted"))(data, rank)


_RESIZE_CAUSES: Final = {
    "node_lost": gettext_noop("a node was lost"),
    "waiting_run": gettext_noop("another run waits"),
    "free_devices": gettext_noop("more devices are free"),
}


def _resized(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Continues on %(to)s devices instead of %(from)s (dp %(dp)s)") % {
        "to": data.get("to", "?"),
        "from": data.get("from", "?"),
        "dp": data.get("dp", "?"),
    }
    cause = _RESIZE_CAUSES.get(str(data.get("cause")))
    return f"{text}: {_(cause)}" if cause else text


def _hang(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("No progress")
    if data.get("quiet_s"):
        text = _("No progress for %(time)s") % {"time": formatting.duration(data["quiet_s"])}
    return text + (f": {message_of(data)}" if message_of(data) else on_rank(rank))


def _straggler(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Slow rank") + (f" {rank}" if rank is not None else "")
    if data.get("node"):
        place = _("stage %(stage)s") % {"stage": data.get("stage", 0)}
        text += f" ({data['node']}, {place})"
    return text + at_step(data) + (f": {message_of(data)}" if message_of(data) else "")


def _node(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Node %(node)s lost: no heartbeat") % {"node": data.get("node") or "?"}


def _cordoned(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Node %(node)s cordoned") % {"node": data.get("node") or "?"}
    if data.get("device") is not None:
        text = _("Device %(device)s of node %(node)s cordoned") % {
            "device": data["device"],
            "node": data.get("node") or "?",
        }
    return text + (f": {data['reason']}" if data.get("reason") else "")


def _preflight(data: Mapping[str, Any], rank: int | None) -> str:
    low = [str(item.get("message")) for item in data.get("shortfalls") or []]
    if low:
        return _("Preflight probe failed: %(faults)s") % {"faults": "; ".join(low)}
    return _("Preflight probe passed in %(time)s") % {
        "time": formatting.duration(data.get("seconds") or 0.0)
    }


def _plan_chosen(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Plan chosen by measurement: %(plan)s") % {
        "plan": plan_ranks.name_of(data.get("plan") or {})
    }
    reason = str(data.get("reason") or "").rstrip(".")
    return text + (f". {reason}" if reason else "")


def _weights(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Weights of %(name)s loaded") % {
        "name": data.get("weights") or data.get("path") or _("a model")
    }
    if data.get("seconds"):
        text += _(" in %(time)s") % {"time": formatting.duration(data["seconds"])}
    tokenizer = data.get("tokenizer")
    if tokenizer == "bytes":
        text += _("; text is read as bytes")
    elif tokenizer:
        text += _("; tokenizer: %(name)s") % {"name": _tokenizer_name(str(tokenizer))}
    differs = [str(item) for item in data.get("model_differs_in") or []]
    if differs:
        text += _("; this model differs in %(fields)s") % {"fields": formatting.listed(differs[:4])}
    return text


def _frozen_weights(data: Mapping[str, Any], rank: int | None) -> str:
    names = {"reference": _("reference"), "teacher": _("teacher")}
    text = _("Weights of the %(use)s loaded: %(name)s") % {
        "use": names.get(str(data.get("use")), data.get("use")),
        "name": data.get("weights") or _("a copy of the initial weights"),
    }
    if data.get("bytes"):
        text += _(", %(size)s per rank") % {"size": formatting.memory(data["bytes"])}
    return text


def _value_weights(data: Mapping[str, Any], rank: int | None) -> str:
    heads = {"loaded": _("with its scalar head"), "new": _("with a new scalar head")}
    return _("Weights of the value model loaded: %(name)s, %(head)s") % {
        "name": data.get("weights") or data.get("path") or _("a model"),
        "head": heads.get(str(data.get("head")), data.get("head")),
    }


def _tokenizer_name(path: str) -> str:
    """File and folder of a tokenizer; a run's own is stored with its checkpoints."""
    parts = PurePath(path).parts
    if parts[-2:] == ("checkpoints", "tokenizer.json"):
        return _("the run's tokenizer.json")
    return "/".join(parts[-2:])


def _evaluation(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Evaluation before and after submitted as run %(id)s") % {"id": data.get("into")}


def _missed(data: Mapping[str, Any], rank: int | None) -> str:
    likely = data.get("likely")
    causes = formatting.listed([str(item) for item in likely]) if likely else ""
    metric = str(data.get("what") or data.get("metric") or _("a metric"))
    measured, predicted = (
        predicted_vs_measured.format_value(metric, formatting.number(data.get(key)))
        for key in ("measured", "predicted")
    )
    text = _("Prediction missed: %(metric)s %(measured)s, predicted %(predicted)s") % {
        "metric": predicted_vs_measured.title_of(metric),
        "measured": measured,
        "predicted": predicted,
    }
    return text + (_("; likely cause: %(causes)s") % {"causes": causes} if causes else "")


def _slow(data: Mapping[str, Any], rank: int | None) -> str:
    share = formatting.number(data.get("ratio"))
    causes = [
        message_of(cause)
        for cause in data.get("causes") or []
        if isinstance(cause, dict) and message_of(cause)
    ]
    text = _("Slower than predicted")
    if share is not None:
        text = _("Slow: %(share)s of the predicted speed") % {"share": formatting.percent(share)}
    return f"{text}. {' '.join(causes[:2])}" if causes else text


def _engine_job(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("kind") == "kubernetes":
        text = _("Submitted to %(engine)s as job %(job)s, queue %(partition)s")
    else:
        text = _("Submitted to %(engine)s as job %(job)s, partition %(partition)s")
    return text % {key: data.get(key, "?") for key in ("engine", "job", "partition")}


def _stopped(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Stopped on request") + on_rank(rank) + at_step(data)


def _engine_job_lost(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("%(engine)s lost job %(job)s before it started; it is submitted again")
    return text % {key: data.get(key, "?") for key in ("engine", "job")}


# event type → description of its data on a rank
DESCRIBERS: Final[dict[str, Describer]] = {
    "invalid_event": _invalid,
    "metrics_dropped": _metrics_dropped,
    "state_changed": _state,
    "checkpoint_restored": with_reason(gettext_noop("Resumed from a checkpoint")),
    "rollouts_missing": with_reason(
        gettext_noop("Sampling new answers: the checkpoint's rollouts are not on this node")
    ),
    "rollouts_restored": with_reason(gettext_noop("Continues with stored rollouts")),
    "rank_exited": _exited,
    "engine_job_submitted": _engine_job,
    "engine_job_lost": _engine_job_lost,
    "node_lost": _node,
    "node_cordoned": _cordoned,
    "preflight": _preflight,
    "plan_chosen": _plan_chosen,
    "out_of_memory": with_reason(gettext_noop("Out of memory")),
    "checkpoint_stored": _stored,
    "artifact_stored": _stored,
    "copy_dropped": with_reason(gettext_noop("A checkpoint is not copied to the store")),
    "checkpoint_fetched": _fetched,
    "data_fetched": _data_fetched,
    "environment_prepared": _environment,
    "store_problem": _store_problem,
    "disk_full": with_reason(gettext_noop("Log lines are not stored")),
    "telemetry_dropped": with_reason(gettext_noop("Points or events are missing")),
    "straggler": _straggler,
    "hang": _hang,
    "forked": _forked,
    "evaluation_submitted": _evaluation,
    "evaluation_refused": with_reason(gettext_noop("Evaluation not submitted")),
    "rewound": _rewound,
    "preempted": _preempted,
    "stopped": _stopped,
    "resize_requested": with_reason(gettext_noop("Changes its number of devices")),
    "resized": _resized,
    "weights_loaded": _weights,
    "frozen_weights_loaded": _frozen_weights,
    "value_weights_loaded": _value_weights,
    "prediction_missed": _missed,
    "slow": _slow,
}
