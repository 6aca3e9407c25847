"""Documents written by version 1 stay readable: each file in v1/ validates, round-trips and fits
its schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from workers.contracts import (
    ClusterSpec,
    Contract,
    ModelSpec,
    ParallelPlan,
    Point,
    RunEvent,
    RunSpec,
    spec_problems,
)
from workers.contracts.schema import CONTRACTS, schema, write
from workers.contracts.wire.envelope import open_envelope

V1 = Path(__file__).parent / "v1"
DOCUMENTS: list[tuple[str, type[Contract]]] = [
    ("train-minimal.json", RunSpec),
    ("train-full.json", RunSpec),
    ("generate.json", RunSpec),
    ("external.json", RunSpec),
    ("model-mla.json", ModelSpec),
    ("model-moe.json", ModelSpec),
    ("points.jsonl", Point),
    ("events.jsonl", RunEvent),
]


def documents(name: str) -> list[dict[str, Any]]:
    text = (V1 / name).read_text()
    return (
        [json.loads(line) for line in text.splitlines()]
        if name.endswith("l")
        else [json.loads(text)]
    )


@pytest.mark.parametrize(("name", "contract"), DOCUMENTS)
def test_a_v1_document_validates_round_trips_and_fits_its_schema(
    name: str, contract: type[Contract]
) -> None:
    for document in documents(name):
        read = contract.from_dict(document)
        assert contract.from_dict(json.loads(json.dumps(read.to_dict()))) == read
        assert contract.model_validate_json(read.to_json()) == read
        jsonschema.validate(document, schema(contract.__name__))
        if isinstance(read, RunSpec):
            assert spec_problems(read) == []


@pytest.mark.parametrize("line", documents("messages.jsonl"), ids=lambda line: line["contract"])
def test_a_v1_message_between_node_and_control_plane_validates(line: dict[str, Any]) -> None:
    contract, document = CONTRACTS[line["contract"]], line["document"]
    read = contract.from_dict(document)
    written = json.loads(json.dumps(read.to_dict(), allow_nan=False))
    assert {name: written[name] for name in document} == document
    jsonschema.validate(document, schema(line["contract"]))


def test_a_v1_envelope_opens() -> None:
    text = (V1 / "envelope.txt").read_text().strip()
    assert open_envelope(b"k" * 32, text, kind="launch", now=1790000059.0) == {"attempt_id": "40"}


@pytest.mark.parametrize("name", ["plan-requests.jsonl", "measurements.jsonl"])
def test_the_parts_of_a_v1_planner_line_validate(name: str) -> None:
    for line in documents(name):
        ParallelPlan.from_dict(line["plan"])
        ClusterSpec.from_dict(line["cluster"])


def test_what_a_v1_document_leaves_out_has_its_documented_default() -> None:
    spec = RunSpec.from_dict(documents("train-minimal.json")[0])
    assert spec.train is not None and isinstance(spec.plan, ParallelPlan)
    assert (spec.model, spec.data.preset, spec.plan.world_size, spec.plan.precision) == (
        "llama-tiny",
        "shakespeare",
        1,
        "fp32",
    )
    assert (spec.train.optimizer.name, spec.train.lr_schedule.name, spec.train.clip_norm) == (
        "adamw",
        "constant",
        None,
    )
    assert (spec.train.eval, spec.train.checkpoint, spec.train.compile, spec.train.log_every) == (
        None,
        None,
        False,
        1,
    )
    assert spec.devices == 1 and not spec.has_explicit_plan


def test_every_schema_is_written_with_its_version(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert {file.stem for file in files} == set(CONTRACTS)
    for file in files:
        written = json.loads(file.read_text())
        jsonschema.Draft202012Validator.check_schema(written)
        assert written["x-version"] == 1
