"""Headlines of pages from plain numbers."""

from __future__ import annotations

import pytest

from webui.presentation import formatting, run_headlines
from webui.presentation.run_headlines import RunFacts


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            RunFacts("queued", wait_reason="waits for 4 devices: 2 of 8 are free"),
            "Waiting for 4 devices: 2 of 8 are free.",
        ),
        (
            RunFacts("running", summary={"step": 0, "trying": {"number": 3, "count": 8}}),
            "Trying plan 3 of 8, before the first step.",
        ),
        (
            RunFacts("queued", attempt=1, wait_reason="Node n1 is silent"),
            "Waiting (attempt 1 ended): node n1 is silent.",
        ),
        (
            RunFacts(
                "queued",
                wait_reason="waits for 8 devices.",
                starts_in_s=(720.0, 480.0, 1200.0),
                sooner="With 6 devices: now.",
            ),
            "Waiting for 8 devices. Estimated start in 10 min (80% likely between 8 min "
            "and 20 min). With 6 devices: now.",
        ),
        (
            RunFacts("queued", wait_reason="waits", starts_in_s=(-3.0, None, None)),
            "Waiting: waits. Starts soon.",
        ),
        (RunFacts("starting", devices=2, attempt=1), "Starting on 2 devices."),
        (RunFacts("starting", devices=1, attempt=3), "Starting on 1 device, attempt 3."),
        (RunFacts("running"), "Running; no step logged yet."),
        (
            RunFacts(
                "running",
                summary={
                    "step": 1204,
                    "steps": 2000,
                    "loss": 1.5204,
                    "tokens_per_s": 12_412,
                    "mfu": 0.4312,
                    "eta_s": 203,
                },
                loss_curve=[3 - 0.1 * i for i in range(15)],
                predicted_mfu=0.5,
                last_step_s=1.0,
            ),
            "Step 1,204 of 2,000, loss 1.520 (falling), 12.4k tokens/s, MFU 43.1% (50% predicted), "
            "done in about 3 min.",
        ),
        (
            RunFacts(
                "running", summary={"step": 90, "loss": "NaN", "step_time_s": 0.2}, last_step_s=240
            ),
            "Step 90, the loss is not finite. No step for 4 min: the run may hang.",
        ),
        (
            RunFacts("running", summary={"step": 90, "step_time_s": 60.0}, last_step_s=240),
            "Step 90.",
        ),
        (RunFacts("running", summary={"step": 90, "skipped_updates": 4.0}), "Step 90."),
        (
            RunFacts("running", summary={"step": 12, "skipped_updates": 12.0}),
            "Step 12, 12 of 12 updates skipped by overflow.",
        ),
        (
            RunFacts(
                "finished", runtime_s=331, summary={"step": 2000, "loss": 1.43, "val_loss": 1.512}
            ),
            "Finished 2,000 steps in 5 min 31 s: loss 1.430, validation loss 1.512.",
        ),
        (RunFacts("finished", kind="script"), "Finished."),
        (
            RunFacts("failed", exit={"rank": 0, "class": "numerics", "reason": "Rank 0: bad."}),
            "Failed on rank 0: bad. Lower the learning rate or use bf16; the events show the first "
            "bad step.",
        ),
        (
            RunFacts(
                "failed",
                exit={"class": "numerics", "reason": "The loss is NaN.", "rank": 1, "step": 12},
            ),
            "Failed at step 12 on rank 1: The loss is NaN. "
            "Lower the learning rate or use bf16; the events show the first bad step.",
        ),
        (
            RunFacts("failed", kind="external", summary={"step": 200}),
            "Failed at step 200: its program reported no reason. See its logs.",
        ),
        (
            RunFacts("failed", kind="external", exit={"reason": "Out of disk."}),
            "Failed: Out of disk.",
        ),
        (
            RunFacts("paused", summary={"step": 7, "steps": 9}),
            "Paused at step 7 of 9. Resume continues from the newest checkpoint.",
        ),
        (
            RunFacts("cancelled", exit={"reason": "Cancelled by ada."}),
            "Cancelled by ada.",
        ),
    ],
)
def test_run_headlines_by_state(facts: RunFacts, expected: str) -> None:
    assert run_headlines.run_headline(facts) == expected


def test_a_trend_must_exceed_noise() -> None:
    noise = [1.4, 1.5, 1.42, 1.48, 1.41, 1.5, 1.43, 1.47, 1.44, 1.49, 1.4, 1.5]
    assert run_headlines.trend(noise) == "flat"
    assert run_headlines.trend([value - 0.2 * i for i, value in enumerate(noise)]) == "falling"
    assert run_headlines.trend([value + 0.2 * i for i, value in enumerate(noise)]) == "rising"
    assert run_headlines.trend([3.0, 2.0]) == ""


def test_the_overview_is_one_line_and_names_problems() -> None:
    quiet = run_headlines.overview(
        busy=3, devices=4, runs=1, waiting=0, waiting_devices=0, troubles=[]
    )
    assert quiet == "3 of 4 devices busy, 1 run, none waiting, no problems."
    loud = run_headlines.overview(
        busy=6, devices=8, runs=2, waiting=1, waiting_devices=4, troubles=["node n2 is lost"]
    )
    assert loud == "6 of 8 devices busy, 2 runs, 1 waiting for 4 devices. Node n2 is lost."
    empty = run_headlines.overview(
        busy=0, devices=0, runs=0, waiting=0, waiting_devices=0, troubles=[]
    )
    assert "Start an agent" in empty


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (formatting.quantity(1_234_567), "1.23M"),
        (formatting.quantity(12_412), "12.4k"),
        (formatting.quantity(9_999), "9,999"),
        (formatting.quantity(0), "0"),
        (formatting.quantity(float("nan")), "–"),
        (formatting.quantity(True), "–"),
        (formatting.quantity(0.00123), "0.00123"),
        (formatting.memory(1536), "1.50 KiB"),
        (formatting.memory(4 * 2**30), "4 GiB"),
        (formatting.memory(12), "12 B"),
        (formatting.duration(0.165), "165 ms"),
        (formatting.duration(7500), "2 h 05 min"),
        (formatting.duration(200_000), "2 d 07 h"),
        (formatting.duration(-1), "–"),
        (formatting.estimate(12), "about 10 s"),
        (formatting.estimate(203), "about 3 min"),
        (formatting.estimate(2098), "about 35 min"),
        (formatting.estimate(9000), "about 2.5 h"),
        (formatting.estimate(40_000), "about 11 h"),
        (formatting.estimate(200_000), "about 2.5 d"),
        (formatting.estimate(None), "–"),
        (formatting.remaining(1981), "35 min"),
        (formatting.duration(2160), "36 min"),
        (formatting.percent(0.4312), "43.1%"),
        (formatting.age(1), "now"),
        (formatting.age(200), "3 min ago"),
        (formatting.listed(["a", "b", "c"]), "a, b and c"),
        (formatting.count(1, "run"), "1 run"),
    ],
)
def test_number_formats(actual: str, expected: str) -> None:
    assert actual == expected


def test_plan_in_short_and_long_form() -> None:
    plan = {
        "dp": 4,
        "tp": 2,
        "pp": 1,
        "zero": 1,
        "recompute": "none",
        "precision": "bf16",
        "global_batch_size": 64,
    }
    assert formatting.plan_parts(plan) == (["dp4", "tp2", "z1"], "bf16")
    assert (
        formatting.describe_plan(plan)
        == "data parallel 4, tensor parallel 2, ZeRO stage 1, bf16, 64 sequences per step"
    )
    assert formatting.plan_parts({}) == (["1 device"], "")
