"""Jobs by slurmrestd: its API version is discovered, answers of other versions are refused.

Does not depend on the database. Without an answer the engine reads the same by commands.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from orchestrator.scheduling.cluster_engines.interface import JobView
from orchestrator.scheduling.cluster_engines.slurm import parse
from orchestrator.scheduling.cluster_engines.slurm.rest_requests import LimitedClient, RequestFailed

_OLDEST, _NEWEST = (0, 0, 36), (0, 0, 43)  # versions whose jobs `views` reads
_RETRY_S: Final = 30.0
_UNKNOWN_JOB: Final = 2017
_SET_LOGIN: Final = "Set another login: manage.py engine set NAME rest_user=USER --rest-token FILE"


class RestFailed(RuntimeError):
    """slurmrestd cannot be used now; the message says why and what to do."""


class SlurmRest:
    """One slurmrestd. `problem` says why it is not used; empty while it answers."""

    def __init__(
        self,
        url: str,
        *,
        user: str | None,
        token: str | None,
        timeout_s: float,
        ca: str | None = None,
    ) -> None:
        """`ca`: a file with the authority of the server's certificate; `timeout_s`: per answer."""
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._token = token
        headers = {"Accept": "application/json", "User-Agent": "orrery"}
        if token:
            headers["X-SLURM-USER-TOKEN"] = token
        if token and user:
            headers["X-SLURM-USER-NAME"] = user
        self.url, self.problem = url, ""
        self._version: tuple[int, ...] | None = None
        self._retry_at = 0.0
        self._client = LimitedClient(
            "http://localhost" if self._socket else url,
            headers,
            timeout_s,
            socket_path=self._socket,
            ca=ca,
        )

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def jobs(self) -> list[JobView]:
        """Orrery's jobs that slurmctld remembers. Raises RestFailed."""
        return self._read("jobs")

    def job(self, number: str) -> JobView | None:
        """The job of this number if it is one of Orrery's. Raises RestFailed."""
        return next(iter(self._read(f"job/{number}")), None)

    def _read(self, path: str) -> list[JobView]:
        """The jobs in an answer. After a failure the next request is sent `_RETRY_S` later."""
        if time.monotonic() < self._retry_at:
            raise RestFailed(self.problem)
        try:
            if self._version is None:
                self._version = self._discover()
            slash = "/" if self._version >= (0, 0, 39) and path == "jobs" else ""
            listed = list(views(self._get(f"/slurm/{_text(self._version)}/{path}{slash}")))
        except RestFailed as failure:
            self._version, self.problem = None, str(failure)
            self._retry_at = time.monotonic() + _RETRY_S
            raise
        self.problem, self._retry_at = "", 0.0
        return listed

    def _discover(self) -> tuple[int, ...]:
        """The newest version that both sides know. Raises RestFailed."""
        self._require_socket()
        paths = self._get("/openapi/v3").get("paths")
        listed = re.findall(r"/slurm/v(\d+)\.(\d+)\.(\d+)/jobs", " ".join(paths or ()))
        offered = sorted({tuple(int(part) for part in version) for version in listed})
        known = [version for version in offered if _OLDEST <= version <= _NEWEST]
        if not known:
            versions = ", ".join(_text(version) for version in offered) or "no version of its jobs"
            raise RestFailed(
                f"slurmrestd at {self.url} offers {versions}; this release reads "
                f"{_text(_OLDEST)} to {_text(_NEWEST)}. Start slurmrestd with one of them "
                "(-s openapi/… or -d …), or remove `rest` from the engine's settings."
            )
        return known[-1]

    def _require_socket(self) -> None:
        """Raises RestFailed without a listening socket; httpx would leave its own end open."""
        if self._socket is None:
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self._socket)
            except OSError as error:
                raise RestFailed(f"slurmrestd at {self.url} does not answer: {error}") from None

    def _get(self, path: str) -> dict[str, Any]:
        where = f"slurmrestd at {self.url}"
        try:
            status, body = self._client.get(path)
        except RequestFailed as error:
            raise RestFailed(f"{where} does not answer: {error}") from None
        if status in (401, 403):
            ended = _expired(self._token)
            why = f"the token expired at {ended}" if ended else f"HTTP {status}"
            raise RestFailed(f"{_refused(where)}: {why}. {_SET_LOGIN}")
        if status == 404:
            raise RestFailed(f"{where} has no {path}. Check `rest` of the engine.")
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RestFailed(f"{where} answered HTTP {status} without JSON")
        errors = [one for one in answer.get("errors") or [] if isinstance(one, dict)]
        words = [_words(one) for one in errors]
        numbers = [one.get("error_number") for one in errors]
        if _UNKNOWN_JOB in numbers or any("unknown job" in text.lower() for text in words):
            return {"jobs": []}
        if errors or status >= 400:
            message = "; ".join(words)[:300] or f"HTTP {status}"
            if ended := _expired(self._token):  # slurmctld's answer does not say so
                raise RestFailed(f"{_refused(where)}: the token expired at {ended}. {_SET_LOGIN}")
            raise RestFailed(f"{where} answered: {message}")
        return answer


def views(answer: Mapping[str, Any]) -> Iterator[JobView]:
    """Orrery's jobs in an answer of any version. Raises RestFailed for an answer without jobs.

    From v0.0.40 states are lists (`["RUNNING", "COMPLETING"]`) and numbers are objects
    (`{"set": true, "infinite": false, "number": 5}`).
    """
    jobs = answer.get("jobs")
    if not isinstance(jobs, list):
        raise RestFailed("slurmrestd's answer has no jobs")
    for job in jobs:
        if not isinstance(job, dict) or not str(job.get("name")).startswith(parse.PREFIX):
            continue
        number, state = _number(job.get("job_id")), _state(job.get("job_state"))
        if number is None or not state:
            raise RestFailed(f"slurmrestd's answer has a job without number or state: {job}"[:300])
        start = _number(job.get("start_time"))
        yield parse.view(
            str(job["name"]),
            str(number),
            state,
            str(job.get("state_reason") or ""),
            str(job.get("nodes") or ""),
            datetime.fromtimestamp(start, UTC).isoformat() if start else "",
        )


def _words(error: Mapping[str, Any]) -> str:
    """What an error of an answer says."""
    parts = (str(error.get(name) or "") for name in ("description", "error"))
    return ": ".join(dict.fromkeys(part for part in parts if part)) or str(dict(error))


def _refused(where: str) -> str:
    return f"{where} refuses the login"


def _expired(token: str | None) -> str:
    """When the token expired, in UTC; empty if it has not, or does not say."""
    try:
        part = (token or "").split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        ended = datetime.fromtimestamp(float(claims["exp"]), UTC)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError):
        return ""
    return f"{ended:%Y-%m-%d %H:%M} UTC" if ended < datetime.now(UTC) else ""


def _state(value: Any) -> str:
    """One state, as squeue shows it: a job that is ending is COMPLETING."""
    if not isinstance(value, list):
        return str(value or "")
    words = [str(word) for word in value]
    later = [word for word in words if word in ("COMPLETING", "REQUEUED", "REQUEUE_HOLD")]
    return (later or words or [""])[0]


def _number(value: Any) -> int | None:
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(version: tuple[int, ...]) -> str:
    return "v" + ".".join(str(part) for part in version)
