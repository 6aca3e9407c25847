"""The engine: requests in, a token or more for each of them a step, until they end.

Puts scheduler, runner and sampler together; knows no files and no network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from workers.inference.beams import Beams
from workers.inference.constrain.guide import Guides
from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampler import Drawn, Row
from workers.inference.sampling import Sampling
from workers.inference.scheduler import Scheduler
from workers.inference.speculate.speculator import Speculator
from workers.inference.speculate.verify import verified
from workers.inference.step import StepPlan
from workers.inference.stop_strings import GrowingText


@dataclass(slots=True)
class Counts:
    """Since the start: steps, and tokens computed of prompts and of answers, or found in the cache.
    `decodes` are steps
    of a request beyond its first token, `drafted` and `accepted` the drafted tokens in them."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0
    decodes: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way: what drafts were drawn from, when it began, and its logits for the asking."""

    plan: StepPlan
    drawn_from: Mapping[Request, Tensor]
    began: float
    logits: Callable[[], Tensor]


class Engine:
    """`add` requests at any time, `step` while `busy`. `decode` turns ids to text, for stop
    strings; a `speculator` has
    several tokens computed a step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        context: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        speculator: Speculator | None = None,
        guides: Guides | None = None,
    ) -> None:
        self.runner, self.scheduler, self.context = runner, scheduler, context
        self.speculator, self.guides = speculator, guides
        if speculator is not None:
            scheduler.window = speculator.proposer.window(scheduler.window)
            scheduler.read_twice = speculator.proposer.reads
        self.counts = Counts()
        self._decode = decode
        self._texts: dict[Request, GrowingText] = {}
        self.beams = Beams(scheduler)
        self._flights: deque[Flight] = deque()
        scheduler.groups = runner.depth

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self, prompt: Sequence[int], sampling: Sampling, *, priority: int = 0, client: str = ""
    ) -> Request:
        """The request, first of its `n` answers; one that would outgrow the context ends there, of
        length. Higher
        priority goes first; clients get equal shares of a queue.

        Raises ValueError for a prompt that the model cannot read or the cache cannot hold.
        """
        check_prompt(prompt, context=self.context, vocab=self.runner.vocab)
        if sampling.stop and self._decode is None:
            raise ValueError(
                "stop strings want a tokenizer, and this model came without one; use ends of ids"
            )
        wrong = next(
            (each for each in sampling.logit_bias if not 0 <= each < self.runner.vocab), None
        )
        if wrong is not None:
            raise ValueError(
                f"logit_bias names the token id {wrong}; the model knows 0 to "
                f"{self.runner.vocab - 1}"
            )
        room = min(sampling.max_new_tokens, self.context - len(prompt))
        request = Request(
            tuple(prompt), replace(sampling, max_new_tokens=room), priority=priority, client=client
        )
        if sampling.constrained:
            if self.guides is None:
                raise ValueError(
                    "a form is of text, and this model came without a tokenizer; leave "
                    "json_schema out"
                )
            request.guide = self.guides.open(sampling)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Compute one step; the requests that got tokens, those that ended with their `finish`.
        Where the runner takes
        several at a time, more are begun before the oldest is waited for."""
        while len(self._flights) < self.runner.depth and (flight := self._begun()) is not None:
            self._flights.append(flight)
        return self._landed(self._flights.popleft()) if self._flights else []

    def _begun(self) -> Flight | None:
        drawn_from: Mapping[Request, Tensor] = {}
        if self.speculator is not None:
            flying = self.scheduler.flying
            self.speculator.wish([each for each in self.scheduler.running if each not in flying])
        plan = self.scheduler.plan()
        if not plan.slices:
            return None
        if self.speculator is not None:
            plan, drawn_from = self.speculator.draft(plan)
        return Flight(plan, drawn_from, time.perf_counter(), self.runner.start(plan))

    def _landed(self, flight: Flight) -> list[Request]:
        plan, drawn_from, logits = flight.plan, flight.drawn_from, flight.logits()
        decoding = {each.request for each in plan.slices if each.request.decodes}
        self.counts.steps += 1
        self.counts.prompt_tokens += sum(
            each.count for each in plan.slices if each.request not in decoding
        )
        self.scheduler.done(plan)
        for each in plan.slices:
            if each.request.finish is not None:  # aborted on the way
                self._end(each.request)
        groups, places = self._groups(plan, logits)
        # of n answers several see one row, of beams a row is seen by none: as many places as rows
        # is not all in order
        in_order = places == list(range(len(logits)))
        answers = verified(logits if in_order else logits[places], groups, drawn_from)
        seconds = time.perf_counter() - flight.began
        self.scheduler.took(plan, seconds)
        requests = [group[0].request for group in groups]
        accepted: dict[Request, int] = {}
        for request, drawn in zip(requests, answers, strict=True):
            count = self._take(request, drawn)
            if request in decoding:
                accepted[request] = count
        self._count(plan, accepted)
        for request in (found := self.beams.advance()):
            self.counts.new_tokens += len(request.new_tokens)
        if self.speculator is not None:
            self.speculator.judge(plan, accepted, seconds=seconds)
            for request in requests:
                if request.finish is not None:
                    self.speculator.forget(request)
        return requests + found

    def abort(self, request: Request) -> None:
        """End a request and the other answers to its prompt; their blocks are free at once, or
        after the step that they
        are in."""
        self.beams.abort(request.parent)
        for each in [*self.scheduler.running, *self.scheduler.waiting]:
            if each.parent == request.parent:
                if each not in self.scheduler.flying:
                    self._end(each)
                each.finish = "aborted"
                if self.speculator is not None:
                    self.speculator.forget(each)

    def _groups(self, plan: StepPlan, logits: Tensor) -> tuple[list[list[Row]], list[int]]:
        """The rows where tokens are wanted, those of a request together, and which of the logits
        they see.
        """
        groups: list[list[Row]] = []
        places: list[int] = []
        first = 0
        for each in plan.slices:
            if each.request.finish is not None:
                first += each.wants
            elif each.samples and each.request.sampling.beams > 1:
                self.beams.offer(each.request, logits[first])
                first += 1
            elif each.samples:
                here = range(first, first + each.wants)
                groups.append([Row(each.request, ahead) for ahead in range(each.wants)])
                places += here
                for child in self._forked(each.request):
                    groups.append([Row(child)])
                    places += here
                first += each.wants
        return groups, places

    def _forked(self, request: Request) -> list[Request]:
        """The other answers, at the moment when the prompt is computed."""
        if len(request.tokens) > len(request.prompt):
            return []
        self.counts.shared_tokens += request.shared_tokens
        children = [
            Request(
                request.prompt, request.sampling, answer, request.number, added_s=request.added_s
            )
            for answer in range(1, request.sampling.n)
        ]
        for child in children:
            child.guide = None if request.guide is None else request.guide.copy()
        if children:
            self.scheduler.fork(request, children)
        return children

    def _take(self, request: Request, drawn: Sequence[Drawn]) -> int:
        """A step's tokens, up to where the request ends; how many of them were drafted."""
        now = time.perf_counter()
        request.first_token_s, request.last_token_s = request.first_token_s or now, now
        taken = 0
        for each in drawn:
            self._append(request, each)
            taken += 1
            if request.finish is not None:
                break
        self.counts.new_tokens += taken
        accepted = min(taken, len(drawn) - 1)
        self.scheduler.accept(request, accepted)
        if request.finish is not None:
            self._end(request)
        return accepted

    def _append(self, request: Request, drawn: Drawn) -> None:
        asked = request.sampling
        request.tokens.append(drawn.token)
        if request.guide is not None:
            request.guide.take(drawn.token)
        if drawn.logprob is not None:
            request.logprobs.append(drawn.logprob)
            request.top_logprobs.append(drawn.top)
        if drawn.token in asked.ends and not asked.ignore_eos:
            request.finish = "stop"
        elif asked.stop and self._decode is not None:
            text = self._texts.setdefault(request, GrowingText(self._decode, asked.stop))
            request.finish = "stop" if text.add(drawn.token) else None
        if request.finish is None and request.guide is not None and request.guide.complete:
            request.finish = "length" if request.guide.lost else "stop"
        if request.finish is None and len(request.new_tokens) >= asked.max_new_tokens:
            request.finish = "length"

    def _count(self, plan: StepPlan, accepted: Mapping[Request, int]) -> None:
        for each in plan.slices:
            each.request.drafted += each.drafts
            each.request.accepted += accepted.get(each.request, 0)
            self.counts.drafted += each.drafts
        self.counts.decodes += len(accepted)
        self.counts.accepted += sum(accepted.values())

    def _end(self, request: Request) -> None:
        request.ended_s = time.perf_counter()
        self.scheduler.remove(request)
        self._texts.pop(request, None)


def check_prompt(prompt: Sequence[int], *, context: int, vocab: int) -> None:
    """Raises ValueError for one that is empty, too long, or holds ids that the model does not know."""
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        message = f"the prompt has {len(prompt)} tokens, the model's context {context}"
        raise ValueError(f"{message}; it must leave room for one more, try at most {context - 1}")
    wrong = next((each for each in prompt if not 0 <= each < vocab), None)
    if wrong is not None:
        raise ValueError(f"the prompt holds the token id {wrong}; the model knows 0 to {vocab - 1}")
