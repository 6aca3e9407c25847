"""A serve run whose engine is another program: starts it, forwards requests, stops it.

API keys, admission, draining, points and events are the same as with Orrery's engine.
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
from workers.inference.server.http.admission import Admission
from workers.inference.server.http.body import read_body
from workers.inference.server.http.listener import Listener, bind, is_loopback
from workers.inference.server.http.routes import error_handlers
from workers.inference.server.replicas.forwarding import Upstream
from workers.inference.spec_loading import InferenceRun
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome

_LOOK_S, _POINT_S, _END_S = 0.1, 1.0, 10.0


class Backend:
    """Serves until a stop request.

    Raises UserError, and ChildProcessError if the program exits by itself.
    """

    def __init__(
        self, run: InferenceRun, environment: Environment, recorder: Recorder, beacon: Beacon
    ) -> None:
        self.run, self.environment = run, environment
        self.recorder, self.beacon = recorder, beacon
        self.weights = vllm.check(run)
        self.name = self.weights.name

    async def go(self, control: StopControl, *, host: str, port: int) -> Outcome:
        """Start the program, serve, drain and stop it."""
        bound, inner = bind(host, port), _free_port()
        body, fence = self.run.serve, self.environment.fence
        admission = Admission(
            api_key=body.api_key,
            control_key=None if fence is None else serve_key(fence),
            allow_anonymous=is_loopback(host),
            capacity=body.max_seqs + body.max_waiting,
        )
        upstream = Upstream(f"http://127.0.0.1:{inner}", {})
        arguments = vllm.command(self.run, self.weights, port=inner, name=self.name)
        child = await asyncio.create_subprocess_exec(*arguments)
        listener = Listener(_app(admission, upstream), bound)
        began, served = time.monotonic(), _Counts()
        try:
            if not await self._is_up(upstream, child, control):
                return Outcome("preempted", "stopped on request before the server was up")
            await listener.begin()
            at: tuple[str, int] = bound.getsockname()[:2]
            await self._record_serving(upstream, at)
            while control.action is None:
                _check_running(child)
                await self._point(upstream, served)
                await asyncio.sleep(_LOOK_S)
            admission.draining = True
            self.recorder.event(DRAINING, running=admission.in_progress)
            while admission.in_progress and time.monotonic() < control.deadline - 0.5:
                await asyncio.sleep(_LOOK_S)
            await self._point(upstream, served, last=True)
            summary = Summary(
                requests=served.requests,
                prompt_tokens=int(served.before.get("prompt_tokens_total", 0)),
                new_tokens=int(served.before.get("generation_tokens_total", 0)),
                seconds=time.monotonic() - began,
            )
            self.recorder.event(SERVED, **summary.to_dict())
            return Outcome(
                "ok" if control.action == "stop" else "preempted",
                "stopped on request",
                served.points,
            )
        finally:
            await listener.end()
            await upstream.close()
            await _terminate(child)

    async def _is_up(
        self, upstream: Upstream, child: asyncio.subprocess.Process, control: StopControl
    ) -> bool:
        """Wait until the program answers; the launcher limits the time of a start."""
        while control.action is None:
            _check_running(child)
            with contextlib.suppress(httpx.HTTPError):
                await upstream.get_text("/health")
                return True
            await asyncio.sleep(2 * _LOOK_S)
        return False

    async def _record_serving(self, upstream: Upstream, at: tuple[str, int]) -> None:
        card = (await upstream.get_json("/v1/models"))["data"][0]
        blocks = vllm.read_metrics(await upstream.get_text("/metrics")).get("blocks", 1)
        serving = Serving(
            host=at[0],
            port=at[1],
            model=self.name,
            context=int(card.get("max_model_len") or 1),
            chat=True,
            blocks=max(1, int(blocks)),
            backend="vllm",
        )
        self.recorder.event(SERVING, **serving.to_dict())
        print(f"serving {serving.model} by vllm on http://{at[0]}:{at[1]}/v1", flush=True)

    async def _point(self, upstream: Upstream, served: _Counts, *, last: bool = False) -> None:
        """Record metrics and make a heartbeat; a program that does not answer makes none."""
        seconds = time.monotonic() - served.at
        if seconds < _POINT_S and not last:
            return
        try:
            now = vllm.read_metrics(await upstream.get_text("/metrics"))
        except httpx.HTTPError:
            return
        busy = now.get("num_requests_running", 0) > 0
        self.beacon.mark(COMPUTES if busy else IDLES, step=served.points)
        tokens = int(now.get("prompt_tokens_total", 0) + now.get("generation_tokens_total", 0))
        if busy or tokens != served.tokens:
            served.points += 1
            values = vllm.point_values(now, served.before, seconds=max(seconds, 1e-3))
            self.recorder.point(step=served.points, tokens=tokens, values=values)
        served.requests = int(now.get("request_success_total", 0))
        served.at, served.before, served.tokens = time.monotonic(), now, tokens


class _Counts:
    def __init__(self) -> None:
        self.at, self.points, self.tokens, self.requests = time.monotonic(), 0, 0, 0
        self.before: dict[str, float] = {}


def _app(admission: Admission, upstream: Upstream) -> Starlette:
    async def forward(request: Request) -> Response:
        admission.check_key(request.headers)
        body = await read_body(request)
        with ExitStack() as stack:
            stack.enter_context(admission.reserve(1))
            return await upstream.forward(request, body, on_end=stack.pop_all().close)

    async def health(request: Request) -> Response:
        status = "draining" if admission.draining else "ok"
        return JSONResponse({"status": status}, status_code=503 if admission.draining else 200)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/{path:path}", forward, methods=["GET", "POST"]),
        ],
        exception_handlers=error_handlers(),
    )


def _check_running(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        message = f"vllm exited with code {child.returncode}; see the rank's logs"
        raise ChildProcessError(None, message)


async def _terminate(child: asyncio.subprocess.Process) -> None:
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
