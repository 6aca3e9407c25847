"""A run of kind serve: loads the model, builds the engine, serves until it is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from workers.contracts.specs.inference import DEFAULT_ADAPTER_RANK, ServeBody
from workers.inference.adapters.files import configured_rank
from workers.inference.adapters.low_rank_slots import SlotSpec
from workers.inference.backends.serve import Backend
from workers.inference.control import StopControl
from workers.inference.cpu.threads import run_in_own_thread
from workers.inference.engine import Engine
from workers.inference.engine_builder import (
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
from workers.inference.server.http.listener import Listener, bind
from workers.inference.server.observe.observer import EngineObserver
from workers.inference.server.server import Server
from workers.inference.spec_loading import InferenceRun
from workers.inference.speculate.setup import Drafting, build_drafting
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.errors import WeightsError
from workers.runtime.environment import Environment, check_world
from workers.runtime.exit_codes import Outcome, UserError


def run_serve(
    run: InferenceRun, environment: Environment, *, host: str | None = None, port: int = 0
) -> Outcome:
    """Serve until a stop (ok) or a preemption.

    A rank that is not the driver of a replica computes for its driver. Raises UserError, OSError,
    and the engine's error.
    """
    check_world(run.plan, environment)
    folder = environment.rank_directory
    attempt = environment.attempt or 1 + last_attempt(folder / "events.jsonl")
    recorder = Recorder(folder, run=environment.run, attempt=attempt, rank=environment.rank)
    beacon = Beacon(folder)
    body, precision, host = run.serve, run.plan.precision, host or environment.address
    rank_group = None
    try:
        with StopControl(environment.directory, folder) as control:
            if body.backend == "vllm":
                backend = Backend(run, environment, recorder, beacon)
                return asyncio.run(backend.go(control, host=host, port=port))
            device = rank_device(environment)
            rank_group = join(run.plan, environment, device)
            loaded = run_in_own_thread(
                lambda: with_byte_tokenizer(
                    load_model(
                        run.spec.model,
                        precision=precision,
                        device=device,
                        quantize=body.quantize,
                        rank_group=rank_group,
                        plan=run.plan,
                        scores=True,
                    ),
                    run.spec.model,
                ).with_cache_dtype(body.kv_cache_dtype)
            )
            loaded = replace(loaded, adapter_slots=slot_spec(body))
            if rank_group is not None and not rank_group.is_driver:
                return Worker(loaded, recorder, beacon).run()
            with driving(rank_group):
                drafting = run_in_own_thread(
                    lambda: build_drafting(
                        body, loaded, kind="serve", precision=precision, device=device
                    )
                )
                ranks_here = environment.local_world_size
                engine = run_in_own_thread(
                    lambda: build_serve_engine(
                        loaded, body, local_world_size=ranks_here, drafting=drafting
                    )
                )
                run_in_own_thread(lambda: load_adapters(engine, body))
                started_s = time.perf_counter()
                observer = EngineObserver(engine, recorder, beacon, folder, since_s=started_s)
                try:
                    bound = bind(host, port)
                    address = bound.getsockname()[:2]
                    server = Server(
                        run, environment, loaded, engine, observer, recorder, address=address
                    )
                    return asyncio.run(server.run(control, Listener(server.app, bound)))
                finally:
                    observer.close()
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()


def slot_spec(body: ServeBody) -> SlotSpec | None:
    """The slots that the body asks for, of the rank of its largest adapter if it sets none."""
    if not body.slots:
        return None
    rank = body.adapter_rank or DEFAULT_ADAPTER_RANK
    if body.adapter_rank is None:
        for name, path in body.adapters.items():
            with _named(name):
                rank = max(rank, configured_rank(path))
    return SlotSpec(body.slots, rank)


def load_adapters(engine: Engine, body: ServeBody) -> None:
    """Load the adapters that the body names. Raises UserError that names the wrong one."""
    store = engine.adapters
    for name, path in body.adapters.items():
        assert store is not None
        with _named(name):
            store.add(store.read(name, path))


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except WeightsError as error:
        raise UserError(f"serve.adapters.{name}: {error}") from None


def build_serve_engine(
    loaded: LoadedModel,
    body: ServeBody,
    *,
    local_world_size: int = 1,
    drafting: Drafting | None = None,
) -> Engine:
    """An engine with the requested blocks, or as many as `max_seqs` full contexts can use.

    Raises UserError if they do not fit into memory.
    """
    available, block_bytes = count_available_blocks(loaded, drafting)
    if loaded.rank_group is None and next(loaded.decoder.parameters()).device.type == "cpu":
        available //= local_world_size
    blocks = body.kv_blocks or min(
        available, body.max_seqs * blocks_per_request(loaded, loaded.spec.max_seq_len)
    )
    if not 0 < blocks <= available:
        raise UserError(
            f"serve.kv_blocks: {max(1, blocks)} blocks of {block_bytes:,} bytes do not fit into "
            f"memory next to the weights, {max(0, available)} would. Use fewer blocks, or a "
            "smaller model."
        )
    limits = Limits(step_tokens=body.max_batch_tokens, sequences=body.max_seqs)
    return build_engine(
        loaded, blocks=blocks, limits=limits, drafting=drafting, decode_graphs=body.decode_graphs
    )
