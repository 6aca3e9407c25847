"""What must hold for every preset, device and framework, asked through the door that programs use:
request lines.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from orchestrator.planner import api
from orchestrator.planner.explain import ExplainOptions
from orchestrator.planner.model.frameworks import FRAMEWORKS
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.model_flops import flops_per_token
from workers.contracts.catalog.presets import PRESETS, preset
from workers.contracts.specs.model import ModelSpec

LINES = (
    "params",
    "reference",
    "grads",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "rollout",
    "unattributed",
)
NUMBERS = {
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "hfu",
    "bubble_fraction",
    "usd_per_billion_tokens",
    "days",
}
TIME = {"compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "rollout_s", "other_s"}
COMM = {"dp_bytes", "tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes"}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "pipedream")
PLANS: tuple[dict[str, Any], ...] = (
    *({"dp": 8, "zero": zero} for zero in range(4)),
    *({"dp": 8, "zero": 3, "offload": where} for where in ("optimizer", "all", "nvme")),
    *({"dp": 8, "recompute": how} for how in ("selective", "full", "auto")),
    *({"dp": 8, "precision": precision} for precision in ("fp32", "fp16", "fp8")),
    *({"dp": 4, "pp": 2, "schedule": name, "global_batch_size": 32} for name in SCHEDULES),
    {"dp": 4, "tp": 2, "sequence_parallel": True, "zero": 1},
    {"dp": 4, "cp": 2, "dp_replicate": 2, "zero": 3},
)
ROUTED: tuple[dict[str, Any], ...] = (
    {"dp": 8, "ep": 8, "zero": 1},
    {"dp": 4, "pp": 2, "ep": 4, "global_batch_size": 32},
    {"dp": 2, "cp": 4, "ep": 4},
)


def line(
    model: Any, plan: Any = None, *, device: str = "h100-80g", using: Any = "orrery", **more: Any
) -> dict:
    """A request of eight devices in bf16 with 2,048 tokens or as many as the model takes."""
    shape = model if isinstance(model, ModelSpec) else preset(model)
    workload = {"seq_len": min(2048, shape.max_seq_len), "tokens": 1e12, **more.pop("workload", {})}
    cluster = {"device": device, "nodes": 1, "devices_per_node": 8, **more.pop("cluster", {})}
    return {
        "model": shape.to_dict(),
        "plan": {"precision": "bf16", **(plan or {})},
        "cluster": cluster,
        "workload": workload,
        "framework": using,
        **more,
    }


def reported(lines: list[dict]) -> list[dict]:
    result = api.estimate(lines)
    assert all(each["ok"] for each in result), [
        each["problems"] for each in result if not each["ok"]
    ]
    return result


def plans_of(name: str) -> list[dict[str, Any]]:
    shape = preset(name)
    splits = shape.heads % 2 == 0
    return [
        each
        for each in (*PLANS, *(ROUTED if shape.moe else ()))
        if splits or each.get("tp", 1) == 1
    ]


@pytest.mark.parametrize("using", sorted(FRAMEWORKS))
def test_every_preset_on_every_device_is_answered_with_numbers_that_agree(using):
    """Each plan of a preset on another device, so that every preset meets nearly every device."""
    names, devices = list(PRESETS), list(DEVICES)
    lines = [
        line(name, plan, device=devices[(at + place) % len(devices)], using=using, id=at)
        for place, name in enumerate(names)
        for at, plan in enumerate(plans_of(name))
    ]
    for requested, answer in zip(lines, reported(lines), strict=True):
        where = f"{requested['model']['name']} {requested['plan']} {requested['cluster']['device']}"
        assert answer["id"] == requested["id"] and answer.keys() >= {
            "problems",
            "fits",
            "memory",
            "time",
            "comm",
            *NUMBERS,
        }
        numbers = [answer[name] for name in NUMBERS] + list(answer["time"].values())
        assert all(type(each) is float and math.isfinite(each) and each >= 0 for each in numbers), (
            where
        )
        _memory_agrees(answer["memory"], requested["plan"].get("pp", 1), answer["fits"], where)
        assert answer["comm"].keys() == COMM and all(
            type(each) is int for each in answer["comm"].values()
        ), where
        assert answer["time"].keys() == TIME and sum(answer["time"].values()) == pytest.approx(
            answer["step_time_s"]
        )
        assert 0 < answer["step_time_low_s"] < answer["step_time_s"] < answer["step_time_high_s"], (
            where
        )
        assert 0 < answer["mfu"] <= answer["hfu"] < 1 and 0 <= answer["bubble_fraction"] < 1, where
        _rates_agree(requested, answer, where)
        for axis in ("tp", "pp", "cp", "ep"):
            assert (answer["comm"][f"{axis}_bytes"] > 0) == (requested["plan"].get(axis, 1) > 1), (
                axis,
                where,
            )


def _memory_agrees(memory: dict[str, Any], ranks: int, fits: bool, where: str) -> None:
    parts = [memory[f"{name}_bytes"] for name in LINES]
    ends = ("total_bytes", "reserved_bytes", "capacity_bytes", "stage", "per_stage_total_bytes")
    assert memory.keys() == {*(f"{name}_bytes" for name in LINES), *ends}
    assert all(type(each) is int and each >= 0 for each in parts), where
    assert abs(sum(parts) - memory["total_bytes"]) <= len(parts), where
    assert len(memory["per_stage_total_bytes"]) == ranks, where
    assert (
        memory["per_stage_total_bytes"][memory["stage"]]
        == memory["total_bytes"]
        == max(memory["per_stage_total_bytes"])
    ), where
    assert not fits or memory["total_bytes"] <= memory["capacity_bytes"], where


def _rates_agree(requested: dict, answer: dict, where: str) -> None:
    """Speed, FLOPs, price and days by hand from the step's time."""
    plan, shape = requested["plan"], ModelSpec.from_dict(requested["model"])
    seq_len, entry = requested["workload"]["seq_len"], DEVICES[requested["cluster"]["device"]]
    batch = plan.get("global_batch_size", plan["dp"])
    rate = batch * seq_len / answer["step_time_s"] / 8
    assert answer["tokens_per_s_per_device"] == pytest.approx(rate), where
    tflops = rate * flops_per_token(shape, seq_len) / 1e12
    assert answer["tflops_per_device"] == pytest.approx(tflops), where
    assert answer["mfu"] == pytest.approx(tflops / entry.peak(plan["precision"])), where
    assert answer["usd_per_billion_tokens"] == pytest.approx(
        1e9 / rate / 3600 * entry.usd_per_hour
    ), where
    assert answer["days"] == pytest.approx(1e12 / (8 * rate) / 86400), where


@pytest.mark.parametrize("using", ["orrery", "megatron", "deepspeed"])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama2-7b", "qwen3-8b"])
def test_data_parallelism_moves_two_or_three_times_the_parameters(name, using):
    """2, 2, 2, 3 times Ψ for ZeRO 0-3 (arXiv 1910.02054, section 7), in 16 bit; padding adds a
    little.
    """
    result = reported([line(name, {"dp": 8, "zero": zero}, using=using) for zero in range(4)])
    each = 2 * parameter_count(preset(name)).total
    assert [answer["comm"]["dp_bytes"] / each for answer in result] == pytest.approx(
        [2, 2, 2, 3], rel=0.003
    )
    alone = reported(
        [line(name, {"tp": 8 if name != "gpt2-124m" else 4, "pp": 1 if name != "gpt2-124m" else 2})]
    )
    assert alone[0]["comm"]["dp_bytes"] == 0


def test_states_of_75_billion_parameters_on_64_devices():
    """120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054, figure 1); the shape is GPT-like, with 7.5
    billion parameters.
    """
    shape = {
        "layers": 36,
        "hidden": 4096,
        "heads": 32,
        "ffn": 16384,
        "vocab": 50257,
        "max_seq_len": 1024,
        "gated_mlp": False,
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
    }
    spec = ModelSpec.from_dict(shape)
    scale = 7.5e9 / parameter_count(spec).total
    result = reported(
        [
            line(
                spec,
                {"dp": 64, "zero": zero},
                using="deepspeed",
                cluster={"nodes": 8},
                workload={"seq_len": 1024},
            )
            for zero in range(4)
        ]
    )
    states = [
        sum(each["memory"][f"{name}_bytes"] for name in LINES[:4]) * scale / 1e9 for each in result
    ]
    assert states == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"]
)
def test_bubbles_shrink_with_micro_batches_and_match_the_closed_form(schedule):
    plans = [
        {"tp": 2, "pp": 4, "schedule": schedule, "global_batch_size": number}
        for number in (8, 16, 32, 64, 128)
    ]
    result = reported([line("gpt3-175b", plan, using="megatron") for plan in plans])
    bubbles = [each["bubble_fraction"] for each in result]
    assert all(more > fewer > 0 for more, fewer in pairwise(bubbles))
    even = [3 / (plan["global_batch_size"] + 3) for plan in plans]
    if schedule in {"gpipe", "1f1b"}:  # embedding and head make stages a little uneven
        assert bubbles == pytest.approx(even, rel=0.03)
    else:
        assert all(got < plain for got, plain in zip(bubbles, even, strict=True))


@pytest.mark.parametrize("using", sorted(FRAMEWORKS))
def test_what_should_cost_or_save_does(using):
    def requested(**plan: Any) -> dict:
        return line("llama2-7b", {"dp": 8, "micro_batch_size": 2, **plan}, using=using)

    def totals(result: list[dict], name: str = "total_bytes") -> list[float]:
        return [each["memory"][name] for each in result]

    sharded = reported([requested(zero=zero) for zero in range(4)])
    states = [sum(each["memory"][f"{name}_bytes"] for name in LINES[:4]) for each in sharded]
    assert all(more >= less for more, less in pairwise(states)) and states[0] > 4 * states[3]
    stored, some, full = reported(
        [requested(zero=3, recompute=how) for how in ("none", "selective", "full")]
    )
    assert (
        totals([stored], "activations_bytes")
        >= totals([some], "activations_bytes")
        > totals([full], "activations_bytes")
    )
    assert stored["step_time_s"] < some["step_time_s"] < full["step_time_s"]
    assert (
        stored["mfu"] == pytest.approx(stored["hfu"]) and 1.25 < full["hfu"] / full["mfu"] < 4 / 3
    )
    lengths = reported(
        [
            line("llama2-7b", {"dp": 8}, using=using, workload={"seq_len": s})
            for s in (512, 1024, 2048, 4096)
        ]
    )
    assert all(more > less for less, more in pairwise(totals(lengths)))
    assert all(more["step_time_s"] > less["step_time_s"] for less, more in pairwise(lengths))
    wide, narrow = reported([requested(precision=name) for name in ("fp32", "bf16")])
    assert wide["step_time_s"] > narrow["step_time_s"]
    assert wide["memory"]["activations_bytes"] > narrow["memory"]["activations_bytes"]
    places = reported(
        [requested(zero=3, offload=where) for where in ("none", "optimizer", "all", "nvme")]
    )
    assert all(more >= less for more, less in pairwise(totals(places)))
    assert all(slower["step_time_s"] > faster["step_time_s"] for faster, slower in pairwise(places))


def test_trees_reach_down_to_what_is_given_and_their_sums_hold():
    plan = {"dp": 4, "pp": 2, "ep": 4, "zero": 1, "global_batch_size": 16}
    [plain] = reported([line("deepseek-v2", plan)])
    [answer] = api.estimate([line("deepseek-v2", plan)], explain=ExplainOptions())
    trees = [*answer["memory"].values(), *answer["time"].values(), *answer["comm"].values()]
    trees += [answer[name] for name in NUMBERS]
    named: dict[str, Any] = {}

    def walk(tree: dict[str, Any]) -> None:
        assert tree.keys() == {"name", "value", "unit", "formula", "inputs", "source"}
        named.setdefault(tree["name"], tree["value"])
        assert tree["inputs"] or tree["formula"] == "given" or tree["name"] in repeated, tree[
            "name"
        ]
        repeated.add(tree["name"])
        for each in tree["inputs"]:
            walk(each)

    for each in trees:
        repeated: set[str] = set()
        walk(each)
    assert (
        named["step_time_s"]
        == pytest.approx(sum(named[name] for name in TIME))
        == plain["step_time_s"]
    )
    assert named["step_time_low_s"] * named["error_factor_80"] == pytest.approx(
        named["step_time_s"]
    )
    assert named["step_time_high_s"] == pytest.approx(
        named["step_time_s"] * named["error_factor_80"]
    )
    assert named["devices"] == 8 and named["total_bytes"] == pytest.approx(
        plain["memory"]["total_bytes"], abs=1
    )


def test_lines_that_cannot_be_answered_say_why_and_keep_their_place():
    shape = preset("mixtral-8x7b")
    wrong: list[tuple[Any, str]] = [
        (line("llama3-8b", {"dp": 1, "tp": 64}, cluster={"nodes": 8}), "plan.tp"),
        (line("llama3-8b", {"dp": 1, "pp": 64}, cluster={"nodes": 8}), "plan.pp"),
        (line("mixtral-8x7b", {"dp": 8, "ep": 3}), "plan.ep"),
        (line("llama3-8b", {"dp": 2}), "plan.dp"),
        (line("llama3-8b", {"dp": -8}), "plan.dp"),
        (line("llama3-8b", {"dp": math.nan}), "plan.dp"),
        (
            line("llama3-8b", {"dp": 8, "global_batch_size": 12, "micro_batch_size": 5}),
            "plan.global_batch_size",
        ),
        (line("llama3-8b", {"dp": 8}, device="h1000"), "cluster.device"),
        (line("llama3-8b", {"dp": 8}, cluster={"nodes": 125_000}), "cluster.nodes"),
        (line("llama3-8b", {"dp": 8}, workload={"seq_len": 0}), "workload.seq_len"),
        (line("llama3-8b", {"dp": 8}, workload={"tokens": math.inf}), "workload.tokens"),
        (line("gpt2-124m", {"dp": 8}, workload={"seq_len": 4096}), "workload.seq_len"),
        (line("llama3-8b", {"dp": 8}, using="unknown"), "framework.name"),
        ({**line("llama3-8b"), "model": {**shape.to_dict(), "layers": 0}}, "model.layers"),
        (
            {
                **line("llama3-8b"),
                "model": {**shape.to_dict(), "hidden": 100, "heads": 7, "head_dim": None},
            },
            "model.hidden",
        ),
        ({**line("llama3-8b"), "model": "llama9"}, "model"),
        ([1, 2], ""),
        (None, ""),
    ]
    right = line(
        "llama3-8b",
        {"dp": 8},
        using={"name": "megatron", "unheard": 1},
        _note=1,
        source="a page",
        id=7,
    )
    result = api.estimate([each for bad, _ in wrong for each in (bad, right)])
    assert all(answer["ok"] and answer["id"] == 7 for answer in result[1::2])
    for (_, field), answer in zip(wrong, result[::2], strict=True):
        assert answer["ok"] is False and not answer.keys() - {"id", "ok", "fits", "problems"}
        assert field in {each["field"] for each in answer["problems"]}, answer["problems"]
        assert all(
            each.keys() == {"field", "message", "hint"} and each["message"]
            for each in answer["problems"]
        )


def test_auto_never_trains_on_stale_weights_and_a_search_message_where_it_would():
    """A small model in a pipeline is fastest with PipeDream, which is another algorithm."""
    scenario = {
        key: value for key, value in line("llama-15m", using="orrery").items() if key != "plan"
    }
    scenario["workload"] = {"seq_len": 256, "global_batch_size": 64}
    fastest = api.search(
        {**scenario, "fix": {"pp": 4, "schedule": ["1f1b", "pipedream"]}, "top": 1}
    )
    assert fastest["plans"][0]["plan"]["schedule"] == "pipedream"
    assert any("stale" in note for note in fastest["notes"])
    assert api.parse_line({**scenario, "plan": "auto"}).request.plan.schedule != "pipedream"


def test_a_search_notes_the_host_memory_of_offloading():
    """671 billion parameters fit eight devices only where 10 TiB fit their host, which no catalogue
    says.
    """
    scenario = {key: value for key, value in line("deepseek-v3").items() if key != "plan"}
    scenario["workload"] = {"seq_len": 4096, "global_batch_size": 64}
    best = api.search({**scenario, "fix": {"offload": "all", "zero": 3}, "top": 1})
    assert best["fit"] and best["plans"][0]["memory"]["optimizer_bytes"] == 0
    [note] = [each for each in best["notes"] if "host" in each]
    gib = float(note.split(" stores ")[1].split(" GiB")[0].replace(",", ""))
    assert gib == pytest.approx(16 * parameter_count(preset("deepseek-v3")).total / 2**30, rel=0.01)
