"""Exports: archives of a run or experiment, built in the background and downloaded later."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import FileResponse, HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field, model_validator

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.background_jobs.exports import requests
from workers.contracts.base import Contract

router = Router(tags=["exports"])


class NewExport(Contract):
    """A run or an experiment to export."""

    run: Annotated[int, Field(ge=1)] | None = None
    experiment: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> NewExport:
        if (self.run is None) == (self.experiment is None):
            raise ValueError("give either run or experiment")
        return self


class ExportOut(Schema):
    """An archive that is built in the background."""

    id: Id
    kind: str = Field(description="run or experiment")
    target: Id
    state: str = Field(description="queued, ready or failed")
    created: Time
    finished: Time | None
    expires: Time = Field(description="then it is deleted")
    bytes: int
    error: str


@router.get("", response=list[ExportOut], auth=require_scope("read"), summary="List exports")
@paginated(name="exports", newest_first=True, serialize=requests.serialize_export)
def export_list(request: HttpRequest) -> Any:
    """The caller's exports, newest first."""
    return requests.exports_of(user=user(request))


@router.post("", response={201: ExportOut}, auth=require_scope("read"), summary="Request an export")
@creates(ExportOut)
def export_create(request: HttpRequest, body: NewExport) -> dict[str, Any]:
    """Queues a ZIP with spec, events, log lines and every stored point of the run or experiment."""
    row = requests.export_request(by=user(request), run=body.run, experiment=body.experiment)
    return requests.serialize_export(row)


@router.get("/{int:id}", response=ExportOut, auth=require_scope("read"), summary="Get an export")
def export(request: HttpRequest, id: int) -> Any:
    """One export of the caller."""
    return requests.serialize_export(requests.export_get(user=user(request), id=id))


@router.get(
    "/{int:id}/download",
    auth=require_scope("read"),
    summary="Download an export",
    openapi_extra={"responses": {200: {"content": {"application/zip": {}}}}},
)
def export_download(request: HttpRequest, id: int) -> FileResponse:
    """The ZIP of a ready export."""
    path = requests.export_file(user=user(request), id=id)
    return FileResponse(open(path, "rb"), as_attachment=True, filename=f"orrery-export-{id}.zip")


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("read"), summary="Delete an export"
)
def export_remove(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the export with its file."""
    requests.export_delete(export=requests.export_get(user=user(request), id=id))
    return HttpResponse(status=204)
