"""A copy of one resource's objects, kept current by a thread: list, then watch from there.

After 410 Gone it lists again, and what the list lacks counts as deleted. Removed objects are
remembered for a while, because only their last state says why they ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from orchestrator.scheduling.cluster_engines.interface import EngineUnavailable
from orchestrator.scheduling.cluster_engines.kubernetes.api import Api, ApiError, NoAnswer, refused

log = logging.getLogger(__name__)
WATCH_S = 60
_REMEMBERED = 5_000
_RETRY_S = (0.5, 1.0, 2.0, 5.0)

Object = dict[str, Any]


class ResourceExpired(Exception):
    """The resource version is too old; list again."""


class Informer:
    """Objects by uid. `trim` keeps of an object what is needed."""

    def __init__(self, api: Api, path: str, *, trim: Callable[[Object], Object], selector: str):
        self._api, self._path, self._trim = api, path, trim
        self._query = {"labelSelector": selector} if selector else {}
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._removed: OrderedDict[str, Object] = OrderedDict()
        self._error: EngineUnavailable | None = None
        self._listed = threading.Event()  # a first answer, good or bad
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)
        self._thread.start()

    def objects(self, *, wait_s: float) -> tuple[list[Object], list[Object]]:
        """`(existing, removed)`. Raises EngineUnavailable while the copy is not current."""
        if not self._listed.wait(wait_s):
            raise NoAnswer(f"Kubernetes listed no {self._path.rpartition('/')[2]} in {wait_s:g} s")
        with self._lock:
            if self._error is not None:
                raise self._error
            return list(self._objects.values()), list(self._removed.values())

    def close(self) -> None:
        """Stop the thread; `Api.end_watches` ends its stream."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        failures = 0
        version = ""
        while not self._stopping.is_set():
            try:
                if not version:
                    version = self._list()
                version = self._watch(version)
                failures = 0
                continue
            except ResourceExpired:
                version = ""
                continue
            except EngineUnavailable as error:
                self._failed(error)
            except ApiError as error:
                if error.code == 410:
                    version = ""
                    continue
                self._failed(refused(error, f"list {self._path.rpartition('/')[2]}"))
                version = ""
            except Exception as error:
                if not self._stopping.is_set():
                    log.exception("The watch of %s failed; it is repeated", self._path)
                self._failed(NoAnswer(f"the answer cannot be read: {error}"))
                version = ""
            self._stopping.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    def _list(self) -> str:
        items, version = self._api.items(self._path, **self._query)
        current = {_uid(item): self._trim(item) for item in items}
        with self._lock:
            for uid in self._objects.keys() - current.keys():
                self._remember(uid, self._objects[uid])
            self._objects = current
            self._error = None
        self._listed.set()
        return version

    def _watch(self, version: str) -> str:
        """Apply events until the stream ends; returns the newest resource version."""
        query = {**self._query, "resourceVersion": version}
        with self._api.watch(self._path, seconds=WATCH_S, **query) as events:
            with self._lock:
                self._error = None
            for event in events:
                if self._stopping.is_set():
                    return version
                version = self._apply(event) or version
        return version

    def _apply(self, event: Object) -> str:
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            if item.get("code") == 410:
                raise ResourceExpired
            raise ApiError(int(item.get("code") or 500), "", str(item.get("message", "")))
        if kind in ("ADDED", "MODIFIED"):
            with self._lock:
                self._objects[_uid(item)] = self._trim(item)
        elif kind == "DELETED":
            with self._lock:
                self._objects.pop(_uid(item), None)
                self._remember(_uid(item), self._trim(item))
        return str((item.get("metadata") or {}).get("resourceVersion", ""))

    def _remember(self, uid: str, item: Object) -> None:
        self._removed[uid] = {**item, "removed": time.time()}
        while len(self._removed) > _REMEMBERED:
            self._removed.popitem(last=False)

    def _failed(self, error: EngineUnavailable) -> None:
        with self._lock:
            self._error = error
        self._listed.set()


def _uid(item: Object) -> str:
    return str((item.get("metadata") or {}).get("uid", ""))
