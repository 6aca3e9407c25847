"""What a run trains on, which parameters it updates, and its lineage from data to served model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Time
from orchestrator.runs.outputs import training_data
from orchestrator.runs.outputs.lineage import lineage_of, newest_checkpoint
from orchestrator.runs.outputs.rollouts import rollouts_of
from workers.contracts.wire.rollouts import SampledGroup
from workers.contracts.wire.samples import TrainingRows

router = Router(tags=["runs"])


class TrainedOut(Schema):
    """How many parameters a run updates."""

    total: int = Field(description="parameters of the model, without an adapter's own")
    trained: int
    frozen: list[str] = Field(description="patterns of `train.freeze`")
    adapter: str | None = Field(description="the adapter's method")
    storage: str | None = Field(description="type of frozen linear weights, if quantized")


class TrainingDataOut(Schema):
    """What a fine-tuning run trains on."""

    statistics: dict[str, Any] | None = Field(
        description="`{shape, seq_len, sources {name: statistics}}`; null before the run reads it"
    )
    rows: TrainingRows | None = Field(description="the first sequences, as tokens with loss weight")
    parameters: TrainedOut | None = Field(description="null before the run starts")


class LineageNode(Schema):
    """A run, a data file, or weights from outside."""

    id: str
    kind: Literal["run", "data", "weights"]
    label: str
    level: int = Field(description="0 is this run; it uses those below, those above use it")
    run: int | None = None
    run_kind: str | None = None
    state: str | None = None
    adapter: str | None = Field(None, description="the method of the adapter that the run trains")
    path: str | None = None


class LineageEdge(Schema):
    """`target` uses `source`."""

    source: str
    target: str
    use: str = Field(description="such as data, initial_weights, teacher, model, adapter, fork")
    step: int | None = Field(description="of the checkpoint that is used, if known")


class LineageOut(Schema):
    """Where a run's data and weights come from, and which runs use what it wrote."""

    nodes: list[LineageNode]
    edges: list[LineageEdge]
    complete: bool = Field(description="false if further nodes were left out")
    checkpoint: str | None = Field(description="path of the run's newest checkpoint")


@router.get(
    "/{int:id}/training-data",
    response=TrainingDataOut,
    auth=require_scope("read"),
    summary="Get training data",
)
def training_data_(request: HttpRequest, id: int) -> Any:
    """The first sequences of a fine-tuning run, statistics of its data, trained parameters."""
    run = get_run(request, id)
    trained = training_data.trained_parameters(run=run)
    return {
        "statistics": training_data.data_statistics(run=run),
        "rows": training_data.training_rows(run=run),
        "parameters": asdict(trained) if trained is not None else None,
    }


class RolloutsOut(Schema):
    """Sampled answers of one iteration."""

    step: int = Field(description="the first update that learns from them")
    weight_version: int = Field(description="the last update before they were sampled")
    groups: list[SampledGroup]
    attempt: int | None
    time: Time


@router.get(
    "/{int:id}/rollouts",
    response=list[RolloutsOut],
    auth=require_scope("read"),
    summary="List rollouts",
)
@paginated(
    name="rollouts",
    key=lambda row: row.content.step,
    serialize=lambda row: {**dict(row.content), "attempt": row.attempt, "time": row.time},
)
def rollouts(request: HttpRequest, id: int) -> Any:
    """Some groups of answers of a reinforcement learning run with rewards and advantages, by step,
    without steps that were discarded.
    """
    return rollouts_of(run=get_run(request, id))


@router.get(
    "/{int:id}/lineage", response=LineageOut, auth=require_scope("read"), summary="Get lineage"
)
def lineage(request: HttpRequest, id: int) -> Any:
    """Data, runs and weights around a run, without runs that the caller may not see."""
    run = get_run(request, id)
    graph = lineage_of(run=run, user=user(request))
    newest = newest_checkpoint(run=run)
    return {
        "nodes": [
            {
                "id": node.id,
                "kind": node.kind,
                "label": node.label,
                "level": node.level,
                "run": node.run.pk if node.run else None,
                "run_kind": node.run.kind if node.run else None,
                "state": node.run.state if node.run else None,
                "adapter": node.adapter,
                "path": node.path or None,
            }
            for node in graph.nodes.values()
        ],
        "edges": [asdict(edge) for edge in graph.edges],
        "complete": graph.complete,
        "checkpoint": newest.path if newest is not None else None,
    }
