"""A serve run's endpoint, engine state and request summary.

Reads events and queries the run's own server. The proxy in `api.serve` forwards requests.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx
from django.conf import settings
from pydantic import ValidationError

from orchestrator.common.checked_files import open_resolved, resolved_below
from orchestrator.common.units import is_id
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.runs.outputs.newest_events import newest_readable
from orchestrator.runs.states import ENDED
from workers.contracts.specs.api_key_hash import key_checker
from workers.contracts.wire.node_messages import RunState
from workers.contracts.wire.serving_reports import (
    DRAINING,
    ENGINE_SNAPSHOT,
    KEY_HEADER,
    OLD_ENGINE_SNAPSHOT,
    SERVED,
    SERVING,
    STATE_PATH,
    EngineSnapshot,
    EngineState,
    Serving,
    Summary,
    serve_key,
)

Phase = Literal["waiting", "loading", "serving", "draining", "ended"]
_TIMEOUT: Final = httpx.Timeout(2.0, connect=1.0)
_FRESH_S: Final = 0.3  # several pages share one query
_CACHED_RUNS: Final = 200  # runs
_ATTEMPTS: Final = 5  # the newest, searched for one that served
_MOST_BYTES: Final = 32 << 20  # of a state file


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """Whether and where a run serves.

    `url` and `key` reach the server, "" without one; `message` explains the phase to a caller.
    """

    phase: Phase
    message: str
    serving: Serving | None = None
    url: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that authorize a call of the server."""
        return {KEY_HEADER: self.key}


def status(*, run: Run) -> EndpointStatus:
    """Whether and where the run serves now, with at most two queries."""
    if run.state in ENDED:
        hint = (
            "Fix the error on its page, then clone it."
            if run.state == RunState.FAILED
            else "Clone it to serve again."
        )
        return EndpointStatus("ended", f"Run {run.pk} is {run.state} and no longer serves. {hint}")
    if run.state in (RunState.QUEUED, RunState.PAUSED, RunState.STARTING):
        why = (
            f": {run.wait_reason.rstrip('.')}"
            if run.wait_reason and run.state == RunState.QUEUED
            else ""
        )
        return EndpointStatus(
            "waiting",
            f"Run {run.pk} is {run.state}{why}. Try again when its page shows that it serves.",
        )
    attempt = Attempt.objects.filter(run=run, number=run.attempt_number).first()
    events = list(
        RunEvent.objects.filter(
            run=run, attempt=run.attempt_number, type__in=(SERVING, DRAINING)
        ).order_by("seq")
    )
    serving = next((item for item in map(_read, reversed(events)) if item is not None), None)
    if attempt is None or serving is None:
        return EndpointStatus(
            "loading", f"Run {run.pk} is loading its model. Try again in a few seconds."
        )
    url = f"http://{_bracketed(_host(attempt))}:{serving.port}"
    key = serve_key(str(attempt.fence))
    if run.state == RunState.STOPPING or events[-1].type == DRAINING:
        message = (
            f"Run {run.pk} is stopping: it finishes running requests and accepts no new ones. "
            "Use another run."
        )
        return EndpointStatus("draining", message, serving, url, key)
    return EndpointStatus("serving", f"Run {run.pk} serves {serving.model}.", serving, url, key)


def run_by_key(*, id: int, key: str) -> Run | None:
    """The serve run with this id if the key is its own `api_key`, which allows calling it."""
    run = Run.objects.filter(pk=id, kind="serve").first() if is_id(id) else None
    own = ((run.spec or {}).get("serve") or {}).get("api_key") if run is not None else None
    if run is None or not isinstance(own, str) or not own:
        return None
    with _lock:
        check = _checkers.setdefault(own, key_checker(own))
        while len(_checkers) > _CACHED_RUNS:
            _checkers.popitem(last=False)
    return run if check(key) else None


def engine_state(*, run: Run) -> EngineState | None:
    """The engine's current state; None without a server, or if it does not answer within 2 s."""
    endpoint = status(run=run)
    if not endpoint.url:
        return None
    with _lock:
        cell = _cells.setdefault(endpoint.url + endpoint.key, _Cell())
        _cells.move_to_end(endpoint.url + endpoint.key)
        while len(_cells) > _CACHED_RUNS:
            _cells.popitem(last=False)
    with cell.lock:
        if time.monotonic() - cell.at > _FRESH_S:
            cell.state, cell.at = _fetch_state(endpoint), time.monotonic()
        return cell.state


def summary_of(*, run: Run) -> Summary | None:
    """The request summary of the newest attempt that ended; None before."""
    return summaries_of(run_ids=[run.pk]).get(run.pk)


def summaries_of(*, run_ids: Collection[int]) -> dict[int, Summary]:
    """`{run: request summary of the newest attempt that ended}`, without the others; one query."""
    return newest_readable(run_ids=run_ids, type=SERVED, read=Summary.from_dict)


def last_snapshot(*, run: Run) -> EngineSnapshot | None:
    """The engine's last snapshot in the newest attempt with requests, else in the newest.

    From the file that its server wrote, if it is on this machine, else from its final event; None
    if there is neither.
    """
    folder = Path(settings.ENV.media_runs) / str(run.pk)
    snapshots: list[EngineSnapshot] = []
    for number in range(run.attempt_number, max(0, run.attempt_number - _ATTEMPTS), -1):
        try:
            text = _snapshot_text(folder, folder / f"attempt-{number}" / "rank-0")
            snapshots.append(EngineSnapshot.model_validate_json(text))
        except (OSError, ValidationError):
            continue
        if snapshots[-1].state.requests:
            return snapshots[-1]
    summary = summary_of(run=run)
    return snapshots[0] if snapshots else summary.snapshot if summary is not None else None


def _snapshot_text(run_folder: Path, folder: Path) -> bytes:
    path = folder / ENGINE_SNAPSHOT
    # version 0.1 wrote `stood.json`
    resolved = resolved_below(path if path.exists() else folder / OLD_ENGINE_SNAPSHOT, run_folder)
    if resolved is None:
        raise FileNotFoundError(errno.ENOENT, "a link leads out of the run's folder", str(path))
    with open_resolved(resolved) as file:
        return file.read(_MOST_BYTES)


class _Cell:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at = float("-inf")
        self.state: EngineState | None = None


_lock = threading.Lock()
_cells: OrderedDict[str, _Cell] = OrderedDict()
_checkers: OrderedDict[str, Callable[[str], bool]] = OrderedDict()


def _fetch_state(endpoint: EndpointStatus) -> EngineState | None:
    try:
        answer = httpx.get(
            endpoint.url + STATE_PATH, headers=endpoint.headers, timeout=_TIMEOUT, trust_env=False
        )
        return (
            EngineState.model_validate_json(answer.content) if answer.status_code == 200 else None
        )
    except (httpx.HTTPError, ValidationError):
        return None


def _read(event: RunEvent) -> Serving | None:
    if event.type != SERVING:
        return None
    try:
        return Serving.from_dict(event.data)
    except ValidationError:
        return None


def _host(attempt: Attempt) -> str:
    """The address of the node on which the scheduler placed rank 0.

    The reported host is not used: it comes from a file that the run's own program may write.
    """
    shares = sorted(attempt.placement, key=lambda share: share.get("node_rank", 0))
    return str(shares[0].get("address") or "127.0.0.1") if shares else "127.0.0.1"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
