"""Writes down now and then how the engines of a server stand, so that a page can show it when the
server is gone.

Knows a desk and a folder; a process that is killed leaves what was written last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from workers.contracts.wire.serving_reports import ENGINE_SNAPSHOT, EngineSnapshot
from workers.inference.server.http.request_handler import Desk
from workers.inference.server.http.routes import state_of
from workers.runtime.exits import write_atomically

_EVERY_S = 5.0


class Keeper:
    """`watch` for as long as the server serves; `keep` at once. `last` is what was written last."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk, self.path = desk, folder / ENGINE_SNAPSHOT
        self.last: EngineSnapshot | None = None
        self._seen = -1

    async def watch(self) -> None:
        """Until it is cancelled; nothing is written while nothing is computed."""
        while True:
            away = self.desk.fleet.away if self.desk.fleet is not None else 0
            steps = self.desk.pump.engine.counts.steps
            if away or steps != self._seen:
                self._seen = steps
                await self.keep()
            await asyncio.sleep(_EVERY_S)

    async def keep(self) -> None:
        """As it stands between two steps; left out where the engine is broken or a step takes long."""
        if self.desk.pump.broke.done():
            return
        with contextlib.suppress(TimeoutError, OSError):  # a full disk must not end a server
            self.last = EngineSnapshot(time=time.time(), state=await state_of(self.desk))
            await asyncio.to_thread(write_atomically, self.path, self.last.to_json() + "\n")
