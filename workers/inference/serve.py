"""A run of kind serve: a model, an engine in a thread, and a server over it until somebody asks it
to end.

Puts the parts together and takes them apart again; what a request is, `server` knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx

from workers.contracts.specs.inference_support import replica_ranks
from workers.contracts.specs.model import ModelSource
from workers.contracts.specs.run_bodies import ServeBody
from workers.contracts.wire.serving_reports import (
    DRAINING,
    REPLICA_STATS_PATH,
    SERVED,
    SERVING,
    ArtifactRef,
    Serving,
    serve_key,
)
from workers.inference.backends.serve import Backend
from workers.inference.control import StopControl
from workers.inference.cpu.threads import apart
from workers.inference.engine import Engine
from workers.inference.engine_builder import (
    BLOCK_SIZE,
    blocks_per_request,
    build_engine,
    count_available_blocks,
)
from workers.inference.model_loading import (
    LoadedModel,
    load_model,
    rank_device,
    with_byte_tokenizer,
)
from workers.inference.parallel.groups import driving, join
from workers.inference.parallel.worker import Worker
from workers.inference.scheduling.policy import Limits
from workers.inference.server.async_engine import Pump
from workers.inference.server.http.admission import Gate
from workers.inference.server.http.listener import Listener, bind, is_loopback
from workers.inference.server.http.request_handler import Desk
from workers.inference.server.http.routes import make_app
from workers.inference.server.observe.observer import REQUESTS, Witness
from workers.inference.server.observe.snapshot_writer import Keeper
from workers.inference.server.replicas.discovery import fleet_of, meet, relay_to
from workers.inference.server.replicas.forwarding import Relay
from workers.inference.server.replicas.stats import Others
from workers.inference.spec_loading import InferenceRun
from workers.inference.speculate.setup import Drafting, drafting_of
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, last_attempt
from workers.runtime.environment import Environment, check_world
from workers.runtime.exits import Outcome, UserError

_LOOK_S = 0.1  # between looks at what is asked
_LEAST_S = 0.5  # of the grace, kept for what comes after the last token
_HEAR_S = 5.0  # for what other replicas tell of themselves, which end at the same time
_MAP_TOLD = 16_384  # blocks of a map that goes into an event; a longer one is in the file alone


def run_serve(
    run: InferenceRun, around: Environment, *, host: str | None = None, port: int = 0
) -> Outcome:
    """Until a stop (ok), a preemption, or an error of the engine, which is raised. Raises
    UserError, OSError too.
    A rank that leads no replica computes for the one that leads its."""
    check_world(run.plan, around)
    attempt = around.attempt or 1 + last_attempt(around.rank_directory / "events.jsonl")
    recorder = Recorder(around.rank_directory, run=around.run, attempt=attempt, rank=around.rank)
    beacon = Beacon(around.rank_directory)
    rank_group = None
    try:
        with StopControl(around.directory, around.rank_directory) as control:
            body = run.serve
            if body.backend == "vllm":
                return asyncio.run(
                    Backend(run, around, recorder, beacon).go(
                        control, host=host or around.address, port=port
                    )
                )
            device = rank_device(around)
            rank_group = join(run.plan, around, device)
            loaded = apart(
                lambda: with_byte_tokenizer(
                    load_model(
                        run.spec.model,
                        precision=run.plan.precision,
                        device=device,
                        quantize=body.quantize,
                        rank_group=rank_group,
                        plan=run.plan,
                    ),
                    run.spec.model,
                ).with_cache_dtype(body.kv_cache_dtype)
            )
            if rank_group is not None and not rank_group.is_driver:
                return Worker(loaded, recorder, beacon).run()
            with driving(rank_group):
                drafting = apart(
                    lambda: drafting_of(
                        body, loaded, kind="serve", precision=run.plan.precision, device=device
                    )
                )
                beside = around.local_world_size
                engine = apart(
                    lambda: engine_of(loaded, body, local_world_size=beside, drafting=drafting)
                )
                witness = Witness(
                    engine, recorder, beacon, around.rank_directory, since_s=time.perf_counter()
                )
                try:
                    bound = bind(host or around.address, port)
                    server = Server(
                        run, around, loaded, engine, witness, recorder, at=bound.getsockname()[:2]
                    )
                    return asyncio.run(server.go(control, Listener(server.app, bound)))
                finally:
                    witness.close()
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()


def engine_of(
    loaded: LoadedModel,
    body: ServeBody,
    *,
    local_world_size: int = 1,
    drafting: Drafting | None = None,
) -> Engine:
    """With the blocks that are asked for, or as many as all sequences may fill and memory has room
    for.
    """
    fits, each_bytes = count_available_blocks(loaded, drafting)
    if loaded.rank_group is None and next(loaded.decoder.parameters()).device.type == "cpu":
        fits //= local_world_size
    blocks = body.kv_blocks or min(
        fits, body.max_seqs * blocks_per_request(loaded, loaded.spec.max_seq_len)
    )
    if not 0 < blocks <= fits:
        message = (
            f"{max(1, blocks)} blocks of {each_bytes:,} bytes do not fit beside the weights, "
            f"{max(0, fits)} would"
        )
        raise UserError(f"serve.kv_blocks: {message}; try fewer, or a smaller model")
    limits = Limits(step_tokens=body.max_batch_tokens, sequences=body.max_seqs)
    return build_engine(loaded, blocks=blocks, limits=limits, drafting=drafting)


class Server:
    """`go` serves; `app` is what a listener is given."""

    def __init__(
        self,
        run: InferenceRun,
        around: Environment,
        loaded: LoadedModel,
        engine: Engine,
        witness: Witness,
        recorder: Recorder,
        *,
        at: tuple[str, int],
    ) -> None:
        self.witness, self.recorder, self.engine, self.at = witness, recorder, engine, at
        self.around, self.body = around, run.serve
        body, fence = run.serve, around.fence
        self.replicas, self._leaders = (
            run.plan.dp,
            () if loaded.rank_group is None else (loaded.rank_group.driver_group,),
        )
        self.gate = Gate(
            api_key=body.api_key,
            house_key=None if fence is None else serve_key(fence),
            open=is_loopback(at[0]),
            capacity=body.max_seqs + body.max_waiting,
        )
        self.pump = Pump(engine, witness, since_s=witness.since_s)
        self.desk = Desk(loaded, self.pump, self.gate, names=names_of(run, loaded))
        self.app = make_app(self.desk)
        self.keeper = Keeper(self.desk, around.rank_directory)
        if self.replicas > 1 and around.rank == 0:
            self.desk.others = Others(around.directory, replica_ranks(run.plan)[1:])
        self._first: Relay | None = None  # where another replica tells of itself

    async def go(self, control: StopControl, listener: Listener) -> Outcome:
        self.pump.start()
        await listener.begin()
        leads = self.around.rank == 0
        if self.replicas > 1:
            await self._meet()
        if leads:
            self._tell_serving()
        keeping = asyncio.create_task(self.keeper.watch()) if leads else None
        try:
            while control.action is None and not self.pump.broke.done():
                await asyncio.sleep(_LOOK_S)
            return await self._drain(control)
        finally:
            if keeping is not None:
                keeping.cancel()
            await self.pump.stop()
            if self.desk.fleet is not None:
                await self.desk.fleet.close()
            if leads:
                self._tell_served()
            elif self._first is not None:
                await self._tell_first(self._first)
            await listener.end()

    async def _meet(self) -> None:
        """All replicas listen; the first one knows where, and the others where it does."""
        found = await asyncio.to_thread(meet, self.at, self.around, *self._leaders)
        if self.around.rank:
            self._first = relay_to(found[0], self.around, api_key=self.body.api_key)
        else:
            self.desk.fleet = fleet_of(
                found,
                self.around,
                api_key=self.body.api_key,
                block_size=BLOCK_SIZE,
                seats=self.body.max_seqs,
                waiting=self.body.max_waiting,
            )

    def _tell_serving(self) -> None:
        host, port = self.at
        told = Serving(
            host=host,
            port=port,
            model=self.desk.names[0],
            context=self.desk.context,
            chat=self.desk.chats,
            block_size=BLOCK_SIZE,
            blocks=self.engine.scheduler.pool.blocks * self.replicas,
        )
        self.recorder.event(SERVING, **told.to_dict())
        print(
            f"serving {told.model} on http://{host}:{port}/v1, context {told.context}", flush=True
        )

    async def _tell_first(self, first: Relay) -> None:
        tally = self.witness.summary.tally(
            rank=self.around.rank, seconds=time.perf_counter() - self.witness.since_s
        )
        with contextlib.suppress(httpx.HTTPError):  # it may be gone
            await first.tell(REPLICA_STATS_PATH, tally.to_dict())
        await first.close()

    def _tell_served(self) -> None:
        ended, since_s = self.witness.summary, self.witness.since_s
        silent = 0 if self.desk.others is None else self.desk.others.add_to(ended, since_s=since_s)
        summary = ended.summary(seconds=time.perf_counter() - since_s).model_copy(
            update={"silent": silent}
        )
        stood, told = self.keeper.last, [self.keeper.path, self.around.rank_directory / REQUESTS]
        if stood is not None and len(stood.state.map) <= _MAP_TOLD:
            bare = stood.state.model_copy(update={"requests": []})
            summary = summary.model_copy(update={"snapshot": stood.model_copy(update={"state": bare})})
        files = [
            ArtifactRef(name=path.name, path=str(path), bytes=path.stat().st_size)
            for path in told
            if path.is_file()
        ]
        self.recorder.event(SERVED, **summary.model_copy(update={"files": files}).to_dict())

    async def _drain(self, control: StopControl) -> Outcome:
        """What is on its way may end within the grace; nothing new comes in."""
        self.gate.draining = True
        if self.pump.broke.done():
            raise self.pump.broke.result() or RuntimeError("the engine's thread has ended")
        if self.around.rank == 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.keeper.keep(), 1.0)
            self.recorder.event(DRAINING, running=len(self.pump.tickets) + self._away)
        while (self.pump.tickets or self._away) and time.monotonic() < control.deadline - _LEAST_S:
            await asyncio.sleep(_LOOK_S / 2)
        left = list(self.pump.tickets)
        for ticket in left:
            self.pump.cancel(ticket)
            ticket.fail(RuntimeError("the server ends"))
        await asyncio.sleep(0)  # those who wait for them hear of it
        served = self.witness.summary.count
        if (others := self.desk.others) is not None:
            now, half_s = time.monotonic(), _LEAST_S / 2
            await others.heard(
                until=min(max(control.deadline - half_s, now + half_s), now + _HEAR_S)
            )
            served += others.count
        cut = f", {len(left)} cut short" if left else ""
        if control.action == "stop":
            return Outcome(
                "ok", f"stopped on request after {served} requests{cut}", self.engine.counts.steps
            )
        return Outcome(
            "preempted", f"asked to leave after {served} requests{cut}", self.engine.counts.steps
        )

    @property
    def _away(self) -> int:
        return 0 if self.desk.fleet is None else self.desk.fleet.away


def names_of(run: InferenceRun, loaded: LoadedModel) -> tuple[str, ...]:
    """What a client may call the model, the first being what it is told: its short name, and as the
    spec has it.
    """
    model: Any = run.spec.model
    if isinstance(model, ModelSource):
        given = str(model.path or model.package)
        return tuple(dict.fromkeys((Path(given).name or given, given)))
    return (model if isinstance(model, str) else loaded.spec.name,)
