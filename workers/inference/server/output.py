"""Output of one answer, on its way from the engine's thread to the response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New tokens of one answer, or all of them. `index` counts over prompts and their answers.

    The engine's thread makes it without text; `TokenStream` adds `text` and its `offset` in
    characters.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: str | None = None
    text: str = ""
    offset: int = 0

    def joined(self, later: OutputChunk) -> OutputChunk:
        """This chunk and a later one of the same answer as one, without text."""
        return OutputChunk(
            self.index,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.top_logprobs + later.top_logprobs,
            later.finish,
        )
