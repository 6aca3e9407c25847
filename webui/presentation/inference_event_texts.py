"""Descriptions of the events of serve, generate, evaluate and produce runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.presentation import formatting
from webui.presentation.event_parts import Describer


def _serving(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Serving %(model)s: context %(context)s tokens") % {
        "model": data.get("model") or _("the model"),
        "context": formatting.quantity(data.get("context")),
    }
    blocks = data.get("blocks")
    if isinstance(blocks, int):
        text += ngettext(", %(count)s KV cache block", ", %(count)s KV cache blocks", blocks) % {
            "count": f"{blocks:,}"
        }
    return text


def _draining(data: Mapping[str, Any], rank: int | None) -> str:
    running = data.get("running")
    text = _("Draining: no new requests")
    if isinstance(running, int) and running:
        text += ngettext(
            "; %(count)s request may still finish", "; %(count)s requests may still finish", running
        ) % {"count": f"{running:,}"}
    return text


def _served(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("requests") or 0)
    text = ngettext("Served %(count)s request", "Served %(count)s requests", count) % {
        "count": f"{count:,}"
    }
    tokens = data.get("output_tokens", data.get("new_tokens"))  # version 0.1 wrote `new_tokens`
    if tokens:
        text += _(", %(count)s output tokens") % {"count": formatting.quantity(tokens)}
    first = formatting.number((data.get("ttft_s") or {}).get("p50"))
    per_token = formatting.number((data.get("tpot_s") or {}).get("p50"))
    medians = []
    if first and not tokens:  # of a reward model, or of log-probabilities alone
        medians.append(_("time per request %(time)s") % {"time": formatting.seconds(first)})
    elif first:
        medians.append(_("time to first token %(time)s") % {"time": formatting.seconds(first)})
    if per_token:
        medians.append(_("%(time)s per token") % {"time": formatting.seconds(per_token)})
    if medians:
        text += _("; median %(latencies)s") % {"latencies": formatting.listed(medians)}
    return text


def _generated(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("answers") or 0)
    text = ngettext("Generated %(count)s answer", "Generated %(count)s answers", count) % {
        "count": f"{count:,}"
    }
    earlier = data.get("existing", data.get("found"))  # version 0.1 wrote `found`
    if isinstance(earlier, int) and earlier:
        text += _(", %(count)s of them in an earlier attempt") % {"count": f"{earlier:,}"}
    return text


def _evaluated(data: Mapping[str, Any], rank: int | None) -> str:
    values = data.get("metrics")
    metrics: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
    parts = [
        f"{name.replace('_', ' ')} {formatting.quantity(value, 4)}"
        for name, value in list(metrics.items())[:4]
    ]
    count = int(data.get("lines") or 0)
    text = ngettext("Evaluated %(count)s example", "Evaluated %(count)s examples", count)
    return text % {"count": f"{count:,}"} + (f": {formatting.listed(parts)}" if parts else "")


def _quantized(data: Mapping[str, Any], rank: int | None) -> str:
    kind = data.get("quantize") or data.get("kind") or data.get("method")
    text = _("Weights quantized")
    if kind:
        text = _("Weights quantized to %(kind)s") % {"kind": kind}
    before, after = (formatting.number(data.get(key)) for key in ("bytes_before", "bytes_after"))
    if before and after:
        text += f": {formatting.memory(before)} → {formatting.memory(after)}"
    ppl = [formatting.number(data.get(key)) for key in ("perplexity_before", "perplexity_after")]
    if ppl[0] and ppl[1]:
        text += _(", perplexity %(before)s → %(after)s") % {
            "before": formatting.quantity(ppl[0], 4),
            "after": formatting.quantity(ppl[1], 4),
        }
    return text


def _produced(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("accepted") or 0)
    text = ngettext("Produced %(count)s line", "Produced %(count)s lines", count) % {
        "count": f"{count:,}"
    }
    rejected = data.get("rejected")
    parts = (
        [f"{name} {number:,}" for name, number in rejected.items() if isinstance(number, int)]
        if isinstance(rejected, dict)
        else []
    )
    return text + (_("; rejected: %(list)s") % {"list": formatting.listed(parts)} if parts else "")


def _server_lost(data: Mapping[str, Any], rank: int | None) -> str:
    return _("The server was lost: %(message)s") % {"message": data.get("message") or ""}


# event type → description of its data on a rank
DESCRIBERS: Final[dict[str, Describer]] = {
    "serving": _serving,
    "draining": _draining,
    "served": _served,
    "generated": _generated,
    "evaluated": _evaluated,
    "quantized": _quantized,
    "produced": _produced,
    "server_lost": _server_lost,
}
