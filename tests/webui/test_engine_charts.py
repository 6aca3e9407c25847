"""Engine charts and texts: heat maps, timelines, collectives, numerics. No database."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.planner.schedules.simulate import simulate
from orchestrator.planner.schedules.timeline import timeline
from webui.charts import measured_communication, measured_pipeline
from webui.charts.heat import EventMark, Heat, Strip, heat
from webui.charts.heat_summary import (
    gradients_summary,
    loads_summary,
    newest_loads,
    since_first,
    skew_summary,
    underflow_summary,
    weights_summary,
)
from webui.charts.numerics import summarize_numerics
from webui.charts.ranks import describe_places
from webui.presentation import event_messages, formatting


def drawn(strips: list[Strip], **more: Any) -> Heat:
    result = heat(strips, format=formatting.seconds, summary="", **more)
    assert result is not None
    return result


def cells(result: Heat) -> int:
    """The area of all blocks: each `M left row h width v1 h-width z`."""
    return sum(
        int(part.split("h")[1].split("v")[0])
        for _, path in result.paths
        for part in path.split("M")[1:]
    )


def test_a_heat_map_keeps_the_spike_of_every_bucket_and_all_columns() -> None:
    steps = range(1, 1001)
    calm = Strip("rank 0", steps, [0.001] * 1000)
    wild = Strip("rank 1", steps, [0.001 if step != 613 else 2.0 for step in steps])
    gone = Strip("rank 2", range(1, 501), [0.001] * 500)
    result = drawn([calm, wild, gone], columns=50)
    text = result.cells["text"]
    assert result.columns == 50 and result.rows == 3 and cells(result) == 50 + 50 + 25
    assert text[1].count("2 s") == 1 and result.cells["edges"][text[1].index("2 s")] == [601, 620]
    assert text[2][24] == "1 ms" and text[2][25] is None
    assert [row[0] for row in result.table] == ["rank 0", "rank 1", "rank 2"] and result.table[1][
        3
    ] == "2 s"


def test_one_outlier_does_not_flatten_the_others() -> None:
    steps = range(1, 97)
    rows = [Strip(f"rank {rank}", steps, [0.01 + 0.03 * (rank == 3)] * 96) for rank in range(8)]
    rows[0] = Strip("rank 0", steps, [60.0, *rows[0].y[1:]])
    levels = dict(drawn(rows).paths)
    assert len(levels["8"].split("M")) - 1 == 2, "the slow row is one block, the wild cell another"
    assert len(levels) == 2 and "more" in drawn(rows).legend[-1][1]


def test_non_finite_values_keep_their_own_color_and_label() -> None:
    result = drawn(
        [Strip("layer 0", range(300), [0.1] * 150 + [math.nan] + [0.1] * 149)], columns=30
    )
    assert dict(result.paths)["odd"].count("M") == 1 and result.legend[-1] == ("odd", "not finite")
    assert "not a number" in result.cells["text"][0]


def test_even_loads_are_neutral_and_both_sides_differ() -> None:
    result = heat(
        [Strip("layer 0", range(5), [1.0, 0.0, 0.5, 2.0, 9.0])],
        format=lambda each: f"{each:g}",
        summary="",
        scale="even",
    )
    assert result is not None
    assert {name for name, _ in result.paths} == {"even", "cool-4", "cool-2", "warm-2", "warm-4"}
    assert [name for name, _ in result.legend][4] == "even" and len(result.legend) == 9


def test_orders_of_magnitude_differ_and_layers_without_gradient_are_named() -> None:
    steps = range(1, 41)
    strips = [Strip(f"layer {i}", steps, [10.0**-i] * 40) for i in range(8)]
    result = drawn(strips, scale="orders")
    assert [level for level, _ in result.paths] == [str(level) for level in range(1, 9)], (
        "a level for each decade"
    )
    assert gradients_summary(strips).startswith(
        "The largest norm is 1, in layer 0; the smallest 1.00e-7, in layer 7"
    )
    assert gradients_summary(strips).endswith("times smaller, a vanishing gradient.")
    nothing = [*strips, Strip("head", steps, [0.0] * 40)]
    assert gradients_summary(nothing) == "No gradient reaches head."
    assert dict(drawn(nothing, scale="orders").paths)["0"].startswith("M0 8"), (
        "nothing has a color of its own"
    )
    assert "of head is not finite" in gradients_summary([Strip("head", [1], [math.nan])])


def test_weights_are_compared_with_their_first_norm() -> None:
    strips = [
        Strip("layer 0", [1, 10], [4.0, 3.0]),
        Strip("head", [1, 10], [2.0, 5.0]),
        Strip("layer 1", [], []),
    ]
    assert weights_summary(strips) == (
        "Head changed most, from 2 to 5; the mean layer's norm is 1.62 times its first."
    )
    assert since_first(strips[1]).y == [1.0, 2.5]
    assert weights_summary([]) == "No weights reported yet."


def test_ticks_are_round_and_stand_over_their_columns() -> None:
    result = drawn([Strip("rank 0", range(1, 601), [1.0] * 600)], columns=60)
    assert [tick.label for tick in result.ticks] == ["100", "200", "300", "400", "500", "600"]
    assert result.ticks[0].at == pytest.approx(100 * 9.5 / 60, abs=0.01)
    one = drawn([Strip("rank 0", [7], [1.0])])
    assert [tick.label for tick in one.ticks] == ["7"]


def test_marks_stand_over_their_steps_and_share_a_column() -> None:
    steps = range(1, 101)
    marks = [
        EventMark(50, "slow"),
        EventMark(50, "hangs", "bad"),
        EventMark(500, "later"),
        EventMark(10, "early"),
    ]
    result = drawn([Strip("rank 0", steps, [1.0] * 100)], columns=100, marks=marks)
    assert [(mark["at"], mark["kind"], mark["text"]) for mark in result.marks] == [
        (9.5, "event", "early"),
        (49.5, "bad", "slow; hangs"),
    ]


def test_no_point_is_no_heat_map() -> None:
    assert heat([Strip("rank 0", [], [])], format=str, summary="") is None


def test_ranks_are_described_by_node_and_stage() -> None:
    placement = [{"node": "n1", "devices": [0, 1]}, {"node": "n2", "devices": [0, 1]}]
    plan = {"dp": 2, "pp": 2}
    assert describe_places(placement, plan) == ["node n1, stage 0"] * 2 + ["node n2, stage 1"] * 2
    assert describe_places([], plan) == ["stage 0", "stage 0", "stage 1", "stage 1"]
    assert describe_places(placement, {"dp": 4}) == ["node n1"] * 2 + ["node n2"] * 2
    assert describe_places([], None) == []


def test_summaries_name_the_late_rank_the_lossy_layer_and_the_full_expert() -> None:
    strips = [
        Strip(f"rank {rank}", range(60), [0.2 if rank == 2 else 0.01] * 60, "node n1")
        for rank in range(4)
    ]
    assert skew_summary(strips, 1.0).startswith(
        "Rank 2 (node n1) arrives 200 ms after the first, 20% of a step"
    )
    assert skew_summary(strips, 100.0).startswith(
        "Ranks arrive together: the last, rank 2 (node n1), arrives"
    )
    assert skew_summary([], 1.0) == "No arrival times reported yet."
    layers = [Strip("layer 0", [1], [0.001]), Strip("layer 1", [1], [0.3])]
    assert underflow_summary(layers).startswith("Layer 1 loses 30% of its gradient entries")
    assert underflow_summary(layers[:1]).startswith("Almost no underflow")
    latest = {
        "moe/load/1/0": 3.0,
        "moe/load/1/1": 0.0,
        "moe/load/0/0": 1.0,
        "moe/load/0/1": 1.0,
        "loss": 2.0,
    }
    loads = newest_loads(latest)
    assert loads == {0: {0: 1.0, 1: 1.0}, 1: {0: 3.0, 1: 0.0}}
    text = "Expert 0 of layer 1 is fullest, with 3 times the even load. 1 expert gets no tokens."
    assert loads_summary(loads) == text
    assert loads_summary({}) == "No expert loads reported yet."


def reports(factor: float = 1.0, step: int = 9) -> list[dict[str, Any]]:
    """Reports of two ranks about a zbv step."""
    ran = timeline(predicted_run(), 4)
    kinds = {"F": "F", "B": "I", "W": "W"}
    return [
        {
            "step": step,
            "stages": 4,
            "pp_rank": rank,
            "began_s": 1e9,
            "actions": [
                [
                    kinds[row["kind"]],
                    row["stage"],
                    row["micro_batch"],
                    factor * row["start_s"],
                    factor * row["end_s"],
                ]
                for row in ran["rows"]
                if row["device"] == rank
            ]
            + [["recv", 0, 0, 0.0, 0.01], ["unknown", 0, 0, 0.0, 0.01]],
            "bubble_fraction": 0.2 + 0.02 * rank,
        }
        for rank in range(2)
    ]


def predicted_run() -> Any:
    return simulate("zbv", 2, 4, forward_s=0.1, backward_s=0.1, weight_s=0.1, virtual_stages=2)


def test_a_measured_step_and_its_prediction_share_one_scale() -> None:
    predicted = timeline(predicted_run(), 4)
    result = measured_pipeline.compare(reports(2.0), {**predicted, "predicted_bubble": 0.1})
    assert result is not None and result.predicted is not None and result.step == 9
    blocks = sum(path.count("M") for row in result.measured.rows for _, path in row.paths)
    assert blocks == 2 * 2 * 4 * 3 + 2, "every action and the two waits, nothing of an unknown kind"
    assert [tick.label for tick in result.measured.ticks] == [
        tick.label for tick in result.predicted.ticks
    ]
    assert "one scale" in result.scale
    assert result.summary == "The bubble is 21% of the step, predicted 10%: 11.0 points more."
    assert "4 micro-batches" in result.measured.summary and "21%" in result.measured.summary
    assert [row.device for row, _ in result.table] == [0, 1]


def test_the_newest_step_that_all_ranks_reported_is_shown() -> None:
    older, newer = reports(step=9), reports(step=19)
    assert [data["step"] for data in measured_pipeline.newest_step([*older, *newer[:1]])] == [9, 9]
    assert [data["step"] for data in measured_pipeline.newest_step([*older, *newer])] == [19, 19]
    assert measured_pipeline.compare([], None) is None
    assert measured_pipeline.compare([{"step": 3, "actions": "odd", "pp_rank": 0}], None) is None


def test_very_different_lengths_have_their_own_scales() -> None:
    predicted = timeline(predicted_run(), 4)
    result = measured_pipeline.compare(reports(30.0), predicted)
    assert result is not None and result.predicted is not None
    assert "30.0 times longer than predicted" in result.scale
    alone = measured_pipeline.compare(reports(), None)
    assert (
        alone is not None and alone.predicted is None and "there is no prediction" in alone.summary
    )


def test_a_wait_from_before_the_step_begins_with_it() -> None:
    early = reports()
    early[1]["actions"] += [["recv", 0, 0, -0.5, 0.02], ["recv", 0, 0, -0.9, -0.5]]
    rows = measured_pipeline.measured_rows(early)
    assert min(row["start_s"] for row in rows["rows"]) == 0.0
    assert rows["drawn_s"] == pytest.approx(timeline(predicted_run(), 4)["drawn_s"])
    assert len(rows["rows"]) == 2 * 2 * 4 * 3 + 3


def test_collectives_are_compared_with_the_prediction() -> None:
    latest = {
        "comm/bytes": 3e9,
        "comm/exposed_s": 0.05,
        "step_time_s": 0.5,
        "comm/all_reduce_bytes": 2e9,
        "comm/send_bytes": 1e9,
    }
    result = measured_communication.calls(
        latest, {"all_reduce_bytes": 2e9, "send_bytes": 5e8, "broadcast_bytes": 0}
    )
    assert result is not None and [row.title for row in result.rows] == ["all-reduce", "send"]
    assert [(row.off, row.mood) for row in result.rows] == [("+0.0%", ""), ("+100.0%", "warn")]
    assert (
        "10% of the step" in result.summary
        and "Differs from the prediction: send." in result.summary
    )
    alone = measured_communication.calls(latest, None)
    assert (
        alone is not None
        and "No prediction for" in alone.summary
        and alone.rows[0].predicted == formatting.DASH
    )
    assert measured_communication.calls({"loss": 1.0}, {"send_bytes": 1}) is None


@pytest.mark.parametrize(
    ("events", "latest", "text"),
    [
        ([], {}, "No step logged yet."),
        ([], {"loss": 1.0}, "All values are finite; fp32 needs no loss scale."),
        (
            [],
            {"loss_scale": 1024.0},
            "The loss scale is 1,024 and has not changed: no gradient overflowed.",
        ),
        (
            [
                ("overflow_skipped_step", {"step": 3}),
                ("loss_scale_changed", {"old": 8.0, "new": 4.0}),
                ("loss_scale_changed", {"old": 4.0, "new": 8.0}),
                ("loss_scale_changed", {"old": 8.0, "new": 16.0}),
            ],
            {"loss_scale": 16.0},
            "The loss scale is 16; it fell once and grew twice; 1 step was skipped because "
            "gradients overflowed.",
        ),
        (
            [
                ("overflow_skipped_step", {"step": 3, "model": "value"}),
                ("loss_scale_changed", {"old": 32.0, "new": 16.0, "model": "value"}),
            ],
            {"loss_scale": 1024.0, "value/loss_scale": 16.0},
            "The policy's loss scale is 1,024 and has not changed: no gradient of this model "
            "overflowed. The value model's loss scale is 16; it fell once; 1 step was skipped "
            "because gradients overflowed.",
        ),
        (
            [
                (
                    "non_finite",
                    {
                        "step": 12,
                        "what": "loss, first in the output of blocks.3.mlp (rank 2)",
                        "module": "blocks.3.mlp",
                    },
                )
            ],
            {"loss": math.nan},
            "Non-finite loss at step 12, first in blocks.3.mlp on rank 2.",
        ),
        (
            [],
            {"moe/max_violation": 1.5},
            "Experts are unbalanced: the fullest gets 150% more than the even share.",
        ),
    ],
)
def test_numerics_summary(
    events: list[tuple[str, Mapping[str, Any]]], latest: dict[str, float], text: str
) -> None:
    assert summarize_numerics(events, latest, precision="fp32") == text


def test_event_texts_of_the_engine() -> None:
    stage = {
        "stage": 0,
        "bytes": 2**20,
        "extra_s": 0.004,
        "layers": [{"count": 3, "kind": "some"}, {"count": 1, "kind": "none"}],
    }
    text = event_messages.describe("recompute_chosen", {"stages": [stage]}, 0)
    assert text == (
        "Recompute chosen: 3 layers partly stored and 1 layer fully stored; 1 MiB stored, "
        "4 ms more per micro-batch"
    )
    loaded = {"weights": "SmolLM2", "seconds": 2.0, "model_differs_in": ["max_seq_len"]}
    assert event_messages.describe("weights_loaded", loaded, 0) == (
        "Weights of SmolLM2 loaded in 2.0 s; this model differs in max_seq_len"
    )
    read = {"weights": "SmolLM2", "tokenizer": "/home/runs/3/checkpoints/tokenizer.json"}
    assert event_messages.describe("weights_loaded", read, 0) == (
        "Weights of SmolLM2 loaded; tokenizer: the run's tokenizer.json"
    )
    assert event_messages.describe(
        "weights_loaded", {"path": "m.gguf", "tokenizer": "bytes"}, 0
    ).endswith("read as bytes")
    data = {"step": 1, "seconds": 2.5, "pieces": 2}
    assert (
        event_messages.describe("compiled", data, 0)
        == "Compiled 2 block segments in 2.5 s on rank 0 at step 1"
    )
    odd = {
        "step": 3,
        "what": "loss, first in the output of blocks.1 (rank 2)",
        "module": "blocks.1",
    }
    assert event_messages.describe("non_finite", odd, 0) == (
        "Non-finite value: loss, first in the output of blocks.1 (rank 2) at step 3"
    )
    assert event_messages.describe("non_finite", {"what": "loss", "module": "head"}, 1) == (
        "Non-finite value: loss, first in head on rank 1"
    )
    skipped = {"step": 7, "loss_scale": 65536.0, "ranks": [1, 3]}
    assert event_messages.describe("overflow_skipped_step", skipped, 0) == (
        "Step skipped at step 7: gradients overflowed on ranks 1 and 3 at loss scale 65.5k"
    )
    missed = {"metric": "step_time_s", "predicted": 0.05, "measured": 0.28, "ratio": 5.6}
    assert event_messages.describe("prediction_missed", missed, None) == (
        "Prediction missed: step time 280 ms, predicted 50 ms"
    )
    slow = {
        "ratio": 0.6,
        "causes": [{"cause": "data", "excess_s": 0.1, "message": "Training waits for its data."}],
    }
    assert (
        event_messages.describe("slow", slow, None)
        == "Slow: 60% of the predicted speed. Training waits for its data."
    )
    saved = {"step": 26, "name": "profile-step-26.json.gz", "bytes": 2**20}
    assert event_messages.describe("profile_saved", saved, 1) == (
        "Profile saved on rank 1 at step 26: profile-step-26.json.gz (1 MiB, see Artifacts)"
    )
    peak = {"cpu": {"params": 2**20, "activations": 2**21, "grads": 0, "total": 3 * 2**20}}
    assert event_messages.describe("memory_profile", {"step": 3, "peak": peak}, 0) == (
        "Memory profile saved on rank 0 at step 3: peak 3 MiB (activations 2 MiB, params 1 MiB)"
    )
    plan = {"plan": {"dp": 2, "precision": "bf16"}, "parameters": 15_000_000, "setup_s": 3.2}
    assert event_messages.describe("plan_resolved", plan, 0).endswith(
        "bf16; 15M parameters; set up in 3.2 s"
    )
