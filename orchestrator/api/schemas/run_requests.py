"""Requests about runs: what to submit, filter, change, clone and retry."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field

from workers.contracts.base import Contract


class Submission(Contract):
    """A run to submit."""

    name: Annotated[str, Field(max_length=160, description="default: kind and model")] = ""
    experiment: Annotated[
        int | str | None, Field(description="name or id; a new name creates the experiment")
    ] = None
    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-contract": "RunSpec"})]
    force: Annotated[bool, Field(description="submit even if the plan is predicted not to fit")] = (
        False
    )


class Filters(Contract):
    """Filters of the list of runs."""

    state: Annotated[str | None, Field(description="one or a comma-separated list")] = None
    kind: Annotated[str | None, Field(description="one or a comma-separated list")] = None
    experiment: Annotated[str | None, Field(description="name or id")] = None
    tag: str | None = None
    owner: Annotated[str | None, Field(description="a username; `me` is the caller")] = None
    q: Annotated[str | None, Field(description="text in name, notes, model or tags")] = None
    query: Annotated[
        str | None,
        Field(max_length=2000, description="for example `lr > 1e-4 and min(val_loss) < 2`"),
    ] = None
    sort: Annotated[
        str | None, Field(max_length=200, description="a column; `-val_loss` for descending")
    ] = None

    def chosen(self, by: Any) -> dict[str, Any]:
        """The filters for `run_table.selectors.table_runs`, without those not given."""
        names = ("state", "kind", "experiment", "tag", "owner", "q", "query")
        values = {name: value for name in names if (value := getattr(self, name))}
        return values | ({"owner": by.get_username()} if self.owner == "me" else {})


class RunChange(Contract):
    """The fields to change; omitted fields keep their values."""

    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    tags: list[Annotated[str, Field(min_length=1, max_length=100)]] | None = None
    notes: Annotated[str, Field(max_length=20_000)] | None = None


class SpecToCheck(Contract):
    """A spec that may be wrong."""

    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-contract": "RunSpec"})]


class Clone(Contract):
    """Changes to a cloned run."""

    spec: Annotated[
        dict[str, Any],
        Field(
            validation_alias=AliasChoices("spec", "changes"),
            description="changes to the spec, as a merge patch (RFC 7396)",
        ),
    ] = {}


class Fork(Clone):
    """The checkpoint to fork from, and changes to the new run."""

    step: Annotated[int, Field(ge=0, description="the step of a retained checkpoint")]
    name: Annotated[
        str, Field(max_length=160, description="default: the parent's name and the step")
    ] = ""
    force: Annotated[bool, Field(description="fork even if the plan is predicted not to fit")] = (
        False
    )


class Retry(Contract):
    """Where the next attempt starts."""

    step: Annotated[
        int | None, Field(ge=0, description="rewind to this checkpoint; default: the newest")
    ] = None


class BundleSubmission(Contract):
    """A bundle to submit again."""

    bundle: Annotated[dict[str, Any], Field(description="from GET runs/{id}/bundle")]
    name: Annotated[str, Field(max_length=160, description="default: the original's")] = ""
    other_versions: Annotated[
        bool, Field(description="also a bundle of another release; its losses may differ")
    ] = False
    force: Annotated[bool, Field(description="submit even if the plan is predicted not to fit")] = (
        False
    )
