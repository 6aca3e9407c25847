"""A request inside the engine: its tokens, its cache blocks, its progress, its finish reason.

State only; `scheduling` assigns blocks to it, `engine` appends tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from workers.inference.adapters.adapter import Adapter
from workers.inference.constrain.guide import Guide
from workers.inference.kv_cache.block_pool import hash_block
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.sampling.prompt_scores import PromptScore

FinishReason = Literal["stop", "length", "aborted"]
_NUMBERS = itertools.count()


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. `tokens` are prompt and output; `blocks` hold the KV of the first `computed`.

    `answer` is its index among the `n` answers to one prompt, `parent` the number of the request
    that was added for that prompt.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    answer: int = 0
    parent: int = -1
    number: int = field(default_factory=lambda: next(_NUMBERS))
    tokens: list[int] = field(default_factory=list)
    priority: int = 0  # higher goes first
    client: str = ""
    adapter: Adapter | None = None
    weight_version: int = 0  # of the weights that compute its keys and values
    arrival: float = 0.0  # scheduler step, as the fair queue counts it
    blocks: list[int] = field(default_factory=list)
    freed_blocks: int = 0  # first blocks that slid out of the attention window
    computed: int = 0
    draft_computed: int = 0  # tokens whose KV the draft model has computed
    draft: list[int] = field(default_factory=list)  # tokens that may follow
    max_drafts: int = 0  # drafted tokens wanted in the next step
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache at the first admission
    preemptions: int = 0
    finish: FinishReason | None = None
    guide: Guide | None = None  # for constrained output
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)  # weights of each sampled token
    prompt_scores: list[PromptScore] = field(default_factory=list)  # of its second token on
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    score: float | None = None  # of a scalar head at the prompt's last token
    added_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    _block_keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        if self.parent < 0:
            self.parent = self.number

    @property
    def output_tokens(self) -> Sequence[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt's tokens are still to be computed."""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest output token has to be computed."""
        return self.pending == 1 and len(self.tokens) > len(self.prompt)

    def block_keys(self, blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `blocks` blocks, all of which must be full; computed once each.

        They include the adapter and the weights' version: keys and values depend on both.
        """
        root = b"" if self.adapter is None else self.adapter.cache_root
        if self.weight_version:
            root = hash_block(root, [self.weight_version])
        while len(self._block_keys) < blocks:
            first = len(self._block_keys) * block_size
            previous = self._block_keys[-1] if self._block_keys else root
            self._block_keys.append(hash_block(previous, self.tokens[first : first + block_size]))
        return self._block_keys[:blocks]

    def take_weights(self, version: int) -> None:
        """Compute all keys and values with the weights of `version` from now on."""
        self.weight_version = version
        self._block_keys.clear()


def check_prompt(prompt: Sequence[int], *, context: int, vocab: int, room: int = 1) -> None:
    """Raises ValueError if it is empty, too long, or has ids outside the vocabulary.

    It must leave `room` for that many new tokens.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) > context - room:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the model's context is {context}; give at most "
            f"{context - room}" + (" to leave room for one new token" if room else "")
        )
    first_error = next((token for token in prompt if not 0 <= token < vocab), None)
    if first_error is not None:
        raise ValueError(
            f"the prompt has the token id {first_error}; the model's ids are 0 to {vocab - 1}"
        )
