"""Request lines: ignored fields, refused fields, and the forms of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner import api
from orchestrator.planner.plan_request import ParseOptions
from orchestrator.planner.request_parsing import nest_flat_fields, parse_json_line, parse_line
from tests.workers.contracts.test_fuzz import anything
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.presets import PRESETS

LINE: dict[str, Any] = {
    "id": "q1",
    "model": "llama3-8b",
    "plan": {
        "dp": 8,
        "zero": 3,
        "precision": "bf16",
        "micro_batch_size": 1,
        "global_batch_size": 16,
    },
    "cluster": {"device": "h100-80g", "nodes": 1, "devices_per_node": 8},
    "workload": {"seq_len": 8192, "tokens": 1e12},
    "framework": {"name": "fsdp2"},
}
H100 = DEVICES["h100-80g"].to_dict()
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def fields(line: Any, **more: Any) -> list[str]:
    result = parse_line(line, **more)
    assert result.request is None and all(item.message for item in result.problems), result
    return [item.field for item in result.problems]


def test_extra_fields_of_a_line_are_ignored() -> None:
    plain = parse_line(LINE).request
    assert plain is not None and (plain.tokens, plain.id, plain.framework.name) == (
        1e12,
        "q1",
        "fsdp2",
    )
    more = {
        **LINE,
        "source": "a paper",
        "_note": 1,
        "measured": {"step_time_s": 1.0, "weather": "fine"},
        "plan": {**LINE["plan"], "_why": "tried"},
        "framework": {"name": "fsdp2", "compiler": "x", "grad_dtype": None},
    }
    result = parse_line(more)
    assert result.request == plain and result.measured["weather"] == "fine"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"modell": "x"}, "modell"),
        ({"model": "llama3-9b"}, "model"),
        ({"model": None}, "model"),
        ({"model": {"layers": 2}}, "model.hidden"),
        ({"model": {"model_type": "bert"}}, "model"),
        ({"model": "/etc/hosts"}, "model"),
        ({"plan": {"dp": 0}}, "plan.dp"),
        ({"plan": {"data_parallel": 8}}, "plan.data_parallel"),
        ({"plan": {"dp": 7}}, "plan.dp"),
        ({"plan": {"dp": 1, "tp": 5}}, "plan.tp"),
        ({"plan": [8]}, "plan"),
        ({"cluster": {"device": "h100"}}, "cluster.device"),
        ({"cluster": {"device": "h100-80g", "nodes": 10**6}}, "cluster.nodes"),
        ({"cluster": {"device": {"name": "x"}}}, "cluster.device.peak_tflops"),
        (
            {"cluster": {"device": {**H100, "peak_tflops": {"int4": 1}}}},
            "cluster.device.peak_tflops",
        ),
        ({"workload": {}}, "workload.seq_len"),
        ({"workload": {"seq_len": -1}}, "workload.seq_len"),
        ({"workload": {"seq_len": 8192, "token": 1}}, "workload.token"),
        ({"framework": "megatrom"}, "framework.name"),
        ({"framework": {"flash_attention": "yes"}}, "framework.flash_attention"),
        ({"framework": {"grad_dtype": "fp64"}}, "framework.grad_dtype"),
        ({"framework": {"optimizer": "adamx"}}, "framework.optimizer"),
        ({"framework": 3}, "framework"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], field: str) -> None:
    assert field in fields({**LINE, **change})


def test_an_illegal_plan_is_distinguished_from_an_unreadable_line() -> None:
    assert parse_line({**LINE, "plan": {"dp": 4}}).illegal
    assert not parse_line({**LINE, "plan": {"dp": 4}, "model": "x"}).illegal
    too_long = {**LINE, "model": "gpt2-124m"}
    assert fields(too_long) == ["workload.seq_len"]


def test_a_model_may_be_a_config_or_a_file(tmp_path: Path) -> None:
    shape = PRESETS["llama3-8b"]
    result = parse_line({**LINE, "model": LLAMA_CONFIG}).request
    assert result is not None and (
        result.model.hidden,
        result.model.kv_heads,
        result.model.ffn,
    ) == (
        4096,
        8,
        shape.ffn,
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_CONFIG))
    line = {**LINE, "model": str(file)}
    assert fields(line) == ["model"], "files are for those who sit at the machine"
    by_file = parse_line(line, ParseOptions(files=True)).request
    assert by_file is not None and by_file.model.layers == 32
    assert fields(
        {**LINE, "model": str(tmp_path / "none.json")}, options=ParseOptions(files=True)
    ) == ["model"]


def test_flat_fields_are_nested() -> None:
    flat = {
        "model": "llama3-8b",
        "device": "h100-80g",
        "nodes": 2,
        "seq_len": 4096,
        "global_batch": 16,
        "top": 3,
    }
    assert nest_flat_fields(flat) == {
        "model": "llama3-8b",
        "top": 3,
        "cluster": {"device": "h100-80g", "nodes": 2},
        "workload": {"seq_len": 4096, "global_batch_size": 16},
    }
    assert nest_flat_fields(
        {"seq_len": 8, "workload": {"seq_len": 4}, "nodes": 2, "cluster": 3}
    ) == {
        "workload": {"seq_len": 4},
        "cluster": 3,
    }


def test_own_devices_are_named_or_written_out() -> None:
    own = DEVICES["h100-80g"].model_copy(update={"name": "lab-gpu", "memory_bytes": 40 * 2**30})
    line = {**LINE, "cluster": {"device": "lab-gpu", "devices_per_node": 8}}
    assert fields(line) == ["cluster.device"]
    result = parse_line(line, ParseOptions({"lab-gpu": own})).request
    assert result is not None and result.entry is own
    written = parse_line(
        {**LINE, "cluster": {"device": own.to_dict(), "devices_per_node": 8}}
    ).request
    assert written is not None and written.entry == own
    assert "lab-gpu" in str(
        parse_line(
            {**LINE, "cluster": {"device": "lab-gpv"}}, ParseOptions({"lab-gpu": own})
        ).problems[0]
    )


def test_lines_that_are_not_json_are_problems() -> None:
    for text in ("{", "nul", "[" * 100_000, "\ud800", '{"id": 1e999}x', "1" * 5000):
        answer = api.estimate([parse_json_line(text)])[0]
        assert answer["ok"] is False and answer["problems"][0]["message"], text[:20]
    deep: Any = {}
    for _ in range(3000):
        deep = {"a": deep}
    assert api.estimate([{**LINE, "_x": 1, "model": deep}])[0]["ok"] is False


KEYS = st.sampled_from(
    ["id", "model", "plan", "cluster", "workload", "framework", "measured", "source", "_x", "other"]
)


@given(st.dictionaries(KEYS, anything, max_size=6))
@settings(deadline=None, max_examples=60)
def test_any_input_is_answered(change: dict[str, Any]) -> None:
    [answer] = api.estimate([{**LINE, **change}])
    if not answer["ok"]:
        assert answer["problems"] and all(item["message"] for item in answer["problems"])
    json.dumps(answer["problems"])
