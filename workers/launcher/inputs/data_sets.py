"""Has the data sets of an attempt on this node, and gives the engine their local paths.

Files at the registered path count if they are equal; else the copy in the store is read once per
node. Starts no ranks.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from workers.contracts.specs.data import DATA_SET_PREFIX
from workers.contracts.wire.maintenance.data_sets import DataInput
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command
from workers.launcher.exits.classification import Verdict
from workers.launcher.inputs import data_cache, registered_files
from workers.launcher.inputs.data_cache import Stopped
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.rundir import RunDir
from workers.launcher.shipping.redis_link import Link
from workers.launcher.store_link import StoreLink

_HINT: Final = "Register the data set again, then its copy is written again."


class DataSets:
    """The data sets of one attempt; `provide` once, then `with_local_paths`."""

    def __init__(self, order: LaunchOrder, run_dir: RunDir, link: Link, user: RunUser | None):
        self._order, self._link = order, link
        self._top = data_cache.cache_folder(command.node_home(run_dir, order), user)
        self._local: dict[str, str] = {}  # data set → path on this node

    def provide(self, store: StoreLink, *, keep_waiting: Callable[[], bool]) -> Verdict | None:
        """Why the attempt cannot start; None if it can, or if it was stopped meanwhile."""
        try:
            for item in self._order.inputs:
                if (verdict := self._provide(item, store, keep_waiting)) is not None:
                    return verdict
        except Stopped:
            pass
        return None

    def with_local_paths(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The spec with the path of each data set on this node."""
        changed = copy.deepcopy(spec) if self._local else spec
        for item in self._order.inputs:
            for field in item.fields if item.name in self._local else ():
                _set(changed, field.split("."), item.name, self._local[item.name])
        return changed

    def _provide(
        self, item: DataInput, store: StoreLink, keep_waiting: Callable[[], bool]
    ) -> Verdict | None:
        registered = Path(item.path)
        problem = self._difference(item, registered, keep_waiting)
        if not problem:
            self._local[item.name] = item.path
            return None
        if item.key is None or self._order.store is None:
            message = (
                f"Data set {item.name} is not on node {self._link.node.node} as it was registered "
                f"({problem}), and the store has no copy. Copy it there, or configure a store "
                "(ORRERY_STORE_URL) and register it again."
            )
            return Verdict("user_error", message, time=time.time())
        folder = data_cache.copy_folder(self._top, item.fingerprint)
        place = folder if item.folder else folder / next(iter(item.files))
        with data_cache.locked(folder, keep_waiting=keep_waiting):
            started = time.monotonic()
            fetched = not folder.is_dir() or bool(self._difference(item, place, keep_waiting))
            if fetched:
                reason = self._fetch(item, folder, store, keep_waiting)
                if not keep_waiting():
                    raise Stopped
                if reason is not None:
                    message = f"Data set {item.name} cannot be read: {reason}"
                    return Verdict("infrastructure", message, time=time.time())
            data_cache.use(folder)  # until this process ends
        if fetched:
            self._remember(item, place)
            for name in data_cache.delete_unused(self._top, data_cache.keep_days()):
                print(f"data set {name} was deleted: unused", flush=True)
            data = {
                "data_set": item.name,
                "key": item.key,
                "bytes": item.bytes,
                "seconds": round(time.monotonic() - started, 3),
                "because": problem[:300],
            }
            self._link.report("event", {"type": "data_fetched", "data": data})
        self._local[item.name] = str(place)
        return None

    def _difference(self, item: DataInput, path: Path, keep_waiting: Callable[[], bool]) -> str:
        extra = registered_files.unregistered(path, item.files) if item.folder else ""
        if extra:
            return f"{path / extra} is not in the data set"
        places = registered_files.places_of(path, item.files, folder=item.folder)
        return registered_files.difference(
            places, item.files, self._remembered(item, path), keep_waiting=keep_waiting
        )

    def _fetch(
        self,
        item: DataInput,
        folder: Path,
        store: StoreLink,
        keep_waiting: Callable[[], bool],
    ) -> str | None:
        assert item.key is not None
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        free = shutil.disk_usage(self._top).free
        if item.bytes > free:
            return (
                f"node {self._link.node.node} has {free:,} bytes free in {self._top}, the data set "
                f"has {item.bytes:,}. Free space there."
            )
        return store.fetch(
            item.key, folder, keep_waiting=keep_waiting, complete=Path.is_dir, hint=_HINT
        )

    def _remember(self, item: DataInput, place: Path) -> None:
        """Its checksums were compared while it was read."""
        places = registered_files.places_of(place, item.files, folder=item.folder)
        status = {}
        for name, each in places.items():
            facts = os.stat(each)
            status[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
        registered_files.remember(self._remembered(item, place), status)

    def _remembered(self, item: DataInput, path: Path) -> Path:
        place = hashlib.sha256(str(path).encode()).hexdigest()
        return self._top / "compared" / f"{item.fingerprint[:32]}-{place[:16]}.json"


def _set(value: Any, names: list[str], label: str, path: str) -> None:
    """Replace the path at a field of a spec, such as `data.sources.0.path`, or in its text the data
    set `label`, as in `--data=dataset:chats@3`.
    """
    *parents, last = names
    for name in parents:
        value = value[int(name)] if isinstance(value, list) else value[name]
    place: Any = int(last) if isinstance(value, list) else last
    named = DATA_SET_PREFIX + label
    text = str(value[place])
    value[place] = text.removesuffix(named) + path if text.endswith(named) else path
