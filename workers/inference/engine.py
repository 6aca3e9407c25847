"""The engine: requests in, a token for each of them a step, until they end.

Puts scheduler, runner and sampler together; knows no files and no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampler import Drawn, sample
from workers.inference.sampling import Sampling
from workers.inference.scheduler import Scheduler
from workers.inference.stops import GrowingText


@dataclass(slots=True)
class Counts:
    """Since the start: steps, and tokens computed of prompts and of answers, or found in the cache."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0


class Engine:
    """`add` requests at any time, `step` while `busy`. `decode` turns ids to text, for stop strings."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        context: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.runner, self.scheduler, self.context = runner, scheduler, context
        self.counts = Counts()
        self._decode = decode
        self._texts: dict[Request, GrowingText] = {}

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """The request, first of its `n` answers; one that would outgrow the context ends there, of length.

        Raises ValueError for a prompt that the model cannot read or the cache cannot hold.
        """
        check_prompt(prompt, context=self.context, vocab=self.runner.vocab)
        if sampling.stop and self._decode is None:
            raise ValueError("stop strings want a tokenizer, and this model came without one; use ends of ids")
        room = min(sampling.max_new_tokens, self.context - len(prompt))
        request = Request(tuple(prompt), replace(sampling, max_new_tokens=room))
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Compute one step; the requests that got a token, those that ended with their `finish`."""
        plan = self.scheduler.plan()
        if not plan.slices:
            return []
        logits = self.runner.run(plan)
        sampled = [each.request for each in plan.slices if each.samples]
        self.counts.steps += 1
        self.counts.prompt_tokens += sum(each.count for each in plan.slices if not each.request.decodes)
        self.scheduler.done(plan)
        rows: list[int] = []
        requests: list[Request] = []
        for row, request in enumerate(sampled):
            answers = [request, *self._forked(request)]
            requests += answers
            rows += [row] * len(answers)
        logits = logits[rows] if len(rows) > len(sampled) else logits
        for request, drawn in zip(requests, sample(logits, requests), strict=True):
            self._take(request, drawn)
        return requests

    def abort(self, request: Request) -> None:
        """End a request and the other answers to its prompt; their blocks are free at once."""
        for each in [*self.scheduler.running, *self.scheduler.waiting]:
            if each.parent == request.parent:
                self._end(each)
                each.finish = "aborted"

    def _forked(self, request: Request) -> list[Request]:
        """The other answers, at the moment when the prompt is computed."""
        if len(request.tokens) > len(request.prompt):
            return []
        self.counts.shared_tokens += request.shared_tokens
        children = [
            Request(request.prompt, request.sampling, answer, request.number, added_s=request.added_s)
            for answer in range(1, request.sampling.n)
        ]
        if children:
            self.scheduler.fork(request, children)
        return children

    def _take(self, request: Request, drawn: Drawn) -> None:
        asked, now = request.sampling, time.perf_counter()
        request.tokens.append(drawn.token)
        request.first_token_s, request.last_token_s = request.first_token_s or now, now
        self.counts.new_tokens += 1
        if drawn.logprob is not None:
            request.logprobs.append(drawn.logprob)
        if drawn.token in asked.ends and not asked.ignore_eos:
            request.finish = "stop"
        elif asked.stop and self._decode is not None:
            text = self._texts.setdefault(request, GrowingText(self._decode, asked.stop))
            request.finish = "stop" if text.add(drawn.token) else None
        if request.finish is None and len(request.new_tokens) >= asked.max_new_tokens:
            request.finish = "length"
        if request.finish is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._texts.pop(request, None)


def check_prompt(prompt: Sequence[int], *, context: int, vocab: int) -> None:
    """Raises ValueError for one that is empty, too long, or holds ids that the model does not know."""
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        says = f"the prompt has {len(prompt)} tokens, the model's context {context}"
        raise ValueError(f"{says}; it must leave room for one more, try at most {context - 1}")
    wrong = next((each for each in prompt if not 0 <= each < vocab), None)
    if wrong is not None:
        raise ValueError(f"the prompt holds the token id {wrong}; the model knows 0 to {vocab - 1}")
