"""What the tabs of a serve run share: the engine as it stands now or ended, its requests, its
cache, its prediction.
"""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import endpoint
from webui.charts import blocks, waterfall
from webui.charts.blocks import tile
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from workers.contracts.wire.serving_reports import EngineState, RequestTold, Stood, Summary

_PERCENTILES: Final = ("p50", "p90", "p99")


def requests(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """The requests tab: those on their way, then those that ended; of a server that is gone as they
    stood at last.
    """
    state, summary = _state(facts), _summary(facts)
    stood = _stood(facts, state)
    # what became of them, later than what stood
    if state is None and summary is not None and summary.last:
        told, now_s, stood = list(summary.last), None, None
    else:
        seen = state or (stood.state if stood else None)
        told, now_s = (list(seen.requests), seen.now_s) if seen else ([], None)
        stood = stood if told else None
    return {
        **_shared(facts, state, stood),
        "summary": _ended(summary) if summary else None,
        "tiles": _now(state, facts.latest) if state else [],
        "fall": waterfall.waterfall(told, now_s=now_s),
        "beside": beside(facts.run.prediction, told, now_s),
        "files": _files(facts),
    }


def cache(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """The cache tab: every block by its use, and numbers; of a server that is gone as it stood at
    last.
    """
    state, summary = _state(facts), _summary(facts)
    stood = _stood(facts, state)
    seen = state or (stood.state if stood else None)
    size = (facts.run.prediction or {}).get("kv_bytes_per_token")
    return {
        **_shared(facts, state, stood),
        "field": blocks.field(seen) if seen else None,
        "block_size": seen.block_size if seen else None,
        "tiles": _cached(seen, summary, facts.latest, size),
    }


def beside(
    prediction: dict[str, Any] | None, told: list[RequestTold], now_s: float | None
) -> list[dict[str, str]]:
    """Predicted beside measured, at the prompt lengths and the number of answers at once that there
    really were. Those
    on their way last until `now_s`."""
    ended = [each for each in told if each.state == "ended" and each.first_token_s is not None]
    if not prediction or prediction.get("kind") != "serving" or len(ended) < 3:
        return []
    together = max(1.0, median(sum(_overlaps(one, other) for other in ended) for one in ended))
    point = min(prediction["curve"], key=lambda each: abs(each["batch"] - together), default=None)
    computed = median(max(1, each.prompt_tokens - each.shared_tokens) for each in ended)
    first = [waited for each in ended if (waited := waterfall.first_token_s(each)) is not None]
    pace = [per for each in ended if (per := waterfall.pace_s(each, now_s)) is not None]
    if point is None or not pace:
        return []
    ttft = prediction["alone"]["ttft_s"] * computed / prediction["prompt_len"]
    return [
        _pair(
            "Time to first token",
            max(ttft, point["tpot_s"]),
            median(first),
            f"prompts of {formatting.count(round(computed), 'token')} to compute, before any queue",
        ),
        _pair("Time per token", point["tpot_s"], median(pace), f"{point['batch']} at once"),
    ]


def _pair(title: str, predicted: float, measured: float, of: str) -> dict[str, str]:
    most = max(predicted, measured) or 1.0
    ratio = measured / predicted if predicted else 1.0
    off = (
        f"×{formatting.quantity(ratio, 2)}"
        if ratio >= 1.5
        else f"{ratio - 1:+.0%}".replace("-", "−")
    )
    return {
        "title": title,
        "of": of,
        "predicted": formatting.seconds(predicted),
        "measured": formatting.seconds(measured),
        "predicted_at": f"{100 * predicted / most:.1f}",
        "measured_at": f"{100 * measured / most:.1f}",
        "off": off,
        "mood": "" if abs(ratio - 1) <= 0.1 else "good" if ratio < 1 else "warn",
    }


def _overlaps(one: RequestTold, other: RequestTold) -> bool:
    return one.added_s < (other.ended_s or one.added_s) and other.added_s < (
        one.ended_s or other.added_s
    )


def _state(facts: Facts) -> EngineState | None:
    live = facts.standing is not None and facts.standing.phase in ("serving", "draining")
    return endpoint.engine_state(run=facts.run) if live else None


def _summary(facts: Facts) -> Summary | None:
    ended = facts.standing is not None and facts.standing.phase not in ("serving", "draining")
    return endpoint.summary_of(run=facts.run) if ended else None


def _stood(facts: Facts, state: EngineState | None) -> Stood | None:
    return endpoint.last_stood(run=facts.run) if state is None else None


def _files(facts: Facts) -> list[Any]:
    """Of the newest attempt of a run that ended: every request, a line each, and how the engine
    stood.
    """
    if facts.run.state not in ENDED:
        return []
    newest = f"attempt-{facts.run.attempt_number}-"
    return [
        (file, file.name.removeprefix(newest))
        for file in runs.artifacts_of(run=facts.run)
        if file.name.startswith(newest)
    ]


def _shared(facts: Facts, state: EngineState | None, stood: Stood | None) -> dict[str, Any]:
    standing = facts.standing
    assert standing is not None
    return {
        "standing": standing,
        "state": state,
        "live": standing.phase != "ended",
        "stood_at": datetime.fromtimestamp(stood.time, UTC) if stood is not None else None,
        "silent": state is None and standing.phase in ("serving", "draining"),
        "source": facts.source(),
    }


def _now(state: EngineState, latest: dict[str, float]) -> list[dict[str, str]]:
    first = [
        waited for each in state.requests if (waited := waterfall.first_token_s(each)) is not None
    ]
    pace = [
        per for each in state.requests if (per := waterfall.pace_s(each, state.now_s)) is not None
    ]
    speed = latest.get("inference/tokens_per_s") if state.running else 0.0
    back = latest.get("inference/preemptions") or 0
    return [
        tile("Running", f"{state.running:,}", f"{state.waiting:,} waiting"),
        tile(
            "First token",
            formatting.seconds(median(first)) if first else formatting.DASH,
            "median of those below",
        ),
        tile(
            "Per token",
            formatting.seconds(median(pace)) if pace else formatting.DASH,
            "median of those below",
        ),
        tile("Tokens/s", formatting.quantity(speed), "lately, all answers together"),
        tile(
            "Answered",
            f"{state.ended:,}",
            f"{back:,.0f} put back for room" if back else "none put back for room",
        ),
    ]


def _ended(summary: Summary) -> dict[str, Any]:
    why = formatting.listed([f"{count:,} {reason}" for reason, count in summary.finishes.items()])
    shared = f"{formatting.quantity(summary.shared_tokens)} found in the cache"
    rows = [("Time to first token", summary.ttft_s), ("Time per token", summary.tpot_s)]
    return {
        "tiles": [
            tile("Requests", f"{summary.requests:,}", why),
            tile("Prompt tokens", formatting.quantity(summary.prompt_tokens), shared),
            tile(
                "New tokens",
                formatting.quantity(summary.new_tokens),
                f"in {formatting.duration(summary.seconds)}",
            ),
        ],
        "rows": [
            {
                "title": title,
                "cells": [formatting.seconds((found or {}).get(name)) for name in _PERCENTILES],
            }
            for title, found in rows
            if summary.requests
        ],
    }


def _cached(
    seen: EngineState | None, summary: Summary | None, latest: dict[str, float], size: float | None
) -> list[dict[str, str]]:
    """How full the cache is or was, and what it spared: over all requests once that is told."""
    now = blocks.numbers(seen, latest, bytes_per_token=size) if seen else []
    over_all = _kept(summary)
    return [
        each for each in now if not over_all or each["title"] != over_all[-1]["title"]
    ] + over_all


def _kept(summary: Summary | None) -> list[dict[str, str]]:
    if summary is None:
        return []
    whole = summary.prompt_tokens
    share = summary.shared_tokens / whole if whole else None
    return [
        tile("Prompt tokens", formatting.quantity(whole), "of all requests"),
        tile(
            "Prefix hits",
            formatting.percent(share),
            f"{formatting.quantity(summary.shared_tokens)} tokens not computed again",
        ),
    ]
