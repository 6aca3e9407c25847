"""Sentences about the fleet, a node, and its devices. Pure functions of what a page shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.fleet.selectors import NodeFacts
from webui.presentation import formatting
from workers.contracts.wire.versions import Skew

_NAMED: Final = 3  # nodes named in a sentence; of more, their number


def sentence(nodes: Sequence[NodeFacts], *, held: int) -> str:
    """Summarize devices in use and problems of nodes; `held` devices are allocated."""
    if not nodes:
        return _("No node has joined yet, so no run can start.")
    devices = sum(node.devices for node in nodes)
    text = ngettext("%(count)s node", "%(count)s nodes", len(nodes)) % {"count": f"{len(nodes):,}"}
    text += ngettext(", %(count)s device", ", %(count)s devices", devices) % {
        "count": f"{devices:,}"
    }
    text += _(": %(held)s allocated, %(free)s free") % {
        "held": f"{held:,}",
        "free": f"{devices - held:,}",
    }
    by_health: dict[str, list[str]] = {}
    for node in nodes:
        if node.health != "up":
            by_health.setdefault(node.health, []).append(node.name)
    troubles = [_named(names, _(health)) for health, names in by_health.items()]
    troubles += _all_named(nodes, _("drained"), lambda node: node.drained)
    troubles += _version_troubles(nodes)
    troubles += _all_named(nodes, _("cordoned"), lambda node: node.cordoned)
    unusable = sum(node.devices if node.cordoned else node.unusable for node in nodes)
    if unusable:
        troubles.append(
            ngettext("%(count)s unusable device", "%(count)s unusable devices", unusable)
            % {"count": f"{unusable:,}"}
        )
    return f"{text}; {formatting.listed(troubles) if troubles else _('all nodes are up')}."


def _all_named(
    nodes: Sequence[NodeFacts], state: str, has: Callable[[NodeFacts], bool]
) -> list[str]:
    names = [node.name for node in nodes if has(node)]
    return [_named(names, state)] if names else []


def _named(names: Sequence[str], state: str) -> str:
    """`a is lost`, `a, b and c are lost`, or of more nodes their number."""
    if len(names) == 1:
        return _("%(node)s is %(state)s") % {"node": names[0], "state": state}
    shown = formatting.listed(names) if len(names) <= _NAMED else _count(len(names))
    return _("%(nodes)s are %(state)s") % {"nodes": shown, "state": state}


def _count(nodes: int) -> str:
    return ngettext("%(count)s node", "%(count)s nodes", nodes) % {"count": f"{nodes:,}"}


def _version_troubles(nodes: Sequence[NodeFacts]) -> list[str]:
    """Nodes whose agents have another version than the control plane."""
    refused = [node.name for node in nodes if node.skew is Skew.REFUSED]
    other = sum(node.skew is Skew.MINOR for node in nodes)
    troubles = []
    if refused:
        troubles.append(
            ngettext(
                "%(nodes)s gets no new runs because of its release",
                "%(nodes)s get no new runs because of their releases",
                len(refused),
            )
            % {
                "nodes": formatting.listed(refused)
                if len(refused) <= _NAMED
                else _count(len(refused))
            }
        )
    if other:
        troubles.append(
            ngettext(
                "%(count)s node runs another release",
                "%(count)s nodes run another release",
                other,
            )
            % {"count": other}
        )
    return troubles


def node_sentence(shown: dict[str, Any]) -> str:
    """Summarize a node's health and use."""
    node, devices = shown["node"], shown["devices"]
    text = {
        "up": _("The node is up"),
        "silent": _("The node is silent: no recent heartbeat; its runs may still be running"),
        "lost": _("The node is lost: its runs were requeued"),
    }[node.health]
    held = sum(bool(device["run"]) for device in devices)
    text += ngettext(
        "; %(held)s of %(count)s device allocated",
        "; %(held)s of %(count)s devices allocated",
        len(devices),
    ) % {"held": held, "count": len(devices)}
    if node.loss_held:
        text += _("; too many nodes are silent at once: confirm that this one is lost")
    if shown["compatibility"].skew is Skew.REFUSED:
        text += _("; no new runs start here because of its release")
    if (cordon := shown["cordon"]) is not None:
        reason = f" ({cordon.reason.rstrip('.')})" if cordon.reason else ""
        text += _("; cordoned%(reason)s, no new runs start here") % {"reason": reason}
    if node.drained:
        reason = f" ({node.drain_reason})" if node.drain_reason else ""
        text += _("; drained%(reason)s, no new runs start here") % {"reason": reason}
    return text + "."


def slow_text(slow: Any) -> str:
    """Numbers of a slow device; the run's name is not shown, as others may not see it."""
    if not slow:
        return ""
    text = _("other devices of its gang waited %(late)s per step for it") % {
        "late": formatting.duration(slow["late_s"])
    }
    if isinstance(slow.get("share"), int | float):
        text += _(", %(share)s of the time") % {"share": formatting.percent(slow["share"])}
    return text


def isolation_text(reported: dict[str, Any] | None) -> str:
    """How the node separates runs from itself and from each other, as a sentence."""
    if not reported:
        return _("Not reported; upgrade the agent")
    methods = {
        "agent": _("None: runs execute as the agent's user (%(detail)s)"),
        "uids": _("Runs execute under %(detail)s"),
        "account": _("Runs execute under %(detail)s"),
    }
    sentence = methods.get(reported.get("method", ""), "%(detail)s") % {
        "detail": reported.get("detail", "")
    }
    runtime, limits = reported.get("container"), reported.get("limits")
    if runtime:
        sentence += _("; images run with %(runtime)s") % {"runtime": runtime}
    if limits:
        sentence += _("; limits of %(limits)s") % {"limits": limits}
    return sentence


def broker_user_text(reported: str | None) -> str:
    """As whom the node connects to the broker, as a sentence."""
    if reported is None:
        return _("Not reported; it shares credentials with other nodes until its agent is upgraded")
    if reported == "own":
        return _("Its own broker user, limited to this node's keys")
    return _("Credentials that other nodes share; see deploy/README.md")
