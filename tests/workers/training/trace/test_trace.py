"""What steps report: parts of their time, bytes by collective, the pipeline in time,
profiles on demand.
"""

from __future__ import annotations

import gzip
import json

import pytest

from orchestrator.planner import api
from tests.workers.training.conftest import TINY, make_spec

PARTS = [
    *(f"time/{part}_s" for part in ("data", "forward", "backward", "optimizer", "other")),
    "comm/exposed_s",
]
MODEL = {**TINY, "kv_heads": 4}


def predicted(model, plan):
    line = {
        "model": model,
        "plan": plan,
        "cluster": {"devices_per_node": 2},
        "workload": {"seq_len": 16},
    }
    [answer] = api.estimate([line])
    return answer["collectives"]


def reported(points, name):
    return [point["values"][name] for point in points]


def assert_parts_add_up(*ranks):
    """A point's step time is the mean over ranks of what each one's parts add up to."""
    for points in zip(*ranks, strict=True):
        wholes = [sum(point["values"][part] for part in PARTS) for point in points]
        for point in points:
            assert sum(wholes) / len(wholes) == pytest.approx(
                point["values"]["step_time_s"], rel=1e-3
            )
            assert min(point["values"][part] for part in PARTS) >= 0


def test_parts_add_up_to_the_step(train, tmp_path):
    one = train(make_spec(steps=6, log_every=2, eval={"every_steps": 3, "batches": 1}), tmp_path)
    assert_parts_add_up(one.points())
    for point in one.points():
        values = point["values"]
        assert values["comm/exposed_s"] == 0 and "comm/bytes" not in values
        assert (
            values["time/forward_s"] > 0
            and values["time/backward_s"] > 0
            and values["time/optimizer_s"] > 0
        )


DATA = [
    {"dp": 2, "zero": 0, "global_batch_size": 6},
    {"dp": 2, "zero": 1, "global_batch_size": 4},
    {"dp": 2, "zero": 2, "global_batch_size": 4},
    {"dp": 2, "zero": 3, "global_batch_size": 4, "recompute": "full"},
    # room for the head, two layers that are gathered at a time, and one that stays
    {"dp": 2, "zero": 3, "global_batch_size": 4, "max_live_params": 44_000},
    {"dp": 2, "zero": 3, "global_batch_size": 4, "param_persistence_threshold": 20_000},
    {"pp": 2, "schedule": "gpipe", "global_batch_size": 6},
]


@pytest.mark.parametrize("plan", DATA, ids=str)
def test_bytes_are_the_planners(plan, train, tmp_path):
    result = train(make_spec(MODEL, plan, steps=4), tmp_path)
    assert_parts_add_up(result.points(0), result.points(1))
    message = predicted(MODEL, plan)
    for rank in range(2):
        values = result.points(rank)[-1]["values"]
        assert "comm/bytes" not in result.points(rank)[1]["values"]
        counted = {kind: values.get(f"comm/{kind}", 0) for kind in message}
        numbers = counted["all_reduce_bytes"] - message["all_reduce_bytes"]
        assert 0 < numbers < 200, "the step's sums, which the planner leaves out"
        assert counted == {**message, "all_reduce_bytes": message["all_reduce_bytes"] + numbers}
        assert values["comm/bytes"] == sum(counted.values())
        assert max(reported(result.points(rank), "comm/exposed_s")) > 0


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_bytes_of_a_tensor_parallel_block_are_the_planners(plan, train, tmp_path):
    """The planner counts blocks alone: what two more of them add."""
    plan = {**plan, "global_batch_size": 2}
    by_depth = []
    for layers in (2, 4):
        result = train(
            make_spec({**MODEL, "layers": layers}, plan, steps=4), tmp_path / str(layers)
        )
        assert_parts_add_up(result.points(0), result.points(1))
        by_depth.append(
            (result.points()[-1]["values"], predicted({**MODEL, "layers": layers}, plan))
        )
    for kind in ("all_reduce_bytes", "all_gather_bytes", "reduce_scatter_bytes"):
        counted, message = (
            [which[at].get(f"comm/{kind}" if at == 0 else kind, 0) for which in by_depth]
            for at in (0, 1)
        )
        # once a step, the gradients of norms, and each layer's squared one among the step's own
        # numbers
        more = 2 * 4 * 2 * 32 if "sequence_parallel" in plan else 0
        more = more + 2 * 8 if kind == "all_reduce_bytes" else 0
        assert counted[1] - counted[0] == message[1] - message[0] + more, kind


PIPES = [
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "schedule": "zbv"},
    {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"pp": 2, "schedule": "pipedream"},
]


@pytest.mark.parametrize("plan", PIPES, ids=str)
def test_the_pipeline_of_a_step_in_time(plan, train, tmp_path):
    count = 4
    model = {**TINY, "layers": 4}
    result = train(make_spec(model, {"global_batch_size": count, **plan}, steps=4), tmp_path)
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert_parts_add_up(result.points(0), result.points(1))
    bubbles = reported(result.points(), "pipeline/bubble_fraction")
    assert bubbles == reported(result.points(1), "pipeline/bubble_fraction") and all(
        0 < each < 1 for each in bubbles
    )
    passes = set()
    for rank in range(2):
        [event] = [
            each["data"] for each in result.events(rank) if each["type"] == "pipeline_timeline"
        ]
        assert event["step"] == 2 and event["pp_rank"] == rank
        assert event["bubble_fraction"] == pytest.approx(bubbles[1])
        busy_until = -1.0
        for kind, stage, micro_batch, start, end in event["actions"]:
            assert stage in event["stages"] and busy_until <= start <= end, (
                "one thing at a time, in order"
            )
            busy_until = end
            if kind in "FBIW":
                passes.add((kind, stage, micro_batch))
        assert any(kind == "recv" for kind, *_ in event["actions"])
        assert event["actions"][0][3] >= 0 and busy_until < 60
    if plan["schedule"] == "pipedream":  # the first stage's forward passes run a batch ahead
        forward = {("F", 1, place) for place in range(count)} | {
            ("F", 0, place) for place in range(count, 2 * count)
        }
        assert passes == forward | {
            ("B", stage, place) for stage in range(2) for place in range(count)
        }
    else:
        stages = 2 if plan["schedule"] == "1f1b" else 4
        assert {each[1:] for each in passes if each[0] == "F"} == {
            (s, m) for s in range(stages) for m in range(count)
        }
        assert {each[1:] for each in passes if each[0] in "BI"} == {
            (s, m) for s in range(stages) for m in range(count)
        }


@pytest.mark.parametrize("plan", [{}, {"dp": 2, "zero": 3}, {"pp": 2, "schedule": "zbv"}], ids=str)
def test_profiles_on_demand(plan, train, tmp_path):
    """The next step's, of one rank of each pipeline place; training is not affected."""
    spec = make_spec({**TINY, "layers": 4}, {"global_batch_size": 4, **plan}, steps=4)
    plain = train(spec, tmp_path / "plain")
    for number, (action, event_type) in enumerate(
        [("profile", "profile_saved"), ("memory_snapshot", "memory_profile")]
    ):
        folder = tmp_path / action
        folder.mkdir()
        (folder / "control.json").write_text(json.dumps({"action": action, "id": number}))
        result = train(spec, folder)
        assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
        assert result.values("loss") == plain.values("loss")
        for rank in range(len(result.outcomes)):
            events = [each["data"] for each in result.events(rank) if each["type"] == event_type]
            assert len(events) == (rank == 0 or "pp" in plan)
            for data in events:
                path = folder / f"rank-{rank}" / data["name"]
                assert (
                    data["step"] == 2
                    and data["path"] == str(path)
                    and data["bytes"] == path.stat().st_size
                )
                if action == "profile":
                    names = {
                        each.get("name")
                        for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
                    }
                    assert {"aten::mm", "aten::embedding"} & names
                    continue
                peak, held = data["peak"]["cpu"], result.points(rank)[-1]["values"]
                assert peak["params"] >= held["memory/params_bytes"] and peak["activations"] > 0
                assert peak["optimizer"] >= held["memory/optimizer_bytes"] * 0.99
                modules = json.loads(path.read_text())["modules"]
                assert bool(modules) == ("pp" not in plan), (
                    "zbv's backward passes come in two halves"
                )
