"""Summarizes a run's numerics: overflows, loss scale, non-finite values, expert balance. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting

_BALANCED = 0.5  # the largest expert load above even that still counts as balanced
_UNSCALED = {
    "fp32": gettext_noop("All values are finite; fp32 needs no loss scale."),
    "bf16": gettext_noop("All values are finite; bf16 has fp32's range and needs no loss scale."),
}


def summarize_numerics(
    events: Sequence[tuple[str, Mapping[str, Any]]],
    latest: Mapping[str, float],
    *,
    precision: str,
    truncated: bool = False,
) -> str:
    """Return some sentences.

    `events` are `(type, data)`, oldest first; `truncated` if there are more than these.
    """
    parts = [_non_finite(events), *_scales(events, latest, truncated), _experts(latest)]
    text = " ".join(part for part in parts if part)
    if text:
        return text
    if not latest:
        return _("No step logged yet.")
    return _(_UNSCALED.get(precision, gettext_noop("All values are finite.")))


def _non_finite(events: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Where values became non-finite; of several ranks' reports the first with a module."""
    reports = [data for type, data in events if type == "non_finite"]
    if not reports:
        return ""
    first = next((data for data in reports if data.get("module")), reports[0])
    what = str(first.get("what") or _("a value")).partition(", first in")[0]
    step = formatting.number(first.get("step"))
    when = _(" at step %(step)s") % {"step": f"{int(step):,}"} if step is not None else ""
    if not first.get("module"):
        return _("Non-finite %(what)s%(when)s; the first module is unknown.") % {
            "what": what,
            "when": when,
        }
    rank_text = str(first.get("what") or "").rpartition("(rank ")[2].rstrip(")")
    rank = first.get("rank", rank_text if rank_text.isdecimal() else None)
    where = first["module"]
    if rank is not None:
        where = _("%(module)s on rank %(rank)s") % {"module": first["module"], "rank": rank}
    return _("Non-finite %(what)s%(when)s, first in %(where)s.") % {
        "what": what,
        "when": when,
        "where": where,
    }


def _scales(
    events: Sequence[tuple[str, Mapping[str, Any]]], latest: Mapping[str, float], truncated: bool
) -> list[str]:
    """The loss scale; with a value model, which has its own, the policy's and the value model's."""
    scale, of_value = (
        formatting.number(latest.get(name)) for name in ("loss_scale", "value/loss_scale")
    )
    own = [(type, data) for type, data in events if not data.get("model")]
    rest = [(type, data) for type, data in events if data.get("model") == "value"]
    if of_value is None:
        fixed = _(" and has not changed: no gradient overflowed.")
        return [_scale(own, scale, truncated, _("The loss scale is %(scale)s"), fixed)]
    fixed = _(" and has not changed: no gradient of this model overflowed.")
    return [
        _scale(own, scale, truncated, _("The policy's loss scale is %(scale)s"), fixed),
        _scale(rest, of_value, truncated, _("The value model's loss scale is %(scale)s"), fixed),
    ]


def _scale(
    events: Sequence[tuple[str, Mapping[str, Any]]],
    scale: float | None,
    truncated: bool,
    start: str,
    fixed: str,
) -> str:
    """One model's loss scale and its changes; `fixed` ends the sentence if there are none."""
    if scale is None:
        return ""
    skipped = sum(1 for type, data in events if type == "overflow_skipped_step")
    changes = [data for type, data in events if type == "loss_scale_changed"]
    pairs = [
        (formatting.number(data.get("old")), formatting.number(data.get("new"))) for data in changes
    ]
    moves = [new - old for old, new in pairs if old is not None and new is not None]
    fell, grew = sum(1 for move in moves if move < 0), sum(1 for move in moves if move > 0)
    text = start % {"scale": formatting.quantity(scale)}
    if not skipped and not moves:
        return text + fixed
    directions = []
    if fell:
        directions.append(_("fell %(times)s") % {"times": _times(fell)})
    if grew:
        directions.append(_("grew %(times)s") % {"times": _times(grew)})
    if directions:
        text += _("; it %(changes)s") % {"changes": formatting.listed(directions)}
    if skipped:
        skips = ngettext(
            "%(count)s step was skipped because gradients overflowed",
            "%(count)s steps were skipped because gradients overflowed",
            skipped,
        ) % {"count": f"{skipped:,}"}
        text += "; " + (_("at least ") if truncated else "") + skips
    return text + "."


def _experts(latest: Mapping[str, float]) -> str:
    above = formatting.number(latest.get("moe/max_violation"))
    if above is None:
        return ""
    text = _("Experts are unbalanced: the fullest gets %(share)s more than the even share.")
    if above <= _BALANCED:
        text = _("Experts are balanced: the fullest gets %(share)s more than the even share.")
    return text % {"share": formatting.percent(above)}


def _times(count: int) -> str:
    return {1: _("once"), 2: _("twice")}.get(count, _("%(count)s times") % {"count": count})
