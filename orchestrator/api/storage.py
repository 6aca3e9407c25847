"""Storage of nodes for operators: what garbage collection deletes, has deleted, and orphans."""

from __future__ import annotations

from itertools import islice
from typing import Any

from django.http import HttpRequest
from ninja import Field, Router, Schema

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.background_jobs import selectors as jobs
from orchestrator.runs import storage
from orchestrator.runs.store import access, copies

router = Router(tags=["jobs"])
MOST = 1000


class CandidateOut(Schema):
    """What the next run of the job `garbage` deletes."""

    run: Id
    kind: str = Field(description="checkpoint, or attempt: its folder without checkpoints")
    path: str
    bytes: int = Field(description="of folders: by the nodes' newest scans, else 0")
    reason: str = Field(description="age or size")
    nodes: list[str]


class CandidatesOut(Schema):
    """Candidates, at most 1,000; `bytes` is the sum of those listed."""

    items: list[CandidateOut]
    more: bool
    bytes: int


class DeletionOut(Schema):
    """A path that is deleted on a node."""

    id: Id
    node: str
    run: Id
    kind: str
    path: str
    created: Time
    done: Time | None = Field(description="when the node confirmed it")
    freed: int = Field(description="bytes")
    problem: str


class FolderOut(Schema):
    """A folder below `runs/` on a node, by its newest scan."""

    node: str
    name: str
    orphan: bool = Field(description="of no run that this installation knows")
    bytes: int
    modified: Time
    seen: Time


class StoreProblemOut(Schema):
    """Why the copies of a node wait."""

    node: str
    run: Id = Field(alias="run_id")
    reason: str = Field(description="full, credentials, bucket, unreachable or other")
    message: str
    hint: str
    since: Time


class StoreOut(Schema):
    """The store, without its credentials."""

    configured: bool
    url: str
    endpoint: str
    region: str
    copies: int
    bytes: int
    problems: list[StoreProblemOut]


class StoreCheckOut(Schema):
    """Whether this machine can write, read and delete an object."""

    ok: bool
    problem: str


class CopyOut(Schema):
    """A copy of a checkpoint or artifact in the store."""

    id: Id
    run: Id
    kind: str = Field(description="checkpoint or artifact")
    key: str = Field(description="folder below the store's URL")
    bytes: int
    fingerprint: str
    created: Time
    deleted: Time | None = Field(description="when it was given up")
    removed: Time | None = Field(description="when its objects were deleted")


class CopyCandidateOut(Schema):
    """What the next run of the job `store-garbage` deletes."""

    run: Id | None = Field(description="whose copy it is; of a data set, the run that wrote it")
    kind: str = Field(description="checkpoint, artifact or data")
    key: str
    bytes: int
    reason: str = Field(description="superseded, discarded, age, size or deleted")
    data_set: str = Field(description="NAME@VERSION of a deleted data set, else empty")


class CopyCandidatesOut(Schema):
    """Candidates, at most 1,000; `bytes` is the sum of those listed."""

    items: list[CopyCandidateOut]
    more: bool
    bytes: int


@router.get("/store", response=StoreOut, auth=require_scope("fleet"), summary="Show the store")
def store_show(request: HttpRequest) -> Any:
    """Where copies are, how many there are, and the nodes whose copies wait."""
    user(request)
    where = access.access()
    return {
        "configured": where is not None,
        "url": where.url if where else "",
        "endpoint": where.endpoint if where else "",
        "region": where.region if where else "",
        **copies.totals(user=user(request)),
        "problems": list(copies.problems()),
    }


@router.post(
    "/store/check",
    response=StoreCheckOut,
    auth=require_scope("fleet"),
    summary="Check the store",
)
def store_check(request: HttpRequest) -> Any:
    """Write, read and delete a small object from this machine."""
    problem = copies.check(user=user(request))
    return {"ok": not problem, "problem": problem}


@router.get("/copies", response=list[CopyOut], auth=require_scope("fleet"), summary="List copies")
@paginated(name="copies", newest_first=True, serialize=copies.serialize_copy)
def copy_list(request: HttpRequest, run: int | None = None) -> Any:
    """Copies of checkpoints and artifacts in the store, newest first."""
    chosen = get_run(request, run) if run is not None else None
    return copies.copies(user=user(request), run=chosen)


@router.get(
    "/copies/candidates",
    response=CopyCandidatesOut,
    auth=require_scope("fleet"),
    summary="List what garbage collection of the store would delete",
)
def copy_candidate_list(request: HttpRequest) -> Any:
    """A dry run of the job `store-garbage` now."""
    rows = list(islice(jobs.store_candidates(user=user(request)), MOST + 1))
    return {
        "items": [CopyCandidateOut(**row._asdict()) for row in rows[:MOST]],
        "more": len(rows) > MOST,
        "bytes": sum(row.bytes for row in rows[:MOST]),
    }


@router.get(
    "/candidates",
    response=CandidatesOut,
    auth=require_scope("fleet"),
    summary="List what garbage collection would delete",
)
def candidate_list(request: HttpRequest) -> Any:
    """A dry run of the job `garbage` now."""
    rows = list(islice(jobs.garbage_candidates(user=user(request)), MOST + 1))
    items = [CandidateOut(**row._asdict()) for row in rows[:MOST]]
    return {
        "items": items,
        "more": len(rows) > MOST,
        "bytes": sum(row.bytes for row in rows[:MOST]),
    }


@router.get(
    "/deletions",
    response=list[DeletionOut],
    auth=require_scope("fleet"),
    summary="List deletions on nodes",
)
@paginated(name="deletions", newest_first=True, serialize=storage.serialize_deletion)
def deletion_list(request: HttpRequest) -> Any:
    """Ordered and confirmed deletions with the bytes that they freed, newest first."""
    return storage.deletions(user=user(request))


@router.get(
    "/folders",
    response=list[FolderOut],
    auth=require_scope("fleet"),
    summary="List run folders on nodes",
)
@paginated(name="folders")
def folder_list(request: HttpRequest, orphan: bool | None = None) -> Any:
    """Run folders with their sizes, from the newest scan of each node."""
    return storage.folders(user=user(request), orphan=orphan)
