"""The engine in a thread of its own: requests go in by a queue, pieces of answers leave to the
event loop.

Nobody but that thread touches the engine. Knows no text, no HTTP and no files.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from workers.contracts.wire.serving_reports import EngineState
from workers.inference.engine import Engine
from workers.inference.request import Request
from workers.inference.server.state import engine_state
from workers.inference.server.ticket import Piece, Ticket

IDLE_S = 0.5  # between two signs of life while there is nothing to do


class Watcher(Protocol):
    """Who is told of the engine's doings, in the engine's thread."""

    def began(self) -> None: ...

    def stepping(self) -> None: ...

    def stepped(self) -> None: ...

    def idle(self) -> None: ...

    def ended(self, request: Request, ticket: str) -> None: ...


class Pump:
    """`submit`, `cancel` and `state` from the event loop that `start` was called in. `broke`
    resolves to the error
    that ended the thread, or to None after `stop`."""

    def __init__(self, engine: Engine, watcher: Watcher, *, since_s: float) -> None:
        self.engine, self.watcher, self.since_s = engine, watcher, since_s
        self.tickets: set[Ticket] = set()  # of the event loop: those with answers to come
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._by_parent: dict[int, Ticket] = {}  # of the engine's thread
        self._sent: dict[Request, int] = {}
        self._ended: list[Request] = []
        self._to_come: dict[int, int] = {}  # answers that have not ended, by parent
        self._names: dict[int, str] = {}  # of those on their way and of those in `_ended`
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.broke: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread.start()

    async def submit(self, ticket: Ticket) -> None:
        """Raises ValueError for what the engine cannot do, and what broke the engine if it is
        broken.
        """
        if self.broke.done():
            raise self.broke.result() or RuntimeError("the engine has stopped")
        self.tickets.add(ticket)
        self._orders.put(lambda: self._add(ticket))
        try:
            await asyncio.shield(ticket.accepted)
        except BaseException:
            self.cancel(ticket)
            raise

    def cancel(self, ticket: Ticket) -> None:
        """Its blocks are free after the present step; harmless for one that has ended."""
        if ticket in self.tickets:
            self.tickets.discard(ticket)
            self._orders.put(lambda: self._abort(ticket))

    async def state(self, *, draining: bool = False) -> EngineState:
        """As it is between two steps. Raises TimeoutError where the present one takes long."""
        found: asyncio.Future[EngineState] = self._loop.create_future()
        self._orders.put(lambda: self._tell(found, draining))
        return await asyncio.wait_for(found, 5.0)

    async def stop(self) -> None:
        """After the present step, whatever is on its way."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        error: BaseException | None = None
        self.watcher.began()
        try:
            while self._take_orders():
                if self.engine.busy:
                    self.watcher.stepping()
                    advanced = self.engine.step()
                    self._deliver(advanced)
                    self.watcher.stepped()
        except BaseException as broken:
            error = broken
        self._say(self._leave, error)

    def _take_orders(self) -> bool:
        """All that wait; with nothing to compute, until one comes. False to leave."""
        wait = not self.engine.busy
        while True:
            if wait:
                self.engine.runner.idle()
                self.watcher.idle()
            try:
                order = self._orders.get(timeout=IDLE_S) if wait else self._orders.get_nowait()
            except queue.Empty:
                if wait:
                    continue
                return True
            if order is None:
                return False
            order()
            wait = wait and not self.engine.busy

    def _add(self, ticket: Ticket) -> None:
        if ticket.accepted.cancelled():
            return
        try:
            request = self.engine.add(
                ticket.prompt, ticket.sampling, priority=ticket.priority, client=ticket.client
            )
        except Exception as error:  # what one request breaks ends no other
            self._say(self._refuse, ticket, error)
            return
        self._by_parent[request.parent] = ticket
        self._to_come[request.parent] = ticket.sampling.n
        self._names[request.parent] = ticket.id
        self._say(_accept, ticket, request.sampling.max_new_tokens)

    def _abort(self, ticket: Ticket) -> None:
        parent = next((number for number, each in self._by_parent.items() if each is ticket), None)
        if parent is None:
            return
        for each in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            if each.parent == parent:
                self.engine.abort(each)
                self._end(each, ticket.id)
        del self._by_parent[parent], self._to_come[parent]

    def _deliver(self, advanced: list[Request]) -> None:
        given: list[tuple[Ticket, Piece]] = []
        for request in advanced:
            ticket = self._by_parent.get(request.parent)
            if ticket is None:
                continue
            if request.answer == 0 and request not in self._sent:
                ticket.shared_tokens = request.shared_tokens
            sent = self._sent.get(request, 0)
            fresh = tuple(request.tokens[len(request.prompt) + sent :])
            self._sent[request] = sent + len(fresh)
            scores, tops = tuple(request.logprobs[sent:]), tuple(request.top_logprobs[sent:])
            piece = Piece(request.answer, fresh, scores, tops, request.finish)
            given.append((ticket, piece))
            if request.finish is not None:
                self._end(request, ticket.id)
                self._forget(request.parent)
        if given:
            self._say(self._give, given)

    def _end(self, request: Request, name: str) -> None:
        self._sent.pop(request, None)
        self.watcher.ended(request, name)
        self._ended = [*self._ended[-63:], request]
        if len(self._names) > len(self._by_parent) + 2 * len(self._ended):
            known = {*self._by_parent, *(each.parent for each in self._ended)}
            self._names = {
                parent: ticket for parent, ticket in self._names.items() if parent in known
            }

    def _forget(self, parent: int) -> None:
        """An answer has ended; with the last of its prompt nothing is kept for it."""
        self._to_come[parent] -= 1
        if not self._to_come[parent]:
            del self._by_parent[parent], self._to_come[parent]

    def _tell(self, found: asyncio.Future[EngineState], draining: bool) -> None:
        told = engine_state(
            self.engine, self._names, self._ended, since_s=self.since_s, draining=draining
        )
        self._say(_resolve, found, told)

    def _say(self, what: Callable[..., None], *given: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(what, *given)

    # in the event loop

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        self.tickets.discard(ticket)
        ticket.fail(error)

    def _give(self, given: list[tuple[Ticket, Piece]]) -> None:
        for ticket, piece in given:
            ticket.give(piece)
            if not ticket.open:
                self.tickets.discard(ticket)

    def _leave(self, error: BaseException | None) -> None:
        for ticket in self.tickets:
            ticket.fail(error or RuntimeError("the engine has stopped"))
        self.tickets.clear()
        if not self.broke.done():
            self.broke.set_result(error)


def _accept(ticket: Ticket, tokens: int) -> None:
    if not ticket.accepted.done():
        ticket.accepted.set_result(tokens)


def _resolve(found: asyncio.Future[EngineState], told: EngineState) -> None:
    if not found.done():
        found.set_result(told)
