"""Requests and cache tabs of a serve run: engine state, requests, KV cache, prediction."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import endpoint
from webui.charts import blocks, waterfall
from webui.charts.blocks import tile
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from webui.tabs import adapters
from workers.contracts.wire.serving_reports import (
    EngineSnapshot,
    EngineState,
    RequestStats,
    Summary,
)

_PERCENTILES: Final = ("p50", "p90", "p99")


def requests(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the context of the Requests tab: running requests, then ended ones.

    After the server ended they come from its summary or its last snapshot.
    """
    state, summary = _state(facts), _summary(facts)
    snapshot = _snapshot(facts, state)
    # the summary is newer than the snapshot
    if state is None and summary is not None and summary.last:
        rows, now_s, snapshot = list(summary.last), None, None
    else:
        shown = state or (snapshot.state if snapshot else None)
        rows, now_s = (list(shown.requests), shown.now_s) if shown else ([], None)
        snapshot = snapshot if rows else None
    return {
        **_shared(facts, state, snapshot),
        "summary": _totals(summary, scores=facts.scores) if summary else None,
        "tiles": _current(state, facts.latest, scores=facts.scores) if state else [],
        "timeline": waterfall.waterfall(rows, now_s=now_s),
        "comparison": [] if facts.scores else compare(facts.run.prediction, rows, now_s),
        "files": _files(facts),
        **_adapters(facts, request, state),
    }


def _adapters(facts: Facts, request: HttpRequest, state: EngineState | None) -> dict[str, Any]:
    """Return the context of the adapters card of the whole page, not of its polled part."""
    if state is None or not state.adapter_slots or request.headers.get("HX-Request"):
        return {}
    return {**adapters.content(facts, request), "adapter_choices": adapters.choices(facts)}


def cache(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the context of the Cache tab: blocks by use, and numbers."""
    state, summary = _state(facts), _summary(facts)
    snapshot = _snapshot(facts, state)
    shown = state or (snapshot.state if snapshot else None)
    size = (facts.run.prediction or {}).get("kv_bytes_per_token")
    return {
        **_shared(facts, state, snapshot),
        "field": blocks.field(shown) if shown else None,
        "block_size": shown.block_size if shown else None,
        "tiles": _cache_tiles(shown, summary, facts.latest, size),
    }


def compare(
    prediction: dict[str, Any] | None, rows: list[RequestStats], now_s: float | None
) -> list[dict[str, str]]:
    """Return predicted vs measured latency at the measured prompt length and concurrency.

    Running requests last until `now_s`. Empty with fewer than three ended requests.
    """
    ended = [row for row in rows if row.state == "ended" and row.first_token_s is not None]
    if not prediction or prediction.get("kind") != "serving" or len(ended) < 3:
        return []
    concurrency = max(1.0, median(sum(_overlaps(one, other) for other in ended) for one in ended))
    point = min(
        prediction["curve"], key=lambda entry: abs(entry["batch"] - concurrency), default=None
    )
    computed = median(max(1, row.prompt_tokens - row.shared_tokens) for row in ended)
    first = [time for row in ended if (time := waterfall.first_token_s(row)) is not None]
    per_token = [time for row in ended if (time := waterfall.per_token_s(row, now_s)) is not None]
    if point is None or not per_token:
        return []
    ttft = prediction["alone"]["ttft_s"] * computed / prediction["prompt_len"]
    count = round(computed)
    return [
        _pair(
            _("Time to first token"),
            max(ttft, point["tpot_s"]),
            median(first),
            ngettext(
                "%(count)s prompt token to compute, without queueing",
                "%(count)s prompt tokens to compute, without queueing",
                count,
            )
            % {"count": f"{count:,}"},
        ),
        _pair(
            _("Time per token"),
            point["tpot_s"],
            median(per_token),
            _("%(count)s concurrent") % {"count": point["batch"]},
        ),
    ]


def _pair(title: str, predicted: float, measured: float, condition: str) -> dict[str, str]:
    largest = max(predicted, measured) or 1.0
    ratio = measured / predicted if predicted else 1.0
    off = (
        f"×{formatting.quantity(ratio, 2)}"
        if ratio >= 1.5
        else f"{ratio - 1:+.0%}".replace("-", "−")
    )
    return {
        "title": title,
        "condition": condition,
        "predicted": formatting.seconds(predicted),
        "measured": formatting.seconds(measured),
        "predicted_at": f"{100 * predicted / largest:.1f}",
        "measured_at": f"{100 * measured / largest:.1f}",
        "off": off,
        "mood": "" if abs(ratio - 1) <= 0.1 else "good" if ratio < 1 else "warn",
    }


def _overlaps(one: RequestStats, other: RequestStats) -> bool:
    return one.added_s < (other.ended_s or one.added_s) and other.added_s < (
        one.ended_s or other.added_s
    )


def _state(facts: Facts) -> EngineState | None:
    live = facts.endpoint is not None and facts.endpoint.phase in ("serving", "draining")
    return endpoint.engine_state(run=facts.run) if live else None


def _summary(facts: Facts) -> Summary | None:
    ended = facts.endpoint is not None and facts.endpoint.phase not in ("serving", "draining")
    return endpoint.summary_of(run=facts.run) if ended else None


def _snapshot(facts: Facts, state: EngineState | None) -> EngineSnapshot | None:
    return endpoint.last_snapshot(run=facts.run) if state is None else None


def _files(facts: Facts) -> list[Any]:
    """Artifacts of an ended run's newest attempt: the requests and the last engine snapshot."""
    if facts.run.state not in ENDED:
        return []
    newest = f"attempt-{facts.run.attempt_number}-"
    return [
        (file, file.name.removeprefix(newest))
        for file in runs.artifacts_of(run=facts.run)
        if file.name.startswith(newest)
    ]


def _shared(
    facts: Facts, state: EngineState | None, snapshot: EngineSnapshot | None
) -> dict[str, Any]:
    status = facts.endpoint
    assert status is not None
    return {
        "endpoint": status,
        "state": state,
        "live": status.phase != "ended",
        "snapshot_time": datetime.fromtimestamp(snapshot.time, UTC)
        if snapshot is not None
        else None,
        "silent": state is None and status.phase in ("serving", "draining"),
        "scores": facts.scores,
        "source": facts.source(),
    }


def _current(state: EngineState, latest: dict[str, float], *, scores: bool) -> list[dict[str, str]]:
    first = [time for row in state.requests if (time := waterfall.first_token_s(row)) is not None]
    per_token = [
        time
        for row in state.requests
        if (time := waterfall.per_token_s(row, state.now_s)) is not None
    ]
    speed = latest.get("inference/tokens_per_s") if state.running else 0.0
    preempted = latest.get("inference/preemptions") or 0
    caption = _("median of the requests below")
    latency = formatting.seconds(median(first)) if first else formatting.DASH
    if scores:
        speed = latest.get("inference/scores_per_s") if state.running else 0.0
        rates = [
            tile(_("Time per score"), latency, caption),
            tile(_("Scores/s"), formatting.quantity(speed), _("current, all requests")),
        ]
    else:
        rates = [
            tile(_("Time to first token"), latency, caption),
            tile(
                _("Time per token"),
                formatting.seconds(median(per_token)) if per_token else formatting.DASH,
                caption,
            ),
            tile(_("Tokens/s"), formatting.quantity(speed), _("current, all requests")),
        ]
    return [
        tile(
            _("Running"),
            f"{state.running:,}",
            _("%(count)s waiting") % {"count": f"{state.waiting:,}"},
        ),
        *rates,
        tile(
            _("Completed"),
            f"{state.ended:,}",
            _("%(count)s preempted") % {"count": f"{preempted:,.0f}"},
        ),
    ]


def _totals(summary: Summary, *, scores: bool) -> dict[str, Any]:
    reasons = formatting.listed(
        [f"{count:,} {reason}" for reason, count in summary.finishes.items()]
    )
    cached = _("%(count)s from the cache") % {"count": formatting.quantity(summary.shared_tokens)}
    rows = [(_("Time to first token"), summary.ttft_s), (_("Time per token"), summary.tpot_s)]
    if scores:
        rows = [(_("Time per score"), summary.ttft_s)]
    output = tile(
        _("Output tokens"),
        formatting.quantity(summary.new_tokens),
        _("in %(time)s") % {"time": formatting.duration(summary.seconds)},
    )
    return {
        "tiles": [
            tile(_("Requests"), f"{summary.requests:,}", reasons),
            tile(_("Prompt tokens"), formatting.quantity(summary.prompt_tokens), cached),
            *([] if scores else [output]),
        ],
        "rows": [
            {
                "title": title,
                "cells": [formatting.seconds((values or {}).get(name)) for name in _PERCENTILES],
            }
            for title, values in rows
            if summary.requests
        ],
    }


def _cache_tiles(
    state: EngineState | None, summary: Summary | None, latest: dict[str, float], size: float | None
) -> list[dict[str, str]]:
    """Tiles of the cache's use and hit rate; the summary's totals replace the live hit rate."""
    live = blocks.numbers(state, latest, bytes_per_token=size) if state else []
    totals = _cache_totals(summary)
    return [item for item in live if not totals or item["title"] != totals[-1]["title"]] + totals


def _cache_totals(summary: Summary | None) -> list[dict[str, str]]:
    if summary is None:
        return []
    total = summary.prompt_tokens
    share = summary.shared_tokens / total if total else None
    return [
        tile(_("Prompt tokens"), formatting.quantity(total), _("all requests")),
        tile(
            _("Prefix cache hit rate"),
            formatting.percent(share),
            _("%(count)s tokens not recomputed")
            % {"count": formatting.quantity(summary.shared_tokens)},
        ),
    ]
