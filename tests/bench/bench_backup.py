"""Backup and restore of a cluster with 10,000 runs: seconds each, and every page equal after it.

Each run has two attempts, events, a checkpoint, an artifact, a series with a chunk and log lines.
Pages and lists are compared without times that pass ("5 minutes ago") and tokens of forms.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.record import record
from tests.bench.stack import stack

RUNS = 10_000
PAGES = (
    "/",
    "/runs/",
    "/queue/",
    "/fleet/",
    "/experiments/",
    "/account/storage/",
    "/account/audit/",
)
LISTS = ("runs", "events", "experiments", "nodes", "queue", "storage/copies", "audit")
TABS = ("", "?tab=checkpoints", "?tab=config", "?tab=history", "?tab=logs", "?tab=lineage")
_PASSES = re.compile(
    rb'csrfmiddlewaretoken" value="[^"]+"|"X-CSRFToken": ?"[^"]+"|nonce="[^"]+"|nonce-[^\' ]+'
    rb"|\d+ (?:s|min|h|seconds?|minutes?) ago"
)


def main(kind: str) -> None:
    with stack(postgres=kind == "postgresql"):
        measure(kind)


def measure(kind: str) -> None:
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection

    from orchestrator.accounts.roles import Role
    from tests import factories

    settings.ALLOWED_HOSTS.append("testserver")
    owner = factories.user("bench", Role.ADMIN)
    fill(owner)
    before = pages(owner)
    folder = Path(tempfile.mkdtemp(prefix="orrery-bench-backup-"))
    file = folder / "b.tar"
    seconds = {}
    started = time.perf_counter()
    call_command("backup", str(file))
    seconds["backup"] = time.perf_counter() - started
    with connection.cursor() as cursor:  # the damage
        cursor.execute("UPDATE runs_run SET name = 'damaged', summary = '{}'")
        cursor.execute("DELETE FROM runs_runevent WHERE run_id > 100")
    assert pages(owner) != before
    started = time.perf_counter()
    call_command("restore", str(file))
    seconds["restore"] = time.perf_counter() - started
    after = pages(owner)
    different = [path for path in before if before[path] != after[path]]
    for what, value in seconds.items():
        record(
            "backup",
            what=f"{what}, {kind}",
            value=value,
            unit="s",
            figure="<= 60",
            runs=RUNS,
            mb=round(file.stat().st_size / 1e6, 1),
            pages=len(before),
            pages_different=len(different),
        )
    assert not different, different
    file.unlink()
    folder.rmdir()


def pages(owner: Any) -> dict[str, str]:
    """A digest of each page and list."""
    from django.test import Client

    from orchestrator.runs.models import Run

    client = Client()
    client.force_login(owner)
    ids = list(Run.objects.order_by("pk").values_list("pk", flat=True))
    chosen = [ids[0], ids[len(ids) // 3], ids[len(ids) // 2], ids[-1]]
    paths = [*PAGES, *(f"/api/v1/{name}?limit=200" for name in LISTS)]
    paths += [f"/runs/{id}/{tab}" for id in chosen for tab in TABS]
    paths += [f"/api/v1/runs/{id}/series?name=loss" for id in chosen]
    answers = {}
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.status_code)
        content = answer.content if not answer.streaming else b"".join(answer.streaming_content)  # type: ignore[attr-defined]
        answers[path] = hashlib.sha256(_PASSES.sub(b"", content)).hexdigest()
    return answers


def fill(owner: Any) -> None:
    """Writes runs and what belongs to them in bulk."""
    from django.apps import apps
    from django.utils import timezone

    model = lambda name: apps.get_model("runs", name)  # noqa: E731
    spec = {"kind": "train", "model": "llama-tiny", "train": {"steps": 100, "seq_len": 128}}
    summary = {"step": 100, "steps": 100, "loss": 2.1, "tokens_per_s": 9000.0, "mfu": 0.4}
    now = timezone.now() - timezone.timedelta(days=3)
    for start in range(0, RUNS, 2000):
        runs = model("Run").objects.bulk_create(
            model("Run")(
                name=f"run {number}",
                kind="train",
                state="finished",
                spec=spec,
                plan={"dp": 1},
                model_name="llama-tiny",
                devices=1,
                owner=owner,
                attempt_number=2,
                summary=summary,
                created=now,
                queued_at=now,
                started=now,
                ended=now,
                prediction={"total_bytes": 9},
            )
            for number in range(start, start + 2000)
        )
        model("Attempt").objects.bulk_create(
            model("Attempt")(
                run=run,
                number=number,
                state="exited",
                exit_class="ok",
                created=now,
                ended=now,
                placement=[{"node": "n1", "address": "10.0.0.1", "devices": [0], "node_rank": 0}],
            )
            for run in runs
            for number in (1, 2)
        )
        model("RunEvent").objects.bulk_create(
            model("RunEvent")(
                run=run,
                seq=seq,
                time=now,
                type="state_changed",
                attempt=1,
                data={"old": "queued", "new": "running", "why": "placed"},
                origin=f"1/0/{seq}",
            )
            for run in runs
            for seq in range(1, 13)
        )
        model("Checkpoint").objects.bulk_create(
            model("Checkpoint")(
                run=run,
                attempt=1,
                step=100,
                path=f"runs/{run.pk}/checkpoints/step-100",
                bytes=10**9,
                created=now,
            )
            for run in runs
        )
        model("Artifact").objects.bulk_create(
            model("Artifact")(run=run, name="a", path=f"runs/{run.pk}/a", created=now)
            for run in runs
        )
        _telemetry(runs, owner)


def _telemetry(runs: list[Any], owner: Any) -> None:
    """300 points of two metrics and 20 log lines per run, as ingest stored those of one run."""
    from django.apps import apps
    from django.utils import timezone

    from tests import factories

    pattern = factories.external_run(owner, name="pattern")
    api = factories.api(owner)
    points = [
        {"attempt": 1, "rank": 0, "seq": n, "step": n, "tokens": n, "time": 1.7e9 + n}
        | {"values": {"loss": 1 / n, "tokens_per_s": 9000.0 + n}}
        for n in range(1, 301)
    ]
    answer = api.post(f"/api/v1/runs/{pattern.pk}/points", {"points": points}, "application/json")
    assert answer.status_code < 300, answer.content
    now = timezone.now()
    values = {"state": "finished", "started": now, "ended": now, "created": now}
    type(pattern).objects.filter(pk=pattern.pk).update(**values)
    tables = {name: apps.get_model("telemetry", name) for name in ("Series", "Chunk", "LogChunk")}
    for row in list(tables["Series"].objects.filter(run=pattern)):
        chunks = list(tables["Chunk"].objects.filter(series=row))
        copies = tables["Series"].objects.bulk_create(_copy(row, run=run) for run in runs)
        tables["Chunk"].objects.bulk_create(
            _copy(chunk, series=series) for series in copies for chunk in chunks
        )
    tables["LogChunk"].objects.bulk_create(
        tables["LogChunk"](run=run, attempt=1, rank=0, first_seq=1, lines=20, text="a line\n" * 20)
        for run in runs
    )


def _copy(row: Any, **changes: Any) -> Any:
    """An unsaved row with the same values but its key and the changes."""
    own = type(row)._meta
    names = [field.attname for field in own.concrete_fields if not field.primary_key]
    values = {name: getattr(row, name) for name in names}
    return own.model(**values | {f"{name}_id": value.pk for name, value in changes.items()})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sqlite")
