"""Building blocks of pages: panels, grouped logs, ranks, device marks, usage, events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from webui.charts import (
    axes,
    devices,
    predicted_vs_measured,
    reinforcement_panels,
    run_charts,
    training_panels,
    week,
)
from webui.charts.spread import spread
from webui.presentation import event_messages, problems
from webui.presentation.logs.log_grouping import first_cause, format_ranks, group_lines
from webui.presentation.logs.log_level import level
from webui.tabs.config import plan_rows
from webui.templatetags import orrery
from workers.contracts.catalog.metrics import METRICS

NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)


def test_every_known_metric_has_a_chart_in_some_tab_and_its_own_unit() -> None:
    charts = [
        *run_charts.SUMMARY,
        *run_charts.PERFORMANCE,
        *run_charts.NUMERICS,
        *run_charts.SYSTEM,
        training_panels.ALLOCATOR,
    ]
    drawn = {line.name: panel.unit for panel in charts for line in panel.series}
    elsewhere = {"comm/arrival_skew_s", "memory/capacity_bytes", *reinforcement_panels.SHOWN}
    elsewhere |= {"produce/candidates"}  # in the funnel
    bins = {name for name in METRICS if name.startswith("reward/bin_")}  # of the calibration
    assert set(METRICS) - set(drawn) - bins == elsewhere
    drawn = {name: unit for name, unit in drawn.items() if name in METRICS}
    wrong = {name: unit for name, unit in drawn.items() if unit != METRICS[name]}
    assert wrong == {}


def test_a_page_has_no_chart_for_what_is_not_there() -> None:
    assert [panel.id for panel in run_charts.summary(["loss", "lr"], "train")] == ["loss", "lr"]
    assert [panel.id for panel in run_charts.summary([], "train")][:2] == ["loss", "throughput"]
    assert run_charts.system(["loss"]) == []
    sources = run_charts.summary(["loss", "loss/code", "loss/web", "reward"], "external")
    assert [panel.id for panel in sources] == ["loss", "loss_sources", "custom-0"]
    assert sources[2].title == "reward"
    layers = [f"grad_underflow/layer_{layer:02}" for layer in range(40)]
    loads = [f"moe/load/{layer}/{expert}" for layer in range(4) for expert in range(8)]
    data = [
        "loss",
        "loss_scale",
        "moe/max_violation",
        "time/forward_s",
        "comm/send_bytes",
        *layers,
        *loads,
    ]
    assert [panel.id for panel in run_charts.summary(data, "train")] == ["loss", "loss_scale"]
    assert [panel.id for panel in run_charts.numerics(data)] == ["loss_scale", "max_violation"]
    assert [panel.id for panel in run_charts.performance(data)] == ["step_split", "sent"]
    assert run_charts.custom_search(loads + layers) is None
    search = run_charts.custom_search([f"metric-{i}" for i in range(run_charts.MOST_PANELS + 3)])
    assert search is not None and search.total - search.shown == 3


def line(text: str, rank: int, seq: int = 1, attempt: int = 1) -> Any:
    return SimpleNamespace(attempt=attempt, rank=rank, seq=seq, time=NOW, text=text)


def test_equal_lines_of_ranks_are_one_whatever_their_clocks_and_numbers() -> None:
    folded = group_lines(
        [
            line("12:00:01 rank 0 loading", 0),
            line("12:00:02 rank 1 loading", 1),
            line("12:00:02 rank 3 loading", 3),
            line("step 5 loss 2.0", 0),
            line("step 5 loss 2.1", 1),
            line("supervisor: ranks run", -1),
        ]
    )
    assert [(result.text, result.who) for result in folded] == [
        ("12:00:01 rank 0 loading", "0–1, 3"),
        ("step 5 loss 2.0", "0"),
        ("step 5 loss 2.1", "1"),
        ("supervisor: ranks run", "supervisor"),
    ]
    assert format_ranks([7, 0, 1, 2]) == "0–2, 7"


def test_a_line_repeated_by_one_rank_stays_repeated() -> None:
    assert len(group_lines([line("again", 0, 1), line("again", 0, 2)])) == 2
    assert len(group_lines([line("again", 0, 1), line("again", 1, 1, attempt=2)])) == 2


def test_the_first_cause_is_the_exception_and_not_its_preamble() -> None:
    lines = [
        "all well",
        "Traceback (most recent call last):",
        "ValueError: head_dim 63 is odd",
        "RuntimeError: rank 1 left",
    ]
    cause = first_cause(group_lines([line(text, 0) for text in lines]))
    assert cause is not None and cause.text == "ValueError: head_dim 63 is odd"
    assert first_cause(group_lines([line("all well", 0)])) is None
    assert [
        level(text) for text in ("UserWarning: x", "loss 2.0", "DEBUG x", "CUDA out of memory")
    ] == [
        "warning",
        "info",
        "debug",
        "error",
    ]


def test_a_slow_rank_is_named_even_among_two() -> None:
    result = spread({0: {"step_time_s": 0.1}, 1: {"step_time_s": 0.2}}, ["step_time_s"])
    assert result is not None
    assert result.summary == "Rank 1 is slow: 200 ms per step, 100% above the median."
    assert [(row["rank"], row["slow"]) for row in result.rows] == [(1, True), (0, False)]
    assert spread({}, ["step_time_s"]) is None


def device(**changes: Any) -> devices.DeviceMark:
    run = {
        "id": 7,
        "name": "a",
        "owner": "ada",
        "state": "running",
        "step_time_s": 0.2,
        "mfu": 0.4,
        "age_s": 1.0,
        **changes.pop("run", {}),
    }
    given: dict[str, Any] = {
        "node": "n",
        "health": "up",
        "drained": False,
        "index": 0,
        "healthy": True,
        "memory_bytes": 100,
        "sample": None,
        "run": run,
    }
    return devices.mark(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "mood"),
    [
        ({}, "busy"),
        ({"run": {"age_s": 40.0}}, "slow"),
        ({"run": {"age_s": 40.0, "step_time_s": 20.0}}, "busy"),
        ({"run": {"age_s": 400.0}, "sample": {"utilization": 1.0}}, "stuck"),
        ({"run": {"state": "starting", "age_s": None}}, "busy"),
        ({"health": "lost"}, "unavailable"),
    ],
)
def test_a_devices_mark_shows_progress_and_not_utilization(
    changes: dict[str, Any], mood: str
) -> None:
    assert device(**changes).mood == mood


def test_work_without_an_allocation_is_reported() -> None:
    given = {
        "node": "n",
        "health": "up",
        "drained": False,
        "index": 0,
        "healthy": True,
        "memory_bytes": 100,
    }
    busy = devices.mark(
        **given, sample={"processes": [7], "utilization": 0.9, "memory_used_bytes": 50}, run=None
    )
    assert busy.mood == "foreign" and busy.ring == 50 and "did not start" in busy.description
    assert devices.mark(**given, sample=None, run=None).mood == "idle"


def test_a_week_splits_what_crosses_midnight_and_weighs_mfu_by_time() -> None:
    days = week.week(
        [
            week.RunAllocation(
                NOW - timedelta(hours=18), NOW - timedelta(hours=6), mfu=0.2
            ),  # six hours on each side of midnight
            week.RunAllocation(NOW - timedelta(hours=2), NOW, mfu=0.6),
            week.RunAllocation(NOW - timedelta(days=30), NOW - timedelta(days=29)),
        ],
        devices=2,
        now=NOW,
    )
    assert [round(day.device_hours, 3) for day in days] == [0, 0, 0, 0, 0, 6, 8]
    assert days[6].mfu == pytest.approx((6 * 0.2 + 2 * 0.6) / 8)
    assert days[6].part == pytest.approx(100 * 8 / 24)
    assert week.summarize(days) == "14 device-hours in seven days, average MFU 25.7%."


def test_tokens_and_flops_follow_from_the_spec_of_a_pretraining() -> None:
    spec = {"kind": "train", "model": "llama-tiny", "train": {"steps": 10, "seq_len": 128}}
    result = axes.per_step(spec, {"global_batch_size": 16})
    assert result["tokens"] == 2048 and result["flops"] > 6e5 * 2048
    assert axes.per_step({"kind": "external"}, None) == {}
    assert axes.per_step(spec, None) == {}


def event(type: str, rank: int | None = None, **data: Any) -> Any:
    return SimpleNamespace(type=type, rank=rank, data=data, time=NOW, attempt=1, run_id=3)


@pytest.mark.parametrize(
    ("event", "text", "kind"),
    [
        (
            event("loss_scale_changed", old=65536.0, new=32768.0, reason="overflow", step=412),
            "Loss scale 65.5k → 32.8k after overflow at step 412",
            "event",
        ),
        (
            event("loss_scale_changed", old=4.0, new=8.0, reason="growth", step=9, model="value"),
            "Loss scale 4 → 8 after growth at step 9 (value model)",
            "event",
        ),
        (
            event("checkpoint_saved", step=400, bytes=14_000_000),
            "Checkpoint saved at step 400 (13.4 MiB)",
            "good",
        ),
        (
            event("rank_exited", rank=3, signal="SIGKILL", **{"class": "infrastructure"}),
            "Rank 3 exited with SIGKILL, infrastructure",
            "bad",
        ),
        (
            event(
                "state_changed",
                of="run",
                old="running",
                new="failed",
                by="control plane",
                why="hang",
            ),
            "Run failed: hang",
            "bad",
        ),
        (event("weights_frozen", layers=4), "Weights frozen: layers 4", "event"),
    ],
)
def test_events_have_a_text_and_a_mark(event: Any, text: str, kind: str) -> None:
    result = event_messages.event_message(event)
    assert (result.text, result.kind) == (text, kind)


def test_a_mark_is_placed_on_every_axis() -> None:
    mark = event_messages.event_message(event("checkpoint_saved", step=4)).mark({"tokens": 100.0})
    assert (mark["step"], mark["tokens"], mark["time"]) == (4, 400.0, NOW.timestamp())


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("", "tp is 3."),
        ("Lower the batch.", "tp is 3. Lower the batch."),
        ("Use tp 2.", "tp is 3. Use tp 2."),
    ],
)
def test_a_hint_follows_its_message(hint: str, expected: str) -> None:
    assert problems.problem_text({"message": "tp is 3.", "hint": hint}) == expected


def test_texts_end_with_one_period() -> None:
    assert orrery.sentence("waits for run 2..") == "Waits for run 2."
    assert orrery.sentence("") == ""


def test_plan_rows_have_labels_and_readable_values() -> None:
    plan = {"zero": 1, "sequence_parallel": False, "loss_scale": {"initial": 65536.0}, "cp": None}
    assert plan_rows(plan) == [
        ("ZeRO stage", "1"),
        ("sequence parallel", "no"),
        ("loss scale", "initial 65,536"),
    ]


def test_rates_are_compared_as_numbers_and_times_as_times() -> None:
    assert predicted_vs_measured.format_value("tokens_per_s", 1409.0) == "1,409"
    assert predicted_vs_measured.format_value("step_time_s", 0.5) == "500 ms"


@pytest.mark.parametrize(
    ("field", "hint", "expected"),
    [
        ("plan.global_batch_size", "Use 8 or 16.", ("plan.global_batch_size", "16")),
        ("plan.tp", "Use tp 2.", ("plan.tp", "2")),
        ("plan.global_batch_size", "Use dp 4.", ("plan.dp", "4")),
        ("plan", "Use 2 devices.", ("resources.devices", "2")),
        ("plan.dp_replicate", "Use 2.", None),  # not a field of this form
        ("plan.tp", "Use a smaller model.", None),
        ("plan.tp", "", None),
    ],
)
def test_a_hint_that_names_a_value_is_one_click(field: str, hint: str, expected: Any) -> None:
    known = {"plan.global_batch_size", "plan.tp", "plan.dp", "resources.devices"}
    assert problems.fix_of({"field": field, "hint": hint}, known) == expected
