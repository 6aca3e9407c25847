"""One prompt's answers on their way from the engine's thread to the event loop that asked.

Knows tokens and why an answer ended; knows neither text nor HTTP. All methods belong to the event
loop's thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from workers.inference.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step gave one answer: new ids, their log-probabilities where asked for, and the end
    if it came.
    """

    answer: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: str | None = None

    def then(self, later: Piece) -> Piece:
        """Both as one."""
        logprobs, top = self.logprobs + later.logprobs, self.top + later.top
        return Piece(self.answer, self.tokens + later.tokens, logprobs, top, later.finish)


@dataclass(eq=False, slots=True)
class Ticket:
    """`place` is the prompt's among those of one order, which share an `inbox`; `open` counts
    answers to come.

    `accepted` comes true, or raises what the engine said, before the first piece.
    """

    id: str
    place: int
    prompt: tuple[int, ...]
    sampling: Sampling
    inbox: asyncio.Queue[tuple[Ticket, Piece | BaseException]]
    priority: int = 0
    client: str = ""
    accepted: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    open: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        self.open = self.sampling.n

    def give(self, piece: Piece) -> None:
        self.open -= piece.finish is not None
        self.inbox.put_nowait((self, piece))

    def fail(self, error: BaseException) -> None:
        """No more pieces will come."""
        self.open = 0
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # whoever asked may be gone
        self.inbox.put_nowait((self, error))
