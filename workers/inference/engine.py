"""The inference engine: `add` requests, `step` until they finish.

Combines scheduler, runner and sampler; does not depend on files or the network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from workers.inference.adapters.adapter import Adapter
from workers.inference.adapters.store import AdapterStore
from workers.inference.constrain.guide import Guides
from workers.inference.host_time import HostTime
from workers.inference.request import Request, check_prompt
from workers.inference.runner import Runner
from workers.inference.sampling.beam_search import BeamSearch
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.sampling.prompt_scores import score_tokens
from workers.inference.sampling.sampler import Row, SampledToken
from workers.inference.scheduling.scheduler import Scheduler
from workers.inference.scheduling.step_plan import StepPlan
from workers.inference.speculate.speculator import Speculator
from workers.inference.speculate.verify import verify_drafts
from workers.inference.step_costs import StepCostFit
from workers.inference.text.stop_strings import IncrementalText


@dataclass(slots=True)
class EngineCounts:
    """Counts since the start: steps, and prompt and output tokens computed or found in the cache.

    `decode_steps` counts requests times steps after their first token; `drafted` and `accepted`
    the drafted tokens in them. `host_s`: see `HostTime`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the runner computes: call `logits` to wait for them."""

    plan: StepPlan
    draft_probs: Mapping[Request, Tensor]  # distributions that drafts were drawn from
    began: float
    logits: Callable[[], Tensor]


class Engine:
    """`add` requests at any time, and call `step` while `busy`.

    `decode` turns ids into text, for stop strings. A `speculator` drafts tokens, so that a step
    yields several.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        context: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        speculator: Speculator | None = None,
        guides: Guides | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.runner, self.scheduler, self.context = runner, scheduler, context
        self.speculator, self.guides = speculator, guides
        self.adapters = scheduler.adapters = adapters
        if speculator is not None:
            tables = scheduler.tables
            tables.window = speculator.proposer.window(tables.window)
            tables.draft_reads_cache = speculator.proposer.reads
        self.counts, self._host_time = EngineCounts(), HostTime(runner.device)
        self.step_costs = StepCostFit()
        self._busy_since: float | None = None  # the end of the last step, unless it was the last
        self._decode = decode
        self._texts: dict[Request, IncrementalText] = {}
        self.beams = BeamSearch(scheduler)
        self._in_flight: deque[StepInFlight] = deque()
        scheduler.groups = runner.depth

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        client: str = "",
        adapter: Adapter | None = None,
    ) -> Request:
        """Queue a prompt; the request of the first of its `n` answers.

        Higher priority goes first; clients get equal shares of a queue. An answer that reaches the
        context ends with "length". Raises ValueError for a prompt or parameters that the model or
        the cache cannot handle, and for an adapter that is not available.
        """
        self._check(prompt, sampling)
        max_new_tokens = min(sampling.max_new_tokens, self.context - len(prompt))
        params = replace(sampling, max_new_tokens=max_new_tokens)
        if adapter is not None:
            assert self.adapters is not None
            self.adapters.ready(adapter, in_use=self.adapters_in_use())
        request = Request(tuple(prompt), params, priority=priority, client=client, adapter=adapter)
        if sampling.constrained:
            if self.guides is None:
                raise ValueError(
                    "json_schema, regex and grammar require a tokenizer; this model has none"
                )
            request.guide = self.guides.open(sampling)
        self.scheduler.add(request)
        if adapter is not None:
            adapter.requests += 1
        return request

    def step(self) -> list[Request]:
        """Compute one step: schedule, run, postprocess. The requests that got tokens.

        Finished requests have `finish` set. A pipelined runner starts further steps before the
        oldest is finished.
        """
        with self._host_time.step():
            requests = self._step()
        self.counts.host_s = self._host_time.seconds
        return requests

    def _step(self) -> list[Request]:
        while len(self._in_flight) < self.runner.depth and (plan := self._schedule()) is not None:
            self._in_flight.append(self._run(plan))
        if not self._in_flight:
            return []
        step, host_time = self._in_flight.popleft(), self._host_time
        # ranks of a pipeline compute elsewhere
        with host_time.launches() if self.runner.depth == 1 else host_time.device_work():
            logits = step.logits()
        return self._postprocess(step, logits)

    def take_weights(self, version: int) -> None:
        """Continue with weights that replaced those of the model in place.

        Running requests keep their tokens; keys and values are computed again with the new weights.
        Raises RuntimeError while a step is in flight.
        """
        if self._in_flight:
            raise RuntimeError("weights changed during a step; finish all steps first")
        self.scheduler.take_weights(version)

    def adapters_in_use(self) -> set[Adapter]:
        """The adapters of running and waiting requests."""
        every = (*self.scheduler.running, *self.scheduler.waiting)
        return {request.adapter for request in every if request.adapter is not None}

    def abort(self, request: Request) -> None:
        """End a request and the other answers to its prompt.

        Their blocks are freed at once, or after the step that they are in.
        """
        self.beams.abort(request.parent)
        for other in [*self.scheduler.running, *self.scheduler.waiting]:
            if other.parent == request.parent:
                if other not in self.scheduler.in_flight_requests:
                    self._finish(other)
                other.finish = "aborted"
                if self.speculator is not None:
                    self.speculator.forget(other)

    def _schedule(self) -> StepPlan | None:
        """The plan of the next step, None if there is nothing to compute."""
        if self.speculator is not None:
            in_flight = self.scheduler.in_flight_requests
            idle = [request for request in self.scheduler.running if request not in in_flight]
            self.speculator.request_drafts(idle)
        plan = self.scheduler.schedule()
        return plan if plan.scheduled else None

    def _run(self, plan: StepPlan) -> StepInFlight:
        """Start computing a step, after drafting."""
        draft_probs: Mapping[Request, Tensor] = {}
        with self._host_time.launches():
            if self.speculator is not None:
                plan, draft_probs = self.speculator.draft(plan)
            return StepInFlight(plan, draft_probs, time.perf_counter(), self.runner.start(plan))

    def _postprocess(self, step: StepInFlight, logits: Tensor) -> list[Request]:
        """Sample, append tokens, finish requests, update counts."""
        plan = step.plan
        decoding = {part.request for part in plan.scheduled if part.request.is_decoding}
        self.counts.steps += 1
        self.counts.prompt_tokens += sum(
            part.count for part in plan.scheduled if part.request not in decoding
        )
        self.scheduler.finish_step(plan)
        for part in plan.scheduled:
            if part.request.finish is not None:  # aborted during the step
                self._finish(part.request)
        scored = self._score_prompts(plan, logits)
        groups, indices = self._rows_to_sample(plan, logits)
        # a row may be used by several answers (n > 1) or by none (beams)
        in_order = indices == list(range(len(logits)))
        with self._host_time.device_work():  # it waits for the sampled ids
            logits = logits if in_order else logits[indices]
            sampled = verify_drafts(logits, groups, step.draft_probs)
        seconds = time.perf_counter() - step.began
        self.scheduler.record_step_time(plan, seconds)
        requests = [group[0].request for group in groups]
        accepted: dict[Request, int] = {}
        for request, tokens in zip(requests, sampled, strict=True):
            count = self._append_tokens(request, tokens)
            if request in decoding:
                accepted[request] = count
        self._count_drafts(plan, accepted)
        for request in (beam_answers := self.beams.advance()):
            self.counts.output_tokens += len(request.output_tokens)
        if self.speculator is not None:
            self.speculator.record(plan, accepted, seconds=seconds)
            for request in requests:
                if request.finish is not None:
                    self.speculator.forget(request)
        self._record_costs(step, decoding)
        return requests + beam_answers + scored

    def _record_costs(self, step: StepInFlight, decoding: Collection[Request]) -> None:
        """Record the time since the last step's end, with the delivery of its output."""
        now = time.perf_counter()
        if self.runner.depth == 1:  # else steps overlap
            began = step.began if self._busy_since is None else self._busy_since
            self.step_costs.record(step.plan, decoding, now - began)
        self._busy_since = now if self.busy else None

    def _rows_to_sample(self, plan: StepPlan, logits: Tensor) -> tuple[list[list[Row]], list[int]]:
        """The rows to sample, grouped by request, and the index of each row's logits."""
        groups: list[list[Row]] = []
        indices: list[int] = []
        first = 0
        for part in plan.scheduled:
            request = part.request
            end = first + part.rows
            rows, first = range(end - part.num_logits, end), end
            if request.finish is not None or not part.samples:
                continue
            if request.sampling.beams > 1:
                self.beams.add_logits(request, logits[rows[0]])
                continue
            groups.append([Row(request, ahead) for ahead in range(part.num_logits)])
            indices += rows
            for child in self._fork_answers(request):
                groups.append([Row(child)])
                indices += rows
        return groups, indices

    def _score_prompts(self, plan: StepPlan, logits: Tensor) -> list[Request]:
        """Add log-probabilities of prompt tokens and scores; the requests that want no more."""
        finished: list[Request] = []
        first = 0
        for part in plan.scheduled:
            request, start = part.request, first
            first += part.rows
            top = request.sampling.prompt_logprobs
            if not part.scored or request.finish is not None or top is None:
                continue
            rows = logits[start:first]
            done = len(request.prompt_scores)  # more than `start` after a preemption
            tokens = request.prompt[done + 1 : part.start + part.count + 1]
            low = done - part.start
            scored = rows[low : low + len(tokens)]
            request.prompt_scores += score_tokens(scored, tokens, top=top)
        last = -1
        for part in plan.scheduled:
            request = part.request
            last += part.rows
            if part.samples and request.sampling.pooled and request.finish is None:
                request.score = float(logits[last, 0])
            if part.samples and not request.sampling.max_new_tokens and request.finish is None:
                now = time.perf_counter()
                request.first_token_s, request.last_token_s = request.first_token_s or now, now
                request.finish = "stop" if request.sampling.pooled else "length"
                self._finish(request)
                finished.append(request)
        return finished

    def _fork_answers(self, request: Request) -> list[Request]:
        """The other answers to a prompt, created when the prompt is computed."""
        if len(request.tokens) > len(request.prompt):
            return []
        self.counts.cached_tokens += request.cached_tokens
        children = [
            Request(
                request.prompt,
                request.sampling,
                answer,
                request.number,
                added_s=request.added_s,
                adapter=request.adapter,
            )
            for answer in range(1, request.sampling.n)
        ]
        for child in children:
            child.guide = None if request.guide is None else request.guide.copy()
            child.prompt_scores = request.prompt_scores
        if children:
            self.scheduler.fork(request, children)
        return children

    def _append_tokens(self, request: Request, tokens: Sequence[SampledToken]) -> int:
        """Append a step's tokens until the request finishes; how many were accepted drafts."""
        now = time.perf_counter()
        request.first_token_s, request.last_token_s = request.first_token_s or now, now
        appended = 0
        for token in tokens:
            self._append(request, token)
            appended += 1
            if request.finish is not None:
                break
        self.counts.output_tokens += appended
        accepted = min(appended, len(tokens) - 1)
        self.scheduler.accept(request, accepted)
        if request.finish is not None:
            self._finish(request)
        return accepted

    def _append(self, request: Request, sampled: SampledToken) -> None:
        params, guide = request.sampling, request.guide
        request.tokens.append(sampled.token)
        if guide is not None:
            guide.advance(sampled.token)
        if sampled.logprob is not None:
            request.logprobs.append(sampled.logprob)
            request.token_versions.append(request.weight_version)
            request.top_logprobs.append(sampled.top)
        if sampled.token in params.stop_token_ids and not params.ignore_eos:
            request.finish = "stop"
        elif params.stop and self._decode is not None:
            text = self._texts.setdefault(request, IncrementalText(self._decode, params.stop))
            request.finish = "stop" if text.add(sampled.token) else None
        if request.finish is None and guide is not None and guide.complete:
            request.finish = "length" if guide.failed else "stop"
        if request.finish is None and len(request.output_tokens) >= params.max_new_tokens:
            request.finish = "length"

    def _count_drafts(self, plan: StepPlan, accepted: Mapping[Request, int]) -> None:
        for part in plan.scheduled:
            part.request.drafted += part.num_drafts
            part.request.accepted += accepted.get(part.request, 0)
            self.counts.drafted += part.num_drafts
        self.counts.decode_steps += len(accepted)
        self.counts.accepted += sum(accepted.values())

    def _finish(self, request: Request) -> None:
        request.ended_s = time.perf_counter()
        self.scheduler.remove(request)
        self._texts.pop(request, None)

    def _check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        vocab = self.runner.vocab
        room = min(1, sampling.max_new_tokens)
        check_prompt(prompt, context=self.context, vocab=vocab, room=room)
        if sampling.stop and self._decode is None:
            raise ValueError(
                "stop strings require a tokenizer and this model has none; use stop token ids"
            )
        first_error = next((token for token in sampling.logit_bias if not 0 <= token < vocab), None)
        if first_error is not None:
            raise ValueError(
                f"logit_bias has the token id {first_error}; the model's ids are 0 to {vocab - 1}"
            )
