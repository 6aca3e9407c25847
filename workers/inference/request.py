"""One request on its way: its tokens, its blocks of the cache, how far it is computed, why it
ended.

Plain state; `scheduler` moves it, `engine` adds tokens to it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from workers.inference.blocks import block_key
from workers.inference.constrain.guide import Guide
from workers.inference.sampling import Sampling

FinishReason = Literal["stop", "length", "aborted"]
_NUMBERS = itertools.count()


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` are prompt and answer; keys and values of the first `computed` are in `blocks`.

    `answer` is this one's place among the `n` of one prompt, `parent` the number of the request
    that was added. `draft`
    are tokens that may follow, of which the next step is to compute `wish`; `drafted` and
    `accepted` count them. The
    first `gone` blocks are given back, out of a sliding window; `arrival` is the scheduler's step
    when it counts as
    come.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    answer: int = 0
    parent: int = -1
    number: int = field(default_factory=lambda: next(_NUMBERS))
    tokens: list[int] = field(default_factory=list)
    priority: int = 0  # higher goes first
    client: str = ""  # who asks
    arrival: float = 0.0
    blocks: list[int] = field(default_factory=list)
    gone: int = 0
    computed: int = 0
    read: int = 0  # tokens that a draft model has read too
    draft: list[int] = field(default_factory=list)
    wish: int = 0
    drafted: int = 0
    accepted: int = 0
    shared_tokens: int = 0  # of the prompt, found in the cache at the first admission
    preemptions: int = 0
    finish: FinishReason | None = None
    guide: Guide | None = None  # where the answer keeps to a form
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    added_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        if self.parent < 0:
            self.parent = self.number

    @property
    def new_tokens(self) -> Sequence[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 between two tokens of an answer."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        return self.pending == 1 and len(self.tokens) > len(self.prompt)

    def keys(self, blocks: int, block_size: int) -> list[bytes]:
        """Of the first `blocks` blocks, all of which must be full; each is made once."""
        while len(self._keys) < blocks:
            first = len(self._keys) * block_size
            before = self._keys[-1] if self._keys else b""
            self._keys.append(block_key(before, self.tokens[first : first + block_size]))
        return self._keys[:blocks]
