"""Where a serve run answers, how its engine stands, and what became of its requests.

Reads events and asks the run's own server; forwards nothing (that is the proxy's) and knows no
markup.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import httpx
from django.conf import settings
from pydantic import AliasChoices, ValidationError

from orchestrator.common.units import is_id
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.runs.states import ENDED
from workers.contracts.base import Contract
from workers.contracts.specs.api_key_hash import checker
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
_ANYWHERE: Final = ("0.0.0.0", "::", "")
_PATIENCE: Final = httpx.Timeout(2.0, connect=1.0)
_FRESH_S: Final = 0.3  # several pages that look at one engine ask it once
_REMEMBERED: Final = 200  # runs
_ATTEMPTS: Final = 5  # the newest, looked through for one that served
_MOST_BYTES: Final = 32 << 20  # of a state that is read


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """`url` and `key` reach the server, "" where there is none; `message` is what a caller is told in
    each phase.
    """

    phase: Phase
    message: str
    serving: Serving | None = None
    url: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {KEY_HEADER: self.key}


def status(*, run: Run) -> EndpointStatus:
    """Whether and where the run serves now. At most two queries."""
    if run.state in ENDED:
        what = (
            "Put right what its page tells, then clone it."
            if run.state == RunState.FAILED
            else "Clone it to serve again."
        )
        return EndpointStatus("ended", f"Run {run.pk} is {run.state} and serves no more. {what}")
    if run.state in (RunState.QUEUED, RunState.PAUSED, RunState.STARTING):
        why = (
            f": {run.wait_reason.rstrip('.')}"
            if run.wait_reason and run.state == RunState.QUEUED
            else ""
        )
        return EndpointStatus(
            "waiting",
            f"Run {run.pk} is {run.state}{why}. Ask again once its page says that it serves.",
        )
    attempt = Attempt.objects.filter(run=run, number=run.attempt_number).first()
    told = list(
        RunEvent.objects.filter(
            run=run, attempt=run.attempt_number, type__in=(SERVING, DRAINING)
        ).order_by("seq")
    )
    found = next((each for each in map(_read, reversed(told)) if each is not None), None)
    if attempt is None or found is None:
        return EndpointStatus(
            "loading", f"Run {run.pk} is loading its model. Ask again in a few seconds."
        )
    url = f"http://{_bracketed(_host(found, attempt))}:{found.port}"
    key = serve_key(str(attempt.fence))
    if run.state == RunState.STOPPING or told[-1].type == DRAINING:
        message = (
            f"Run {run.pk} is stopping: it ends what it has begun and takes no new requests. "
            "Send them to another."
        )
        return EndpointStatus("draining", message, found, url, key)
    return EndpointStatus("serving", f"Run {run.pk} serves {found.model}.", found, url, key)


def run_by_key(*, id: int, key: str) -> Run | None:
    """The serve run with this number whose own `api_key` this is: whoever has that may call it."""
    run = Run.objects.filter(pk=id, kind="serve").first() if is_id(id) else None
    own = ((run.spec or {}).get("serve") or {}).get("api_key") if run is not None else None
    if run is None or not isinstance(own, str) or not own:
        return None
    with _lock:
        check = _checkers.setdefault(own, checker(own))
        while len(_checkers) > _REMEMBERED:
            _checkers.popitem(last=False)
    return run if check(key) else None


def engine_state(*, run: Run) -> EngineState | None:
    """Of the engine just now; None where there is no server, or it does not answer within two
    seconds.
    """
    found = status(run=run)
    if not found.url:
        return None
    with _lock:
        cell = _cells.setdefault(found.url + found.key, _Cell())
        _cells.move_to_end(found.url + found.key)
        while len(_cells) > _REMEMBERED:
            _cells.popitem(last=False)
    with cell.lock:
        if time.monotonic() - cell.at > _FRESH_S:
            cell.state, cell.at = _ask(found), time.monotonic()
        return cell.state


def summary_of(*, run: Run) -> Summary | None:
    """What the run told at its end, the newest attempt's; None before."""
    for event in RunEvent.objects.filter(run=run, type=SERVED).order_by("-seq")[:4]:
        try:
            return Summary.from_dict(known(event.data, Summary))
        except ValidationError:
            continue
    return None


def last_snapshot(*, run: Run) -> EngineSnapshot | None:
    """How the engine stood at last, in the newest attempt that was asked for something, else in the
    newest: as its
    server wrote it down, where that file is on this machine, else as it told at its end. None where
    neither is known.
    """
    folder = Path(settings.ENV.media_runs) / str(run.pk)
    found: list[EngineSnapshot] = []
    for number in range(run.attempt_number, max(0, run.attempt_number - _ATTEMPTS), -1):
        try:
            text = _snapshot_text(folder / f"attempt-{number}" / "rank-0")
            found.append(EngineSnapshot.model_validate_json(text[:_MOST_BYTES]))
        except (OSError, ValidationError):
            continue
        if found[-1].state.requests:
            return found[-1]
    summary = summary_of(run=run)
    return found[0] if found else summary.snapshot if summary is not None else None


def known(data: Mapping[str, Any], contract: type[Contract]) -> dict[str, Any]:
    """The entries that the contract has fields for; an event may have more."""
    names = set(contract.model_fields)
    for field in contract.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(choice) for choice in field.validation_alias.choices}
    return {name: value for name, value in data.items() if name in names}


def _snapshot_text(folder: Path) -> bytes:
    path = folder / ENGINE_SNAPSHOT
    # version 0.1 wrote `stood.json`
    return (path if path.exists() else folder / OLD_ENGINE_SNAPSHOT).read_bytes()


class _Cell:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at = float("-inf")
        self.state: EngineState | None = None


_lock = threading.Lock()
_cells: OrderedDict[str, _Cell] = OrderedDict()
_checkers: OrderedDict[str, Callable[[str], bool]] = OrderedDict()


def _ask(found: EndpointStatus) -> EngineState | None:
    try:
        answer = httpx.get(
            found.url + STATE_PATH, headers=found.headers, timeout=_PATIENCE, trust_env=False
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
        return Serving.from_dict(known(event.data, Serving))
    except ValidationError:
        return None


def _host(found: Serving, attempt: Attempt) -> str:
    """As told; the address of the node of the first rank where the server listens on all of them."""
    if found.host not in _ANYWHERE:
        return found.host
    shares = sorted(attempt.placement, key=lambda share: share.get("node_rank", 0))
    return str(shares[0].get("address") or "127.0.0.1") if shares else "127.0.0.1"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
