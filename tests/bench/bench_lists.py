"""p95 and size of `GET runs` and of the runs page for the owner of 100,000 runs."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.bench.record import record
from tests.bench.stack import stack

RUNS = 100_000
ROUNDS = 60
PATHS = {
    "GET runs": "/api/v1/runs",
    "GET runs, one state": "/api/v1/runs?state=failed",
    "GET runs, one tag": "/api/v1/runs?tag=t7",
    "GET runs, text": "/api/v1/runs?q=run 99",
    "GET runs, text that nothing has": "/api/v1/runs?q=nowhere",
    "GET runs/{id}": "/api/v1/runs/5000",
    "runs page": "/runs/",
    "run page": "/runs/5000/",
}


def main() -> None:
    with stack():
        measure()


def measure() -> None:
    from django.conf import settings
    from django.test import Client

    from orchestrator.accounts import services
    from tests import factories

    settings.ALLOWED_HOSTS.append("testserver")
    owner = factories.user("bench")
    fill(owner)
    _, text = services.token_create(user=owner, name="bench", by=None)
    api = Client(headers={"Authorization": f"Bearer {text}"})
    browser = Client()
    browser.force_login(owner)
    for label, path in PATHS.items():
        client = api if path.startswith("/api/") else browser
        first = client.get(path)
        assert first.status_code == 200, (path, first.status_code)
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            client.get(path)
            seconds.append(time.perf_counter() - started)
        p95 = statistics.quantiles(seconds, n=20)[-1]
        more = {"p50_ms": round(statistics.median(seconds) * 1000, 2), "runs": RUNS}
        record(
            "lists",
            what=f"{label}, p95",
            value=p95 * 1000,
            unit="ms",
            figure="<= 100",
            bytes=len(first.content),
            **more,
        )


def fill(owner: Any) -> None:
    """Writes runs in bulk as submitting does: a tenth failed, the rest finished, ten tags."""
    from django.apps import apps
    from django.db import connection

    run_model, tag_model = apps.get_model("runs", "Run"), apps.get_model("runs", "RunTag")
    spec = {"kind": "train", "model": "llama-tiny", "train": {"steps": 100, "seq_len": 128}}
    summary = {
        "step": 100,
        "steps": 100,
        "loss": 2.1,
        "tokens_per_s": 9000.0,
        "mfu": 0.4,
        "tokens": 12800,
    }
    for start in range(0, RUNS, 5000):
        rows = [
            run_model(
                name=f"run {number}",
                kind="train",
                state="failed" if number % 10 == 0 else "finished",
                spec=spec,
                model_name="llama-tiny",
                devices=1,
                owner=owner,
                attempt_number=1,
                summary=summary,
            )
            for number in range(start, start + 5000)
        ]
        runs = run_model.objects.bulk_create(rows)
        tag_model.objects.bulk_create([tag_model(run=row, name=f"t{row.pk % 10}") for row in runs])
    # what autovacuum does within a minute: without statistics PostgreSQL reads tags by a table scan
    connection.cursor().execute("ANALYZE")


if __name__ == "__main__":
    main()
