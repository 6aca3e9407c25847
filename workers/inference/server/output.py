"""Output of one answer, on its way from the engine's thread to the response."""

from __future__ import annotations

from dataclasses import dataclass

from workers.inference.sampling.prompt_scores import PromptScore
from workers.inference.server.tool_calls import CallPiece, ToolCall


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New tokens of one answer, or all of them. `index` counts over prompts and their answers.

    The engine's thread makes it without text; `TokenStream` adds `text` and its `offset` in
    characters. `prompt` are the scores of the prompt's tokens, in an answer's first chunk if the
    request wants them, `score` is a reward model's. `calls` of tools are in a complete answer,
    their `pieces` in chunks.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: str | None = None
    prompt: tuple[PromptScore, ...] | None = None
    score: float | None = None
    calls: tuple[ToolCall, ...] = ()
    pieces: tuple[CallPiece, ...] = ()
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
            self.prompt if self.prompt is not None else later.prompt,
            self.score if self.score is not None else later.score,
        )
