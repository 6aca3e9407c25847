"""Stores what programs record about themselves, and media. Idempotent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.db import transaction
from django.db.models import Count, Sum

from orchestrator.common import clock
from orchestrator.runs import parameters
from orchestrator.runs.models import Run
from orchestrator.tracking import details as rules
from orchestrator.tracking.media import Checked
from orchestrator.tracking.models import MediaBlob, MediaItem, RunDetails

MOST_ITEMS: Final = 20_000  # media of a run
MOST_BYTES: Final = 1_000_000_000
_ORIGIN: Final = {"diff": rules.DIFF_BYTES, "requirements": rules.REQUIREMENTS_BYTES}


def details_update(*, run: Run, changes: Sequence[Mapping[str, Any]]) -> RunDetails:
    """Merge changes `{config?, summary?, program?, diff?, requirements?}` in their order.

    All are stored or none. Raises 422 that names the field.
    """
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).get(pk=run.pk)
        row = RunDetails.objects.filter(run=run).first() or RunDetails(run=run)
        for change in changes:
            for field in ("config", "summary"):
                if change.get(field):
                    setattr(row, field, rules.merged(getattr(row, field), change[field], field))
            if change.get("program"):
                row.program = row.program | rules.checked_program(change["program"])
            for field, most in _ORIGIN.items():
                if change.get(field) is not None:
                    setattr(row, field, rules.checked_text(change[field], field, most))
        row.updated = clock.now()
        row.save()
        for field in ("config", "summary"):
            if any(change.get(field) for change in changes):
                parameters.replace(run, f"{field}.", getattr(row, field))
    return row


def media_store(*, run: Run, items: Sequence[Checked]) -> list[bool]:
    """Store media; per item whether it is new or differs from the stored one.

    An item replaces the one of the same name, step and index. Raises ValueError if the run would
    have too many items or bytes.
    """
    changed = []
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).get(pk=run.pk)
        totals = MediaItem.objects.filter(run=run).aggregate(count=Count("pk"), size=Sum("bytes"))
        images = MediaBlob.objects.filter(run=run).aggregate(size=Sum("bytes"))
        count, size = totals["count"], (totals["size"] or 0) + (images["size"] or 0)
        for item in items:
            place: dict[str, Any] = {
                "run": run,
                "name": item.name,
                "step": item.step,
                "index": item.index,
            }
            rows = MediaItem.objects.filter(**place).only("pk", "digest", "bytes", "blob")
            stored = rows.first()
            if stored is not None and stored.digest == item.digest:
                changed.append(False)
                continue
            blob, is_new = _blob(run, item)
            count += stored is None
            size += item.bytes - (stored.bytes if stored is not None else 0)
            size += len(item.data) if is_new else 0
            if count > MOST_ITEMS:
                raise ValueError(f"a run has at most {MOST_ITEMS:,} media items; log fewer steps")
            if size > MOST_BYTES:
                raise ValueError(f"the media of a run have at most {MOST_BYTES / 1e9:g} GB")
            values: dict[str, Any] = {
                "kind": item.kind,
                "caption": item.caption,
                "time": item.time,
                "digest": item.digest,
                "body": item.body,
                "bytes": item.bytes,
                "blob": blob,
            }
            MediaItem.objects.update_or_create(**place, defaults=values)
            if stored is not None and stored.blob_id is not None:
                unused = MediaBlob.objects.filter(pk=stored.blob_id, items=None)
                size -= unused.aggregate(size=Sum("bytes"))["size"] or 0
                unused.delete()
            changed.append(True)
    return changed


def _blob(run: Run, item: Checked) -> tuple[MediaBlob | None, bool]:
    """The blob of an image, and whether it is new."""
    if item.image is None:
        return None, False
    return MediaBlob.objects.get_or_create(
        run=run,
        digest=item.digest,
        defaults={
            "content_type": item.image.content_type,
            "width": item.image.width,
            "height": item.image.height,
            "bytes": len(item.data),
            "data": item.data,
        },
    )
