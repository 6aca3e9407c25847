"""Gallery page: every chart and component in every state, from generated data."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.templatetags.static import static

from webui.charts import devices, run_charts, training_panels, week
from webui.charts.panel import Line, Panel
from webui.charts.spread import spread
from webui.planner import gallery_sample
from webui.presentation import run_headlines
from webui.views.access import page
from webui.views.gallery import (
    gallery_bad_input,
    gallery_engine_sample,
    gallery_history_sample,
    gallery_panel_samples,
    gallery_report_sample,
)
from workers.contracts.wire.node_messages import RunState

POINTS = 400
NOW = datetime(2026, 1, 15, 14, 30, tzinfo=UTC)  # reproducible


@page
def gallery(request: HttpRequest) -> HttpResponse:
    """Show the gallery."""
    shown = [
        *run_charts.summary([name for name in curves() if name != "odd"], "train"),
        _non_finite(),
        _empty(),
        *run_charts.system(["device/power_w"]),
        training_panels.STEP_SPLIT,
        training_panels.SENT,
        training_panels.VIOLATION,
        training_panels.OFFLOADED,
    ]
    context = {
        "states": [str(state) for state in RunState],
        "plans": PLANS,
        "headlines": [run_headlines.run_headline(facts) for facts in HEADLINE_FACTS],
        "marks": [devices.mark(**device) for device in _devices()],
        "days": week.week(_allocations(), devices=8, now=NOW),
        "spread": spread(
            {
                0: {"step_time_s": 0.21, "mfu": 0.4},
                1: {"step_time_s": 0.22, "mfu": 0.39},
                2: {"step_time_s": 0.33, "mfu": 0.26},
            },
            ["step_time_s", "mfu"],
        ),
        "panels": [panel.to_dict() for panel in shown],
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        "source": {
            "name": "gallery",
            "series": "",
            "per_step": {"tokens": 2048.0, "flops": 1.2e10},
            "curves": curves(),
            "ended": True,
        },
        "chart_marks": _marks(),
        "loss_curve": ",".join(f"{value:.4g}" for value in curves()["loss"]["y"][::8]),
    }
    context["planner"] = gallery_sample.gallery_context()
    context["panel_cards"] = gallery_panel_samples.gallery_panels()
    context["engine"] = gallery_engine_sample.gallery_context()
    context["history"] = gallery_history_sample.gallery_context()
    context["report"] = gallery_report_sample.gallery_context()
    context["bad"] = gallery_bad_input.gallery_context()
    return render(request, "webui/gallery.html", context)


def curves() -> dict[str, dict[str, Any]]:
    """Return series responses like the API's, with noise, spikes and gaps."""
    steps = list(range(1, 4 * POINTS + 1, 4))
    ripple = [math.sin(step * 0.7) * math.cos(step * 0.13) for step in steps]
    loss = [
        1.4 + 4.1 * math.exp(-step / 180) + 0.06 * wave
        for step, wave in zip(steps, ripple, strict=True)
    ]
    speed = [
        12_400 + 260 * wave - (3_900 if 600 < step < 640 else 0)
        for step, wave in zip(steps, ripple, strict=True)
    ]
    values: dict[str, list[Any]] = {
        "loss": loss,
        "tokens_per_s": speed,
        "mfu": [value / 29_000 for value in speed],
        "hfu": [value / 24_000 for value in speed],
        "grad_norm": [
            0.9 + 0.3 * wave + (6 if step == 801 else 0)
            for step, wave in zip(steps, ripple, strict=True)
        ],
        "lr": [
            3e-3 * min(1, step / 100) * (0.55 + 0.45 * math.cos(math.pi * step / 1600))
            for step in steps
        ],
        "step_time_s": [2048 / value for value in speed],
        "data_time_s": [0.004 + 0.002 * abs(wave) for wave in ripple],
        "loss_scale": [2.0 ** (16 + step // 400 - 2 * (step > 800)) for step in steps],
        "odd": [
            ("NaN" if 600 < step < 620 else "Infinity" if step == 901 else 2 + wave)
            for step, wave in zip(steps, ripple, strict=True)
        ],
        "device/power_w": [520 + 90 * wave for wave in ripple],
    }
    split = {"data": 0.03, "forward": 0.29, "backward": 0.5, "optimizer": 0.06, "other": 0.02}
    step_s = values["step_time_s"]
    values |= {
        f"time/{part}_s": [share * value for value in step_s] for part, share in split.items()
    }
    values["comm/exposed_s"] = [
        0.1 * value * (1 + 0.5 * wave) for value, wave in zip(step_s, ripple, strict=True)
    ]
    values["comm/all_reduce_bytes"] = [3.1e8] * len(steps)
    values["comm/all_gather_bytes"] = [9e7] * len(steps)
    values["comm/bytes"] = [4e8] * len(steps)
    values["moe/max_violation"] = [
        0.3 + 2 * math.exp(-step / 200) + 0.1 * abs(wave)
        for step, wave in zip(steps, ripple, strict=True)
    ]
    values["memory/offloaded_bytes"] = [6 * 2**30] * len(steps)
    for i, part in enumerate(training_panels.MEMORY_PARTS):
        values[f"memory/{part}_bytes"] = [
            (2 + i) * 2**28 * (1 + 0.2 * wave * (part == "activations")) for wave in ripple
        ]
    series = {
        name: {"x": steps, "y": values, "total_points": len(values), "rank": 0}
        for name, values in values.items()
    }
    series["val_loss"] = {
        "x": steps[24::25],
        "y": [value + 0.05 for value in loss[24::25]],
        "total_points": 16,
        "rank": 0,
    }
    series["loss"] |= {
        "low": [value - 0.12 for value in loss],
        "high": [value + 0.16 for value in loss],
        "total_points": 160_000,
    }
    return series


def _non_finite() -> Panel:
    return Panel("odd", "Not finite", "", (Line("odd", "marked on the axis", "loss"),))


def _empty() -> Panel:
    return Panel("empty", "Empty", "", (Line("never", "none", "loss"),))


def _marks() -> list[dict[str, Any]]:
    events = [
        (400, "good", "Checkpoint saved at step 400"),
        (801, "event", "Loss scale 65,536 → 32,768"),
        (1200, "bad", "Rank 1 exited"),
    ]
    start = NOW.timestamp()
    return [
        {
            "step": step,
            "time": start + step / 6,
            "tokens": step * 2048,
            "flops": step * 1.2e10,
            "kind": kind,
            "text": text,
        }
        for step, kind, text in events
    ]


PLANS: list[dict[str, Any]] = [
    {"dp": 1, "precision": "fp32"},
    {"dp": 4, "zero": 2, "precision": "bf16"},
    {
        "dp": 4,
        "tp": 2,
        "pp": 2,
        "zero": 1,
        "sequence_parallel": True,
        "recompute": "selective",
        "precision": "bf16",
    },
    {"dp": 8, "ep": 4, "zero": 3, "offload": "optimizer", "precision": "fp8"},
]

HEADLINE_FACTS: list[run_headlines.RunFacts] = [
    run_headlines.RunFacts(
        "queued",
        wait_reason="waits for 4 devices; 2 are free, and run 11 holds the others for about 5 min",
    ),
    run_headlines.RunFacts("starting", devices=2, attempt=1),
    run_headlines.RunFacts("running"),
    run_headlines.RunFacts("running", summary={"trying": {"number": 3, "count": 8}}),
    run_headlines.RunFacts(
        "running",
        loss_curve=[3, 2.9, 2.7, 2.5, 2.2, 2.0, 1.9, 1.7, 1.6, 1.5],
        summary={
            "step": 1204,
            "steps": 2000,
            "loss": 1.52,
            "tokens_per_s": 12_400,
            "mfu": 0.43,
            "eta_s": 203,
        },
    ),
    run_headlines.RunFacts(
        "running", summary={"step": 90, "steps": 2000, "loss": "NaN"}, last_step_s=240
    ),
    run_headlines.RunFacts("stopping", requested="pause", summary={"step": 700, "steps": 2000}),
    run_headlines.RunFacts("paused", summary={"step": 700, "steps": 2000}),
    run_headlines.RunFacts(
        "finished",
        runtime_s=331,
        summary={
            "step": 2000,
            "steps": 2000,
            "loss": 1.43,
            "val_loss": 1.51,
            "tokens_per_s": 12_400,
        },
    ),
    run_headlines.RunFacts(
        "failed",
        exit={"class": "out_of_memory", "reason": "CUDA out of memory", "rank": 1, "step": 12},
    ),
    run_headlines.RunFacts(
        "cancelled", exit={"reason": "Cancelled by ada."}, summary={"step": 40, "steps": 2000}
    ),
]


def _devices() -> list[dict[str, Any]]:
    base: dict[str, Any] = {
        "node": "n1",
        "health": "up",
        "drained": False,
        "healthy": True,
        "memory_bytes": 80 * 2**30,
    }
    run = {
        "id": 12,
        "name": "first flight",
        "owner": "ada",
        "state": "running",
        "step_time_s": 0.2,
        "mfu": 0.42,
        "age_s": 1.0,
    }
    half = {"memory_used_bytes": 40 * 2**30}
    return [
        {**base, "index": 0, "sample": None, "run": None},
        {**base, "index": 1, "sample": half, "run": run},
        {**base, "index": 2, "sample": half, "run": {**run, "mfu": 0.1}},
        {**base, "index": 3, "sample": half, "run": {**run, "age_s": 40.0}},
        {**base, "index": 4, "sample": half, "run": {**run, "age_s": 400.0}},
        {**base, "index": 5, "sample": {**half, "processes": [1], "utilization": 0.9}, "run": None},
        {**base, "index": 6, "healthy": False, "sample": None, "run": None},
    ]


def _allocations() -> list[week.RunAllocation]:
    return [
        week.RunAllocation(
            NOW - timedelta(days=day, hours=hours), NOW - timedelta(days=day), 0.2 + 0.04 * day
        )
        for day, hours in ((6, 5), (5, 9), (3, 13), (2, 2), (1, 11), (0, 7))
        for _ in range(6)
    ]
