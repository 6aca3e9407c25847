"""Files of fine-tuning data: which there are, and how a model sees one."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Query, Router, Schema

from orchestrator.api.http.auth import require_scope
from orchestrator.runs.submission.examples.example_preview import example_files, example_preview
from workers.contracts.examples.preview import PreviewRequest

router = Router(tags=["data"])


class FilesOut(Schema):
    """Files of JSON lines, relative to the data folders."""

    items: list[str]


class PreviewOut(Schema):
    """A file as a model sees it.

    `samples[].documents[].pieces` are tokens by use: `trained` (with loss), `read` (without) or
    `cut` (beyond the sequence). `rows` are the documents of the first sequences.
    """

    path: str
    format: str
    shape: str
    lines: int
    complete: bool
    problem_count: int
    problems: list[dict[str, Any]]
    template: str
    stops: list[str]
    duplicates: dict[str, Any]
    samples: list[dict[str, Any]]
    statistics: dict[str, Any] | None
    histogram: dict[str, Any] | None
    rows: list[list[dict[str, int]]]


@router.get("/files", response=FilesOut, auth=require_scope("runs"), summary="List data files")
def files(request: HttpRequest) -> dict[str, Any]:
    """Files of JSON lines under the data folders that a run may name."""
    return {"items": example_files()}


@router.get(
    "/preview", response=PreviewOut, auth=require_scope("runs"), summary="Preview a data file"
)
def preview(request: HttpRequest, options: Query[PreviewRequest]) -> dict[str, Any]:
    """The first lines of a file, as tokens with loss, and their statistics."""
    return example_preview(options.to_dict())
