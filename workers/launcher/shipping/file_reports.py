"""Reports the files that events of ranks name: checkpoints, profiles and results of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.contracts.wire.serving_reports import EVALUATED, QUANTIZED, SERVED
from workers.launcher.shipping.redis_link import Link
from workers.launcher.store_link import StoreLink


class FileReports:
    """Called with each event of a rank; reports its files and hands them to the store."""

    def __init__(self, link: Link, store: StoreLink) -> None:
        self._link, self._store = link, store

    def __call__(self, row: dict[str, Any]) -> None:
        """Report the files of one event, if it names any."""
        data = row.get("data")
        if not isinstance(data, dict):
            return
        for file in (
            data.get("files") or () if row.get("type") in (EVALUATED, QUANTIZED, SERVED) else ()
        ):
            self._artifact({key: file[key] for key in ("name", "path", "bytes")})
        if not data.get("path"):
            return
        if row.get("type") in ("profile_saved", "memory_profile"):
            name = f"{Path(str(data['path'])).parent.name}-{data.get('name') or row['type']}"
            self._artifact({"name": name, "path": data["path"], "bytes": data.get("bytes") or 0})
        if row.get("type") == "checkpoint_saved":
            self._link.report(
                "checkpoint",
                {key: data.get(key) or 0 for key in ("step", "tokens", "bytes", "path")},
            )
            if data.get("step") is not None:
                self._store.checkpoint(data)

    def _artifact(self, data: dict[str, Any]) -> None:
        self._link.report("artifact", data)
        self._store.artifact(data)
