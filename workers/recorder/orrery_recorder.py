"""Records any training program in Orrery: `init`, `run.log`, `run.event`, `run.finish`.

Nothing here raises into the training loop. Each logged line goes to a spool on disk first; a
background thread sends it, and continues after an outage or a crash. One file of the standard
library without other project imports, so that it can be copied next to any program.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import email.utils
import gzip
import importlib
import json
import logging
import math
import os
import random
import re
import shutil
import sys
import threading
import time as clock
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows; there, do not give two processes one spool
    fcntl = None  # type: ignore[assignment]

__version__ = "0.1.0"
__all__ = ["Run", "init"]

MAX_ITEMS = 10_000  # per request, the server's limit
MAX_BYTES = 4 << 20  # per request before compression
COMPACT_BYTES = 32 << 20  # a longer spool file is truncated once all is sent
LONGEST_NAME = 160  # characters of a run's name, the server's limit
INTERVAL_S = 0.25
TIMEOUT_S = 15.0
LONGEST_WAIT_S = 60.0

_log = logging.getLogger("orrery_recorder")
# REST path → key of its list
_STREAMS = {
    "details": "details",
    "points": "points",
    "events": "events",
    "logs": "lines",
    "media": "media",
}
# items per request; servers before 0.3 do not know these streams, and what is sent is dropped
_OPTIONAL = {"details": 1000, "media": 100}


def init(
    url: str | None = None,
    token: str | None = None,
    name: str = "",
    spec: Mapping[str, Any] | None = None,
    *,
    experiment: str | None = None,
    key: str | None = None,
    rank: int | None = None,
    spool: str | os.PathLike[str] | None = None,
    max_spool_bytes: int = 2 << 30,
    config: Mapping[str, Any] | None = None,
    capture: bool | None = None,
    system_s: float | None = None,
) -> Run:
    """Start recording a run; returns at once, a background thread sends.

    `url` and `token` default to ORRERY_URL and ORRERY_TOKEN. `spec` is sent as the run's RunSpec of
    kind external. `spool` is a directory for unsent lines; one with an unfinished run continues it.
    By default a new one is created under ORRERY_SPOOL (default ~/.cache/orrery/spool). Only rank 0
    records, unless all ranks get the same `key`, new for every run: then they share one run. Inside
    a program that Orrery launched (ORRERY_RUN_DIR is set) lines go to its run directory, and no
    arguments are needed.

    `config` is recorded as by `Run.config`. `capture` records the command, git commit, diff and
    installed packages (default: unless ORRERY_CAPTURE is 0). Every `system_s` seconds the use of
    CPU, memory, network and GPUs is logged (default: ORRERY_SYSTEM_S, else 15; 0 for never).
    """
    rank = _parse_int(os.environ.get("RANK")) if rank is None else rank
    try:
        folder = os.environ.get("ORRERY_RUN_DIR")
        if folder:
            return Run(_Outbox(Path(folder), rank))
        if rank and key is None:
            return Run(None)
        url, token = (
            url or os.environ.get("ORRERY_URL", ""),
            token or os.environ.get("ORRERY_TOKEN", ""),
        )
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            _log.warning(
                "orrery: %r is not an http(s) address, nothing is recorded; give url or set "
                "ORRERY_URL",
                url,
            )
            return Run(None)
        metadata: dict[str, Any] = {
            "url": url.rstrip("/"),
            "name": name or Path(sys.argv[0]).stem or "run",
            "experiment": experiment,
            "spec": {"kind": "external", **(spec or {})},
            "key": key or uuid.uuid4().hex,
            "rank": rank,
        }
        if capture is None:
            capture = os.environ.get("ORRERY_CAPTURE", "1") != "0"
        run = Run(
            _Spool(
                _spool_folder(spool, metadata["name"]),
                metadata,
                token,
                max_spool_bytes,
                temporary=spool is None,
                capture=capture and not rank,
            )
        )
        if config:
            run.config(config)
        run._sample_every(_period(system_s))
        return run
    except Exception as error:
        _log.warning("orrery: nothing is recorded: %s", error)
        return Run(None)


class Run:
    """A run being recorded; only `flush` and `finish` wait, for a bounded time."""

    def __init__(self, sink: _Outbox | _Spool | None) -> None:
        self._sink, self._storage, self._pid = sink, sink, os.getpid()
        self._step, self._tokens, self._warned, self._failure = 0, 0, set[tuple[str, type]](), ""
        self._templates: dict[tuple[str, ...], str] = {}
        self._ended, self._sampling = threading.Event(), threading.RLock()
        if isinstance(sink, _Spool):
            atexit.register(self._at_exit)
            self._hook, sys.excepthook = sys.excepthook, self._uncaught

    @property
    def id(self) -> str | None:
        """The run's id, None until the server assigned one."""
        return self._storage.run if self._storage else None

    @property
    def spool(self) -> Path | None:
        """The folder of unsent lines."""
        return self._storage.folder if self._storage else None

    @property
    def appended(self) -> dict[str, int]:
        """How many lines were recorded per stream, also by earlier processes with this spool."""
        return self._storage.appended if self._storage else {}

    @contextlib.contextmanager
    def without_samples(self) -> Iterator[None]:
        """Log no samples of the machine's use in the meantime."""
        with self._sampling:
            yield

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        tokens: int | None = None,
        *,
        time: float | None = None,
    ) -> None:
        """Log numbers (anything `float()` accepts) of one step; `step` defaults to the last one +
        1,
        `tokens` is cumulative.
        """
        sink = self._sink
        if sink is None or os.getpid() != self._pid:
            return
        try:
            self._step = step = self._step + 1 if step is None else int(step)
            if tokens is not None:
                self._tokens = int(tokens)
            now = clock.time() if time is None else time
            body = self._encode(values)
            sink.append(
                "points", f'"step":{step},"tokens":{self._tokens},"time":{now!r},"values":{body}'
            )
        except Exception as error:
            self._warn("log", error)

    def event(
        self, type: str, data: Mapping[str, Any] | None = None, *, time: float | None = None
    ) -> None:
        """Record an event; `data` is JSON."""
        self._append("events", time, {"type": type, "data": data or {}})

    def line(self, text: str, *, time: float | None = None) -> None:
        """Record a line of the run's log; printed in a program that Orrery launched."""
        self._append("logs", time, {"text": str(text)})

    def config(self, values: Mapping[str, Any]) -> None:
        """Add to the run's configuration; nested dictionaries are merged, None removes a name."""
        self._append("details", None, {"config": dict(values)})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Add to the run's summary, such as its best score; merged like the configuration."""
        self._append("details", None, {"summary": dict(values)})

    def image(
        self, name: str, data: Any, step: int | None = None, *, index: int = 0, caption: str = ""
    ) -> None:
        """Log an image: a PNG or JPEG file (bytes or path), a Pillow image, figure or array."""
        self._media(name, "image", "image", (data,), step, index, caption)

    def histogram(
        self, name: str, values: Any, step: int | None = None, *, bins: int = 64, caption: str = ""
    ) -> None:
        """Log the distribution of numbers."""
        self._media(name, "histogram", "histogram", (values, bins), step, 0, caption)

    def text(
        self, name: str, text: str, step: int | None = None, *, index: int = 0, caption: str = ""
    ) -> None:
        """Log a text, such as a sample."""
        self._media(name, "text", "", (str(text),), step, index, caption)

    def table(
        self, name: str, columns: Any, rows: Any, step: int | None = None, *, caption: str = ""
    ) -> None:
        """Log a table: names of columns, and rows of as many cells."""
        self._media(name, "table", "table", (columns, rows), step, 0, caption)

    def _media(
        self,
        name: str,
        kind: str,
        convert: str,
        data: tuple[Any, ...],
        step: int | None,
        index: int,
        caption: str,
    ) -> None:
        if self._sink is None or os.getpid() != self._pid:
            return
        try:
            value = getattr(_companion("media"), convert)(*data) if convert else data[0]
            fields = {"name": str(name), "kind": kind, "step": self._step if step is None else step}
            self._append(
                "media", None, {**fields, "index": index, "caption": str(caption), "data": value}
            )
        except Exception as error:
            self._warn(f"{kind} {name}", error)

    def _sample_every(self, period_s: float) -> None:
        """Log the machine's use in a thread, on the step of that moment."""
        if period_s <= 0 or not isinstance(self._sink, _Spool):
            return
        sampler = _companion("system").Sampler()

        def work() -> None:
            while not self._ended.wait(period_s):
                values = sampler.sample()
                with self._sampling:
                    self.log(values, step=self._step)

        threading.Thread(target=work, name="orrery-system", daemon=True).start()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the server has everything; False if it has not after `timeout_s`."""
        try:
            return self._sink is None or os.getpid() != self._pid or self._sink.flush(timeout_s)
        except Exception as error:
            self._warn("flush", error)
            return False

    def finish(
        self, status: str = "finished", reason: str = "", *, timeout_s: float = 10.0
    ) -> bool:
        """Finish the run and send what is pending; False if lines stay in the spool (see `main`).

        `status`: finished | failed | cancelled.
        """
        known = status if status in ("finished", "failed", "cancelled") else "failed"
        return self._close({"status": known, "reason": str(reason)[:1000]}, timeout_s)

    def detach(self, *, timeout_s: float = 10.0) -> bool:
        """Stop recording, but leave the run open: a process with the same spool continues it.

        False if lines stay in the spool.
        """
        return self._close(None, timeout_s)

    def _close(self, end: dict[str, str] | None, timeout_s: float) -> bool:
        sink = self._sink
        if sink is None or os.getpid() != self._pid:
            return True
        self._ended.set()
        with self._sampling:  # a sample that is being written arrives before the end
            self._sink = None
        try:
            if isinstance(sink, _Spool):
                atexit.unregister(self._at_exit)
                if sys.excepthook == self._uncaught:
                    sys.excepthook = self._hook
            return sink.close(end, timeout_s)
        except Exception as error:
            self._warn("finish", error)
            return False

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self.finish("failed" if kind else "finished", f"{kind.__name__}: {error}" if kind else "")

    def _encode(self, values: Mapping[str, Any]) -> str:
        """The values as JSON, by a cached template: twice as fast as `json.dumps`."""
        try:
            numbers = [float(value) for value in values.values()]
            total = sum(numbers)
        except (TypeError, ValueError, RuntimeError):
            return json.dumps(self._numbers(values))
        if total - total != 0:  # a value is not finite
            return json.dumps(self._numbers(values))
        names = tuple(values)
        template = self._templates.get(names)
        if template is None:
            if len(self._templates) > 1000:
                self._templates.clear()
            fields = [json.dumps(str(name)).replace("%", "%%") + ":%r" for name in names]
            template = self._templates[names] = "{" + ",".join(fields) + "}"
        return template % tuple(numbers)

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, float | str]:
        numbers: dict[str, float | str] = {}
        for name, value in values.items():
            try:
                numbers[str(name)] = _json_safe(float(value))
            except (TypeError, ValueError, RuntimeError) as error:
                self._warn(f"value {name}", error)
        return numbers

    def _append(self, stream: str, time: float | None, fields: dict[str, Any]) -> None:
        if self._sink is None or os.getpid() != self._pid:
            return
        try:
            now = clock.time() if time is None else float(time)
            self._sink.append(
                stream, json.dumps(_json_safe({"time": now, **fields}), default=str)[1:-1]
            )
        except Exception as error:
            self._warn(stream, error)

    def _warn(self, about: str, error: Exception) -> None:
        """Warn once per kind of failure: a loop may have a million steps."""
        if (about, type(error)) not in self._warned:
            self._warned.add((about, type(error)))
            _log.warning("orrery: %s is not recorded: %s: %s", about, type(error).__name__, error)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self._failure = f"{kind.__name__}: {error}"[:500]
        self._hook(kind, error, trace)

    def _at_exit(self) -> None:
        self.finish("failed" if self._failure else "finished", self._failure, timeout_s=5.0)


class _File:
    """An append-only file of JSON lines, each numbered by `seq`, and the offset sent so far."""

    def __init__(self, path: Path, head: str, max_bytes: int) -> None:
        self._path, self._sent_path = path, path.with_suffix(".sent")
        self._head, self._max_bytes = head, max_bytes
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered: a line is one write and survives this process
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.size = 0
        self.offset, self.seq = self._sent()
        last = self._repair()
        self.seq = max(self.seq, last)

    def append(self, fields: str) -> None:
        with self._lock:
            line = f'{{{self._head}"seq":{self.seq + 1},{fields}}}\n'.encode()
            if self.size + len(line) > self._max_bytes:
                raise OSError(
                    f"the spool {self._path} is full ({self._max_bytes} bytes), lines are dropped"
                )
            written = self._file.write(line)
            if written != len(line):  # the disk is full: remove the torn line
                os.ftruncate(self._file.fileno(), self.size)
                raise OSError(f"no space left for {self._path}")
            self.size += written
            self.seq += 1

    @property
    def pending(self) -> bool:
        return self.size > self.offset

    def read(self, max_lines: int) -> list[bytes]:
        """The next lines to send, without their newlines."""
        with open(self._path, "rb") as file:
            file.seek(self.offset)
            chunk = file.read(min(MAX_BYTES, self.size - self.offset))
            if b"\n" not in chunk:
                chunk += file.readline()
        return chunk[: chunk.rfind(b"\n") + 1].split(b"\n")[:-1][:max_lines]

    def sent(self, lines: list[bytes]) -> None:
        with self._lock:
            self.offset += sum(len(line) + 1 for line in lines)
            if self.offset >= self.size > COMPACT_BYTES:
                os.ftruncate(self._file.fileno(), 0)
                self.offset = self.size = 0
            _write_atomically(self._sent_path, {"offset": self.offset, "seq": self.seq})

    def close(self) -> None:
        self._file.close()

    def _sent(self) -> tuple[int, int]:
        try:
            data = json.loads(self._sent_path.read_text())
            return int(data["offset"]), int(data["seq"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0

    def _repair(self) -> int:
        """Truncate a line torn by a crash; returns the last number in the file."""
        size, last = self._path.stat().st_size, 0
        with open(self._path, "rb") as file:
            file.seek(max(0, size - MAX_BYTES))
            lines = file.read().splitlines(keepends=True)
        complete = size
        while lines and not last:
            try:
                last = int(json.loads(lines[-1])["seq"]) if lines[-1].endswith(b"\n") else 0
            except (ValueError, KeyError, TypeError):
                last = 0
            complete -= 0 if last else len(lines.pop())
        if complete < size:
            os.ftruncate(self._file.fileno(), complete)
        self.size = complete
        self.offset = self.offset if self.offset <= complete else 0
        return last


class _Outbox:
    """The outbox of a rank that Orrery launched; its supervisor reads the lines."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.run: str | None = os.environ.get("ORRERY_RUN", "")
        attempt = _parse_int(os.environ.get("ORRERY_ATTEMPT")) or 1
        self.folder = folder / f"rank-{rank}"
        head = f'"run":{json.dumps(self.run)},"attempt":{attempt},"rank":{rank},'
        self._files = {
            name: _File(self.folder / f"{name}.jsonl", head, 1 << 50)
            for name in ("points", "events")
        }

    @property
    def appended(self) -> dict[str, int]:
        return {name: file.seq for name, file in self._files.items()}

    def append(self, stream: str, fields: str) -> None:
        if stream == "logs":
            print(json.loads(f"{{{fields}}}")["text"], flush=True)
        elif stream in _OPTIONAL:
            raise OSError("a program that Orrery started records points, events and lines only")
        else:
            self._files[stream].append(fields)

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, end: dict[str, str] | None, timeout_s: float) -> bool:
        for file in self._files.values():
            file.close()
        return True


class _Later(Exception):
    """The server is unreachable or busy; `wait_s` is its Retry-After, or None."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _Refused(Exception):
    """The server rejects this request; retrying does not help. `fields` are those it names."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class _Gone(Exception):
    """The run was deleted, belongs to another user or has finished: it accepts nothing."""


class _Spool:
    """The lines of one rank on disk, and the thread that sends them to the server."""

    def __init__(
        self,
        folder: Path,
        metadata: dict[str, Any],
        token: str,
        max_bytes: int,
        *,
        temporary: bool = False,
        capture: bool = False,
    ) -> None:
        """`temporary`: the folder was created for this run and is removed once all is sent.

        `capture`: the sending thread first records where the program comes from.
        """
        self._capture = capture
        self.folder, self._token, self._temporary = folder, token, temporary
        self._limit, self._over, self._warned = MAX_ITEMS, "", set[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(folder / "lock", "w")  # noqa: SIM115  held for the life of the process
        if fcntl:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise RuntimeError(
                    f"the spool {folder} is in use by another process; give each its own"
                ) from None
        self._meta_path = folder / "run.json"
        self._meta, self._meta_lock = _read_object(self._meta_path), threading.Lock()
        self._previous: _Spool | None = None
        if metadata.get("key") and (not self._meta or "end" in self._meta):
            self._previous = self._set_aside(max_bytes)
            self._meta = {}
            self._update(**metadata)
        self.url: str = metadata.get("url") or self._meta["url"]
        head = f'"rank":{int(self._meta["rank"])},'
        self._files = {name: _File(folder / f"{name}.jsonl", head, max_bytes) for name in _STREAMS}
        self._open = urllib.request.build_opener(*_proxies(self.url)).open
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="orrery-recorder", daemon=True)
        self._thread.start()

    @property
    def run(self) -> str | None:
        return self._meta.get("run")

    @property
    def appended(self) -> dict[str, int]:
        return {name: file.seq for name, file in self._files.items()}

    def append(self, stream: str, fields: str) -> None:
        self._files[stream].append(fields)

    def _update(self, **more: Any) -> None:
        """Update the run's metadata on disk; called by the program's thread and the sender's."""
        with self._meta_lock:
            self._meta.update(more)
            _write_atomically(self._meta_path, self._meta)

    def _set_aside(self, max_bytes: int) -> _Spool | None:
        """Clear the folder for a new run; a finished one with unsent lines moves to a subfolder and
        is sent from there.
        """
        files = [path for path in self.folder.iterdir() if path.suffix]
        if "end" not in self._meta or self._meta.get("done"):
            for path in files:
                path.unlink()
            return None
        subfolder = self.folder / f"unsent-{self._meta['key'][:12]}"
        subfolder.mkdir()
        for path in files:
            path.rename(subfolder / path.name)
        return _Spool(subfolder, {}, self._token, max_bytes)

    @property
    def _settled(self) -> bool:
        ended = "end" not in self._meta or bool(self._meta.get("done"))
        return (
            bool(self.run)
            and ended
            and not self._capture
            and not any(file.pending for file in self._files.values())
        )

    def flush(self, timeout_s: float) -> bool:
        deadline = clock.monotonic() + timeout_s
        while not self._settled:
            if self._over or clock.monotonic() >= deadline or not self._thread.is_alive():
                return False
            self._wake.set()
            clock.sleep(0.01)
        return True

    def close(self, end: dict[str, str] | None, timeout_s: float) -> bool:
        if end is not None:
            self._update(end=end)
        deadline = clock.monotonic() + timeout_s
        complete = self.flush(timeout_s)
        if self._previous:
            self._previous.close(None, max(0.0, deadline - clock.monotonic()))
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=0.5)
        for file in self._files.values():
            file.close()
        self._lock.close()
        if complete and self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        if not complete:
            _log.warning(
                "orrery: not all was sent, the rest is in %s: send it by `python -m "
                "orrery_recorder %s`",
                self.folder,
                self.folder,
            )
        return complete

    def _capture_program(self) -> None:
        """Record command, git commit, diff and packages once per run."""
        try:
            if not self._meta.get("captured"):
                fields = json.dumps({"time": clock.time(), **_companion("capture").capture()})
                self.append("details", fields[1:-1])
                self._update(captured=True)
        except Exception as error:
            self._warn_once("capture", f"command, commit and packages are not recorded: {error}")
        self._capture = False

    def _work(self) -> None:
        failures = 0
        while not self._stop.is_set() and not self._over:
            try:
                self._deliver()
                if self._meta.get("done"):
                    return
                failures = 0
                self._wake.wait(INTERVAL_S)
            except _Later as later:
                failures += 1
                self._warn_once(
                    str(later).partition(": ")[0],
                    f"{later}; lines are kept in {self.folder} and sent later",
                )
                wait = min(LONGEST_WAIT_S, 0.25 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)
                if later.wait_s is not None:
                    # requested by the server: a flush does not shorten it
                    self._stop.wait(later.wait_s)
                else:
                    self._wake.wait(wait)
                    self._stop.wait(0.05)
            except (_Gone, _Refused) as error:
                self._over = str(error)
                self._warn_once("over", f"sending stops: {error}; lines stay in {self.folder}")
            except Exception as error:  # a bug here must not stop the recording permanently
                failures += 1
                self._warn_once(f"work {type(error).__name__}", f"{type(error).__name__}: {error}")
                self._stop.wait(min(LONGEST_WAIT_S, 2.0**failures))
            self._wake.clear()

    def _deliver(self) -> None:
        """Create the run if it is new, send everything pending, then finish it if due."""
        if not self.run:
            self._update(run=self._create_run())
        if self._capture:
            self._capture_program()
        for name, file in self._files.items():
            while file.pending and not self._stop.is_set():
                self._send(name, file)
        if (
            "end" in self._meta
            and not self._meta.get("done")
            and not any(f.pending for f in self._files.values())
        ):
            if not self._meta["rank"]:
                with contextlib.suppress(_Gone):  # it may be finished already
                    self._post(f"runs/{self.run}/finish", json.dumps(self._meta["end"]).encode())
            self._update(done=True)

    def _create_run(self) -> str:
        """Create the run and return its id.

        What the server refuses is left out and recorded in the configuration as `spec`: the fields
        that it names, or else the whole spec; the experiment only if that is refused too.
        """
        name, key = self._meta["name"], self._meta["key"]
        spec = json.loads(json.dumps(self._meta["spec"], default=str))
        body = {"name": name[:LONGEST_NAME], "spec": spec}
        if self._meta.get("experiment"):
            body["experiment"] = self._meta["experiment"]
        refused: dict[str, Any] = {}
        attempt = key
        for number in range(1, 20):
            try:
                answer = self._post("runs", json.dumps(body).encode(), key=attempt)
            except _Refused as error:
                removed = [each for each in error.fields if _remove(body, each, refused)]
                if not removed:
                    rest = {each: spec[each] for each in spec if each != "kind"}
                    if rest:
                        removed, body["spec"] = ["spec"], {"kind": "external"}
                        refused = {**refused, **rest}
                    elif body.pop("experiment", None):
                        removed = ["experiment"]
                    else:
                        raise
                spec = body["spec"]
                about = ", ".join(removed)
                self._warn_once(f"spec {about}", f"the run is recorded without {about}: {error}")
                attempt = f"{key}-{number}"
            except _Gone as error:  # another rank's request with the same key is in progress
                raise _Later(str(error)) from None
            else:
                if refused and not self._meta["rank"]:
                    details = {"time": clock.time(), "config": {"spec": _json_safe(refused)}}
                    self.append("details", json.dumps(details, default=str)[1:-1])
                return str(answer["id"])
        raise _Refused("the server refuses the run's spec")

    def _send(self, name: str, file: _File) -> None:
        lines = file.read(min(self._limit, _OPTIONAL.get(name, MAX_ITEMS)))
        body = b'{"%s":[%s]}' % (_STREAMS[name].encode(), b",".join(lines))
        try:
            answer = self._post(f"runs/{self.run}/{name}", body)
        except _Refused as error:
            if len(lines) > 1:  # bisect to the refused line and send the others
                self._limit = len(lines) // 2
                return
            self._warn_once("refused", f"a line of {name} was refused and left out: {error}")
            answer = {}
        except _Gone as error:
            if name not in _OPTIONAL:
                raise
            self._warn_once(name, f"the server does not store {name}: {error}")
            answer = {}
        file.sent(lines)
        self._limit = min(MAX_ITEMS, self._limit * 2)
        rejected = answer.get("rejected") or []
        if rejected:
            # servers of version 0.1 wrote `says`
            reason = rejected[0].get("message") or rejected[0].get("says")
            self._warn_once(
                "rejected",
                f"{len(rejected)} of {len(lines)} {name} were rejected: {reason}",
            )

    def _post(self, path: str, body: bytes, key: str | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        headers["User-Agent"] = f"orrery-recorder/{__version__}"
        if key:
            headers["Idempotency-Key"] = key
        elif len(body) > 1024:
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", body, headers, method="POST")
        try:
            with self._open(request, timeout=TIMEOUT_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _classify(error, path) from None
        except (OSError, urllib.error.URLError) as error:
            raise _Later(
                f"{self.url} cannot be reached: {getattr(error, 'reason', error)}"
            ) from None
        except Exception as error:  # http.client's own, on a broken answer
            raise _Later(f"{self.url} sent a broken response: {type(error).__name__}") from None
        try:
            data = json.loads(text or b"{}")
        except ValueError:
            raise _Later(f"{self.url} does not answer like Orrery; check the address") from None
        return data if isinstance(data, dict) else {}

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("orrery: %s", message)


def _remove(body: dict[str, Any], field: str, removed: dict[str, Any]) -> bool:
    """Move a field such as `train.lr` from the body's spec to `removed`; whether it was there."""
    if field == "experiment":
        return body.pop("experiment", None) is not None
    *path, last = field.removeprefix("spec.").split(".")
    place, copy = body["spec"], removed
    for name in path:
        place = place.get(name)
        if not isinstance(place, dict):
            return False
    if last not in place or (not path and last == "kind"):
        return False
    for name in path:
        copy = copy.setdefault(name, {})
    copy[last] = place.pop(last)
    return True


def _classify(error: urllib.error.HTTPError, path: str) -> Exception:
    """The exception of an HTTP status: retry later, refused, or run gone."""
    fields: tuple[str, ...] = ()
    try:
        problem = json.loads(error.read(65536))
        detail = str(problem.get("detail", ""))
        fields = tuple(str(each["field"]) for each in problem.get("errors") or ())
    except Exception:
        detail = ""
    message = f"{error.code} {detail or error.reason} ({path})"
    wait = _retry_after(error.headers.get("Retry-After"))
    if error.code in (401, 403):
        return _Later(f"the token is not accepted: {message}", LONGEST_WAIT_S)
    busy = error.code == 409 and wait is not None  # the same request is in progress
    if busy or error.code in (408, 425, 429) or error.code >= 500:
        return _Later(message, wait)
    return _Gone(message) if error.code in (404, 409, 410) else _Refused(message, fields)


def _retry_after(text: str | None) -> float | None:
    """Seconds to wait, from a number of seconds or an HTTP date; at most an hour."""
    if not text:
        return None
    try:
        wait = float(text)
    except ValueError:
        try:
            wait = email.utils.parsedate_to_datetime(text).timestamp() - clock.time()
        except (TypeError, ValueError):
            return None
    return min(3600.0, max(0.0, wait))


def _companion(name: str) -> Any:
    """The module `orrery_NAME` next to this file. Raises ImportError if it was not copied too."""
    before = f"{__package__}." if __package__ else ""
    return importlib.import_module(f"{before}orrery_{name}")


def _period(system_s: float | None) -> float:
    if system_s is not None:
        return float(system_s)
    try:
        return float(os.environ.get("ORRERY_SYSTEM_S") or 15.0)
    except ValueError:
        return 15.0


def _proxies(url: str) -> list[urllib.request.BaseHandler]:
    """No proxy for this machine itself."""
    local = urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    return [urllib.request.ProxyHandler({})] if local else []


def _spool_folder(spool: str | os.PathLike[str] | None, name: str) -> Path:
    if spool is not None:
        return Path(spool)
    root = os.environ.get("ORRERY_SPOOL") or Path.home() / ".cache" / "orrery" / "spool"
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60]
    return Path(root) / f"{slug}-{clock.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def _write_atomically(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(data, default=str))
    os.replace(temporary, path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _json_safe(data: Any) -> Any:
    """The data with non-finite numbers as strings, since JSON cannot represent them."""
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if data != data else "Infinity" if data > 0 else "-Infinity"
    if isinstance(data, dict):
        return {str(key): _json_safe(value) for key, value in data.items()}
    return [_json_safe(value) for value in data] if isinstance(data, (list, tuple)) else data


def _parse_int(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def main(arguments: list[str] | None = None) -> int:
    """Send the lines of a spool: `python -m orrery_recorder SPOOL [--url URL] [--token TOKEN]`."""
    parser = argparse.ArgumentParser(
        prog="orrery_recorder", description="Send the unsent lines of a run's spool."
    )
    parser.add_argument("spool", type=Path)
    parser.add_argument("--url", default="")
    parser.add_argument("--token", default=os.environ.get("ORRERY_TOKEN", ""))
    parser.add_argument("--timeout", type=float, default=600.0)
    args = parser.parse_args(arguments)
    if not (args.spool / "run.json").is_file():
        print(f"{args.spool} is not a spool: it has no run.json", file=sys.stderr)
        return 2
    metadata = {"url": args.url.rstrip("/")} if args.url else {}
    spools = [
        _Spool(path, metadata, args.token, 1 << 50)
        for path in (args.spool, *args.spool.glob("unsent-*"))
    ]
    return 0 if all([spool.close(None, args.timeout) for spool in spools]) else 1


if __name__ == "__main__":
    sys.exit(main())
