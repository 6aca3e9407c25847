"""Data sets: named, versioned files with fingerprint, copy in the store and lineage."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.runs.datasets import selectors, services
from workers.contracts.base import Contract
from workers.contracts.specs.data import Format

router = Router(tags=["data"])


class NewDataSetVersion(Contract):
    """The next version of a name: a file or folder of the data folders, or a run's output."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    run: Annotated[
        int | None, Field(ge=1, le=2**63 - 1, description="a produce or generate run")
    ] = None
    format: Annotated[
        Format | None, Field(description="default: by the suffix and the first line")
    ] = None
    notes: Annotated[str, Field(max_length=2000)] = ""


class DataSetVersionOut(Schema):
    """One version."""

    name: str
    version: int
    label: str = Field(description="for data.dataset of a run")
    owner: str
    path: str
    folder: bool
    format: str
    notes: str
    state: str = Field(description="waiting, fingerprinted, stored (copied too) or failed")
    problem: str
    hint: str
    fingerprint: str = Field(description="SHA-256 over names, sizes and digests of the files")
    bytes: int
    file_count: int
    key: str = Field(description="of its copy, below the store's URL")
    run: Id | None = Field(description="whose output it is")
    created: Time
    deleted: Time | None
    removed: Time | None = Field(description="when its copy was deleted from the store")


class DataSetNameOut(DataSetVersionOut):
    """The newest version of a name."""

    versions: int
    run_count: int = Field(description="runs that use any version")


class UsedByOut(Schema):
    """A run that uses a version."""

    id: Id
    name: str
    kind: str
    state: str


class DataFileOut(Schema):
    """A file of a version."""

    bytes: int
    sha256: str


class DataSetDetailsOut(DataSetVersionOut):
    """One version with its files and lineage."""

    files: dict[str, DataFileOut]
    used_by: list[UsedByOut] = Field(description="runs that you may see, newest first")


@router.get("", response=list[DataSetNameOut], auth=require_scope("read"), summary="List data sets")
@paginated(name="datasets", newest_first=True, serialize=selectors.serialize_newest)
def data_set_list(request: HttpRequest, q: str = "") -> Any:
    """The newest version of each name, newest first; `q` is a part of the name."""
    return selectors.newest_of_each(user=user(request), q=q)


@router.post(
    "",
    response={201: DataSetVersionOut},
    auth=require_scope("runs"),
    summary="Register a data set",
)
@creates(DataSetVersionOut, location="/api/v1/datasets/{name}/{version}")
def data_set_create(request: HttpRequest, body: NewDataSetVersion) -> Any:
    """Registers the next version. Its files are read, and copied into the store, in the background;
    runs may use it when its state is fingerprinted or stored.
    """
    row = services.data_set_register(by=user(request), **body.model_dump())
    return selectors.serialize(row)


@router.get(
    "/{name}",
    response=list[DataSetVersionOut],
    auth=require_scope("read"),
    summary="List versions of a data set",
)
@paginated(
    name="dataset-versions",
    newest_first=True,
    key=lambda row: int(row.version),
    serialize=selectors.serialize,
)
def data_set_versions(request: HttpRequest, name: str) -> Any:
    """The versions of a name, newest first, deleted ones too."""
    return selectors.versions_of(user=user(request), name=name)


@router.get(
    "/{name}/{int:version}",
    response=DataSetDetailsOut,
    auth=require_scope("read"),
    summary="Get a version of a data set",
)
def data_set_version(request: HttpRequest, name: str, version: int) -> Any:
    """One version with its files, the run that wrote it and the runs that use it."""
    row = selectors.version_get(user=user(request), name=name, version=version)
    return selectors.serialize_details(row, user=user(request))


@router.delete(
    "/{name}/{int:version}",
    response={204: None},
    auth=require_scope("runs"),
    summary="Delete a version of a data set",
)
def data_set_remove(request: HttpRequest, name: str, version: int) -> HttpResponse:
    """No run may use it any more, and its copy is removed from the store. Its original files stay.
    409 while a run that has not ended uses it.
    """
    row = selectors.version_get(user=user(request), name=name, version=version)
    services.data_set_delete(row=row, by=user(request))
    return HttpResponse(status=204)
