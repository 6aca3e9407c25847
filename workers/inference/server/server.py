"""The server of a serve run: starts engine thread and listener, drains and reports at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx

from workers.contracts.specs.inference_support import replica_ranks
from workers.contracts.specs.model import ModelSource
from workers.contracts.wire.serving_reports import (
    DRAINING,
    REPLICA_STATS_PATH,
    SERVED,
    SERVING,
    ArtifactRef,
    Serving,
    serve_key,
)
from workers.inference.control import StopControl
from workers.inference.engine import Engine
from workers.inference.model_loading import LoadedModel
from workers.inference.server.async_engine import AsyncEngine
from workers.inference.server.http.admission import Admission
from workers.inference.server.http.listener import Listener, is_loopback
from workers.inference.server.http.request_handler import RequestHandler
from workers.inference.server.http.routes import create_app
from workers.inference.server.observe.observer import REQUESTS, EngineObserver
from workers.inference.server.observe.snapshot_writer import SnapshotWriter
from workers.inference.server.replicas.discovery import (
    connect_replica,
    create_router,
    exchange_addresses,
)
from workers.inference.server.replicas.forwarding import Upstream
from workers.inference.server.replicas.stats import ReplicaStatsCollector
from workers.inference.spec_loading import InferenceRun
from workers.metrics.recorder import Recorder
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome

_POLL_S = 0.1  # between polls of the control file
_RESERVE_S = 0.5  # of the grace period, for what follows the last token
_STATS_S = 5.0  # to wait for the statistics of other replicas, which end at the same time
_MAX_EVENT_MAP = 16_384  # blocks; a longer map is only in the snapshot file


class Server:
    """`run` serves until it is asked to end; `app` is the listener's ASGI application."""

    def __init__(
        self,
        run: InferenceRun,
        environment: Environment,
        loaded: LoadedModel,
        engine: Engine,
        observer: EngineObserver,
        recorder: Recorder,
        *,
        address: tuple[str, int],
    ) -> None:
        self.environment, self.body, self.engine = environment, run.serve, engine
        self.observer, self.recorder, self.address = observer, recorder, address
        self.replicas, self.is_first = run.plan.dp, environment.rank == 0
        body, fence, group = run.serve, environment.fence, loaded.rank_group
        self._drivers = () if group is None else (group.driver_group,)
        self.admission = Admission(
            api_key=body.api_key,
            control_key=None if fence is None else serve_key(fence),
            allow_anonymous=is_loopback(address[0]),
            capacity=body.max_seqs + body.max_waiting,
        )
        self.async_engine = AsyncEngine(engine, observer, since_s=observer.since_s)
        self.handler = RequestHandler(
            loaded, self.async_engine, self.admission, names=model_names(run, loaded)
        )
        self.app = create_app(self.handler)
        self.snapshots = SnapshotWriter(self.handler, environment.rank_directory)
        if self.replicas > 1 and self.is_first:
            self.handler.replica_stats = ReplicaStatsCollector(
                environment.directory, replica_ranks(run.plan)[1:]
            )
        self._first: Upstream | None = None  # the first replica, on the others

    async def run(self, control: StopControl, listener: Listener) -> Outcome:
        """Serve; raises the error that ended the engine."""
        self.async_engine.start()
        await listener.begin()
        if self.replicas > 1:
            await self._connect_replicas()
        if self.is_first:
            self._report_serving()
        snapshots = asyncio.create_task(self.snapshots.run()) if self.is_first else None
        try:
            while control.action is None and not self.async_engine.stopped.done():
                await asyncio.sleep(_POLL_S)
            if snapshots is not None:
                snapshots.cancel()  # the last snapshot is that at the start of draining
            return await self._drain(control)
        finally:
            if snapshots is not None:
                snapshots.cancel()
            await self.async_engine.stop()
            if self.handler.router is not None:
                await self.handler.router.close()
            if self.is_first:
                self._report_served()
            elif self._first is not None:
                await self._send_stats(self._first)
            await listener.end()

    async def _connect_replicas(self) -> None:
        """Wait until all replicas listen; the first gets a router, the others connect to it."""
        addresses = await asyncio.to_thread(
            exchange_addresses, self.address, self.environment, *self._drivers
        )
        if self.is_first:
            self.handler.router = create_router(
                addresses,
                self.environment,
                api_key=self.body.api_key,
                block_size=self.engine.scheduler.pool.block_size,
                max_seqs=self.body.max_seqs,
                max_waiting=self.body.max_waiting,
            )
        else:
            self._first = connect_replica(addresses[0], self.environment, api_key=self.body.api_key)

    async def _drain(self, control: StopControl) -> Outcome:
        """Refuse new requests, and let those in progress finish within the grace period."""
        self.admission.draining = True
        engine = self.async_engine
        if engine.stopped.done():
            raise engine.stopped.result() or RuntimeError("the engine's thread has ended")
        if self.is_first:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.snapshots.write(), 1.0)
            self.recorder.event(DRAINING, running=engine.unfinished + self.handler.forwarded)
        while engine.streams or self.handler.forwarded:
            if time.monotonic() >= control.deadline - _RESERVE_S:
                break
            await asyncio.sleep(_POLL_S / 2)
        left = list(engine.streams)
        for stream in left:
            engine.cancel(stream)
            stream.fail(RuntimeError("the server is shutting down"))
        await asyncio.sleep(0)  # let their responses see the error
        served = self.observer.finished.count
        if (collector := self.handler.replica_stats) is not None:
            now, half_s = time.monotonic(), _RESERVE_S / 2
            await collector.wait(
                until=min(max(control.deadline - half_s, now + half_s), now + _STATS_S)
            )
            served += collector.count
        counts = f"after {served} requests" + (f", {len(left)} cut short" if left else "")
        steps = self.engine.counts.steps
        if control.action == "stop":
            return Outcome("ok", f"stopped on request {counts}", steps)
        return Outcome("preempted", f"preempted {counts}", steps)

    def _report_serving(self) -> None:
        host, port = self.address
        serving = Serving(
            host=host,
            port=port,
            model=self.handler.names[0],
            context=self.handler.context,
            chat=self.handler.supports_chat,
            pooling=self.handler.scores,
            block_size=self.engine.scheduler.pool.block_size,
            blocks=self.engine.scheduler.pool.blocks * self.replicas,
        )
        self.recorder.event(SERVING, **serving.to_dict())
        print(
            f"serving {serving.model} on http://{host}:{port}/v1, context {serving.context}",
            flush=True,
        )

    async def _send_stats(self, first: Upstream) -> None:
        stats = self.observer.finished.replica_stats(
            rank=self.environment.rank, seconds=time.perf_counter() - self.observer.since_s
        )
        with contextlib.suppress(httpx.HTTPError):  # the first replica may have ended
            await first.post_json(REPLICA_STATS_PATH, stats.to_dict())
        await first.close()

    def _report_served(self) -> None:
        finished, since_s = self.observer.finished, self.observer.since_s
        collector = self.handler.replica_stats
        silent = 0 if collector is None else collector.add_to(finished, since_s=since_s)
        update: dict[str, Any] = {"silent": silent}
        last = self.snapshots.last
        if last is not None and len(last.state.map) <= _MAX_EVENT_MAP:
            state = last.state.model_copy(update={"requests": []})
            update["snapshot"] = last.model_copy(update={"state": state})
        update["files"] = [
            ArtifactRef(name=path.name, path=str(path), bytes=path.stat().st_size)
            for path in (self.snapshots.path, self.environment.rank_directory / REQUESTS)
            if path.is_file()
        ]
        summary = finished.summary(seconds=time.perf_counter() - since_s)
        self.recorder.event(SERVED, **summary.model_copy(update=update).to_dict())


def model_names(run: InferenceRun, loaded: LoadedModel) -> tuple[str, ...]:
    """The model's names for clients: its short name first, then as the spec has it."""
    model: Any = run.spec.model
    if isinstance(model, ModelSource):
        source = str(model.path or model.package)
        return tuple(dict.fromkeys((Path(source).name or source, source)))
    return (model if isinstance(model, str) else loaded.spec.name,)
