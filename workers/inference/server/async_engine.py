"""The engine in a thread of its own: requests go in by a queue, output goes to the event loop.

Only that thread touches the engine. Does not depend on text, HTTP or files.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from workers.contracts.wire.serving_reports import EngineState
from workers.inference.adapters.adapter import Adapter
from workers.inference.engine import Engine
from workers.inference.request import Request
from workers.inference.server.observe.engine_state import read_engine_state
from workers.inference.server.output import OutputChunk
from workers.inference.server.token_stream import TokenStream
from workers.models.errors import WeightsError

IDLE_S = 0.5  # between two liveness marks while there is nothing to compute
_LISTED_FINISHED = 64  # finished requests in the engine's state


class EngineListener(Protocol):
    """Receives the engine's events, in the engine's thread."""

    def thread_started(self) -> None:
        """The engine's thread runs."""

    def step_started(self) -> None:
        """A step begins."""

    def step_finished(self) -> None:
        """A step is computed and delivered."""

    def idle(self) -> None:
        """There is nothing to compute."""

    def request_finished(self, request: Request, name: str) -> None:
        """An answer is finished or aborted; `name` is its prompt's id."""


class AsyncEngine:
    """`submit`, `cancel` and `state` from the event loop that `start` was called in.

    `stopped` resolves to the error that ended the thread, or to None after `stop`.
    """

    def __init__(self, engine: Engine, listener: EngineListener, *, since_s: float) -> None:
        self.engine, self.listener, self.since_s = engine, listener, since_s
        self.streams: set[TokenStream] = set()  # event loop: those with answers to come
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # the rest belongs to the engine's thread
        self._prompts: dict[int, tuple[TokenStream, int]] = {}  # stream and prompt, by parent
        self._unfinished: dict[int, int] = {}  # answers, by parent
        self._sent: dict[Request, int] = {}  # tokens
        self._finished: list[Request] = []  # the newest
        self._names: dict[int, str] = {}  # by parent, of the above
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def unfinished(self) -> int:
        """Answers in progress."""
        return sum(stream.unfinished for stream in self.streams)

    def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self.stopped: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread.start()

    async def submit(self, stream: TokenStream) -> None:
        """Queue all prompts of a request.

        Raises ValueError for what the engine cannot do, and the engine's error if it has failed.
        """
        if self.stopped.done():
            raise self.stopped.result() or RuntimeError("the engine has stopped")
        self.streams.add(stream)
        self._commands.put(lambda: self._add(stream))
        try:
            await asyncio.shield(stream.accepted)
        except BaseException:
            self.cancel(stream)
            raise

    def cancel(self, stream: TokenStream) -> None:
        """Free its blocks after the current step; no effect on a finished request."""
        if stream in self.streams:
            self.streams.discard(stream)
            self._commands.put(lambda: self._abort(stream))

    async def state(self, *, draining: bool = False) -> EngineState:
        """The state between two steps. Raises TimeoutError if the current step takes long."""
        state: asyncio.Future[EngineState] = self._loop.create_future()
        self._commands.put(lambda: self._read_state(state, draining))
        return await asyncio.wait_for(state, 5.0)

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load an adapter, between two steps. Raises WeightsError."""
        store = self.engine.adapters
        assert store is not None
        adapter = await asyncio.to_thread(store.read, name, path)
        await self._call(lambda: store.add(adapter, in_use=self.engine.adapters_in_use()))
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests in progress finish. Raises KeyError."""
        store = self.engine.adapters
        assert store is not None
        await self._call(lambda: store.remove(name))

    async def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the engine's thread between two steps; raises what it raises."""
        if self.stopped.done():
            raise self.stopped.result() or RuntimeError("the engine has stopped")
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            error: BaseException | None = None
            try:
                function()
            except BaseException as raised:
                error = raised
            self._call_loop(_finish, done, error)
            if error is not None and not isinstance(error, WeightsError | KeyError):
                raise error

        self._commands.put(run)
        await done

    async def stop(self) -> None:
        """Stop after the current step, whatever is in progress."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        error: BaseException | None = None
        self.listener.thread_started()
        try:
            while self._run_commands():
                if self.engine.busy:
                    self.listener.step_started()
                    advanced = self.engine.step()
                    self._deliver(advanced)
                    self.listener.step_finished()
        except BaseException as raised:
            error = raised
        self._call_loop(self._on_stopped, error)

    def _run_commands(self) -> bool:
        """Run all queued commands; without work, wait for one. False means stop."""
        wait = not self.engine.busy
        while True:
            if wait:
                self.engine.runner.idle()
                self.listener.idle()
            try:
                command = (
                    self._commands.get(timeout=IDLE_S) if wait else self._commands.get_nowait()
                )
            except queue.Empty:
                if wait:
                    continue
                return True
            if command is None:
                return False
            command()
            wait = wait and not self.engine.busy

    def _add(self, stream: TokenStream) -> None:
        if stream.accepted.cancelled():
            return
        parsed = stream.request
        try:
            for place, prompt in enumerate(parsed.prompts):
                request = self.engine.add(
                    prompt,
                    parsed.samplings[place],
                    priority=parsed.priority,
                    client=stream.client,
                    adapter=parsed.adapter,
                )
                self._prompts[request.parent] = stream, place
                self._unfinished[request.parent] = parsed.sampling.n
                self._names[request.parent] = stream.prompt_id(place)
        except Exception as error:  # one bad request must not end the others
            self._abort(stream)
            self._call_loop(self._on_refused, stream, error)
            return
        self._call_loop(stream.accept)

    def _abort(self, stream: TokenStream) -> None:
        for parent in [number for number, (of, _) in self._prompts.items() if of is stream]:
            for request in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
                if request.parent == parent:
                    self.engine.abort(request)
                    self._finish(request)
            del self._prompts[parent], self._unfinished[parent]

    def _deliver(self, advanced: list[Request]) -> None:
        """Send the new tokens of these requests to their streams."""
        output: list[tuple[TokenStream, OutputChunk]] = []
        for request in advanced:
            if request.parent not in self._prompts:
                continue
            stream, place = self._prompts[request.parent]
            if request.answer == 0 and request not in self._sent:
                stream.cached_tokens += request.cached_tokens
            prompt = None
            if request not in self._sent and request.sampling.prompt_logprobs is not None:
                prompt = tuple(request.prompt_scores)
            sent = self._sent.get(request, 0)
            new = tuple(request.tokens[len(request.prompt) + sent :])
            self._sent[request] = sent + len(new)
            chunk = OutputChunk(
                place * stream.request.sampling.n + request.answer,
                new,
                tuple(request.logprobs[sent:]),
                tuple(request.top_logprobs[sent:]),
                request.finish,
                prompt,
                request.score,
            )
            output.append((stream, chunk))
            if request.finish is not None:
                self._finish(request)
                self._unfinished[request.parent] -= 1
                if not self._unfinished[request.parent]:
                    del self._prompts[request.parent], self._unfinished[request.parent]
        if output:
            self._call_loop(self._on_output, output)

    def _finish(self, request: Request) -> None:
        """Report a finished request; drop names that the state no longer lists."""
        self._sent.pop(request, None)
        self.listener.request_finished(request, self._names[request.parent])
        self._finished = [*self._finished[1 - _LISTED_FINISHED :], request]
        if len(self._names) > len(self._prompts) + 2 * len(self._finished):
            known = {*self._prompts, *(other.parent for other in self._finished)}
            self._names = {parent: name for parent, name in self._names.items() if parent in known}

    def _read_state(self, state: asyncio.Future[EngineState], draining: bool) -> None:
        value = read_engine_state(
            self.engine, self._names, self._finished, since_s=self.since_s, draining=draining
        )
        self._call_loop(_resolve, state, value)

    def _call_loop(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    # in the event loop

    def _on_refused(self, stream: TokenStream, error: Exception) -> None:
        self.streams.discard(stream)
        stream.fail(error)

    def _on_output(self, output: list[tuple[TokenStream, OutputChunk]]) -> None:
        for stream, chunk in output:
            stream.put(chunk)
            if not stream.unfinished:
                self.streams.discard(stream)

    def _on_stopped(self, error: BaseException | None) -> None:
        for stream in self.streams:
            stream.fail(error or RuntimeError("the engine has stopped"))
        self.streams.clear()
        if not self.stopped.done():
            self.stopped.set_result(error)


def _finish(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _resolve(state: asyncio.Future[EngineState], value: EngineState) -> None:
    if not state.done():
        state.set_result(value)
