"""A serve run whose engine is another program: started, waited for, relayed to, watched, and ended.

Keys, the full queue, draining, points and events are as with our own engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from contextlib import ExitStack

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from workers.contracts.wire.serving_reports import (
    DRAINING,
    SERVED,
    SERVING,
    Serving,
    Summary,
    serve_key,
)
from workers.inference.backends import vllm
from workers.inference.control import StopControl
from workers.inference.liveness import COMPUTES, IDLES
from workers.inference.server.http.admission import Gate
from workers.inference.server.http.listener import Listener, bind, is_loopback
from workers.inference.server.http.routes import error_handlers, read_body
from workers.inference.server.replicas.forwarding import Relay
from workers.inference.spec_loading import InferenceRun
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.runtime.environment import Environment
from workers.runtime.exits import Outcome

_LOOK_S, _POINT_S, _END_S = 0.1, 1.0, 10.0


class Backend:
    """`go` until somebody asks it to end.

    Raises UserError, and ChildProcessError where the program ends by itself.
    """

    def __init__(
        self, run: InferenceRun, around: Environment, recorder: Recorder, beacon: Beacon
    ) -> None:
        self.run, self.around, self.recorder, self.beacon = run, around, recorder, beacon
        self.weights = vllm.check(run)
        self.name = self.weights.name

    async def go(self, control: StopControl, *, host: str, port: int) -> Outcome:
        bound, inner = bind(host, port), _free_port()
        body, fence = self.run.serve, self.around.fence
        gate = Gate(
            api_key=body.api_key,
            house_key=None if fence is None else serve_key(fence),
            open=is_loopback(host),
            capacity=body.max_seqs + body.max_waiting,
        )
        relay = Relay(f"http://127.0.0.1:{inner}", {})
        words = vllm.command(self.run, self.weights, port=inner, name=self.name)
        child = await asyncio.create_subprocess_exec(*words)
        listener = Listener(_app(gate, relay), bound)
        began, served = time.monotonic(), _Counts()
        try:
            if not await self._is_up(relay, child, control):
                return Outcome("preempted", "asked to leave before the server was up")
            await listener.begin()
            at: tuple[str, int] = bound.getsockname()[:2]
            await self._tell_serving(relay, at)
            while control.action is None:
                _still_there(child)
                await self._point(relay, served)
                await asyncio.sleep(_LOOK_S)
            gate.draining = True
            self.recorder.event(DRAINING, running=gate.inside)
            while gate.inside and time.monotonic() < control.deadline - 0.5:
                await asyncio.sleep(_LOOK_S)
            await self._point(relay, served, last=True)
            summary = Summary(
                requests=served.requests,
                prompt_tokens=int(served.before.get("prompt_tokens_total", 0)),
                new_tokens=int(served.before.get("generation_tokens_total", 0)),
                seconds=time.monotonic() - began,
            )
            self.recorder.event(SERVED, **summary.to_dict())
            return Outcome(
                "ok" if control.action == "stop" else "preempted", "stopped on request", served.points
            )
        finally:
            await listener.end()
            await relay.close()
            await _ended(child)

    async def _is_up(self, relay: Relay, child: asyncio.subprocess.Process, control: StopControl) -> bool:
        """Loading takes as long as it takes; the launcher's patience is with a start."""
        while control.action is None:
            _still_there(child)
            with contextlib.suppress(httpx.HTTPError):
                await relay.text("/health")
                return True
            await asyncio.sleep(2 * _LOOK_S)
        return False

    async def _tell_serving(self, relay: Relay, at: tuple[str, int]) -> None:
        card = (await relay.json("/v1/models"))["data"][0]
        blocks = vllm.read_metrics(await relay.text("/metrics")).get("blocks", 1)
        told = Serving(
            host=at[0],
            port=at[1],
            model=self.name,
            context=int(card.get("max_model_len") or 1),
            chat=True,
            blocks=max(1, int(blocks)),
            backend="vllm",
        )
        self.recorder.event(SERVING, **told.to_dict())
        print(f"serving {told.model} by vllm on http://{at[0]}:{at[1]}/v1", flush=True)

    async def _point(self, relay: Relay, served: _Counts, *, last: bool = False) -> None:
        """And a sign of life: of a program that tells its metrics no more there is none."""
        seconds = time.monotonic() - served.at
        if seconds < _POINT_S and not last:
            return
        try:
            now = vllm.read_metrics(await relay.text("/metrics"))
        except httpx.HTTPError:
            return
        busy = now.get("num_requests_running", 0) > 0
        self.beacon.mark(COMPUTES if busy else IDLES, step=served.points)
        tokens = int(now.get("prompt_tokens_total", 0) + now.get("generation_tokens_total", 0))
        if busy or tokens != served.tokens:
            served.points += 1
            values = vllm.values_of(now, served.before, seconds=max(seconds, 1e-3))
            self.recorder.point(step=served.points, tokens=tokens, values=values)
        served.requests = int(now.get("request_success_total", 0))
        served.at, served.before, served.tokens = time.monotonic(), now, tokens


class _Counts:
    def __init__(self) -> None:
        self.at, self.points, self.tokens, self.requests = time.monotonic(), 0, 0, 0
        self.before: dict[str, float] = {}


def _app(gate: Gate, relay: Relay) -> Starlette:
    async def passed(request: Request) -> Response:
        gate.check_key(request.headers)
        body = await read_body(request)
        with ExitStack() as held:
            held.enter_context(gate.room(1))
            return await relay.pass_on(request, body, ended=held.pop_all().close)

    async def health(request: Request) -> Response:
        status = "draining" if gate.draining else "ok"
        return JSONResponse({"status": status}, status_code=503 if gate.draining else 200)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/{path:path}", passed, methods=["GET", "POST"]),
        ],
        exception_handlers=error_handlers(),
    )


def _still_there(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        message = (
            f"vllm ended by itself with code {child.returncode}; its words are in the rank's logs"
        )
        raise ChildProcessError(None, message)


async def _ended(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _END_S)
    if child.returncode is None:
        child.kill()
        await child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
