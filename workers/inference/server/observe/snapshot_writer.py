"""Periodically writes a snapshot of the engine state, so a page can show it after the server ends.

A killed process leaves the last snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from workers.contracts.wire.serving_reports import ENGINE_SNAPSHOT, EngineSnapshot
from workers.inference.server.http.request_handler import RequestHandler
from workers.runtime.exit_codes import write_atomically

_EVERY_S = 5.0


class SnapshotWriter:
    """`run` while the server serves; `write` at once. `last` is the newest snapshot."""

    def __init__(self, handler: RequestHandler, folder: Path) -> None:
        self.handler, self.path = handler, folder / ENGINE_SNAPSHOT
        self.last: EngineSnapshot | None = None
        self._last_step = -1

    async def run(self) -> None:
        """Write every few seconds while anything is computed, until it is cancelled."""
        while True:
            steps = self.handler.engine.engine.counts.steps
            if self.handler.forwarded or steps != self._last_step:
                self._last_step = steps
                await self.write()
            await asyncio.sleep(_EVERY_S)

    async def write(self) -> None:
        """Write a snapshot; skipped if the engine has failed or a step takes long."""
        if self.handler.engine.stopped.done():
            return
        with contextlib.suppress(TimeoutError, OSError):  # a full disk must not end a server
            self.last = EngineSnapshot(time=time.time(), state=await self.handler.state())
            await asyncio.to_thread(write_atomically, self.path, self.last.to_json() + "\n")
