"""Beam search: the likeliest answers as a whole, by extending several hypotheses per prompt.

A beam is a request that shares cache blocks with the others of its group; all beams of a group
advance together. Gives the same answers as transformers' beam search.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.inference.request import Request
from workers.inference.scheduling.scheduler import Scheduler

_WORST_SCORE = -1e9


@dataclass(slots=True)
class BeamGroup:
    """The beams of one `request`, the best first, with their sums of log-probabilities."""

    request: Request
    running: list[tuple[Request, float]]
    # length-normalized score and output tokens, the best first
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    logits: dict[Request, Tensor] = field(default_factory=dict)
    improvable: bool = True


class BeamSearch:
    """Call `add_logits` for each computed beam, then `advance`.

    A beam with logits waits for the others of its group, which may lack blocks or budget. A beam
    that is preempted meanwhile is computed and added again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.groups: dict[int, BeamGroup] = {}

    def add_logits(self, request: Request, logits_V: Tensor) -> None:
        """Record the logits after a beam's tokens."""
        group = self.groups.setdefault(request.parent, BeamGroup(request, [(request, 0.0)]))
        group.logits[request] = logits_V

    def advance(self) -> list[Request]:
        """Extend every complete group; the `n` answers of each group that is finished."""
        answers: list[Request] = []
        for number, group in list(self.groups.items()):
            if len(group.logits) == len(group.running) and self._extend(group):
                del self.groups[number]
                answers += _answers(group)
        return answers

    def abort(self, parent: int) -> None:
        """Drop the group of this request."""
        group = self.groups.pop(parent, None)
        if group is not None:
            group.request.finish = "aborted"

    def _extend(self, group: BeamGroup) -> bool:
        """One token more for every beam; whether the group is finished."""
        params = group.request.sampling
        beams, ends = params.beams, () if params.ignore_eos else params.stop_token_ids
        length = len(group.running[0][0].output_tokens) + 1
        scores = torch.stack(
            [group.logits[beam].log_softmax(-1) + score for beam, score in group.running]
        )
        group.logits.clear()
        # enough candidates that `beams` continue even if as many as possible end
        count = min((1 + max(1, len(ends))) * beams, scores.numel())
        values, indices = scores.flatten().topk(count)
        continuing: list[tuple[float, int, int]] = []
        full = params.early_stopping and len(group.finished) == beams
        for rank, (value, index) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
            beam, token = divmod(index, scores.shape[1])
            if length < params.max_new_tokens and token not in ends:
                continuing.append((value, beam, token))
            elif rank < beams and not full and group.improvable:
                tokens = [*group.running[beam][0].output_tokens, token]
                group.finished.append((value / length**params.length_penalty, tokens))
        group.finished = sorted(group.finished, key=lambda answer: -answer[0])[:beams]
        continuing = continuing[:beams]
        is_full = len(group.finished) == beams
        worst = group.finished[-1][0] if is_full else _WORST_SCORE
        group.improvable = (
            group.improvable
            and bool(continuing)
            and continuing[0][0] / length**params.length_penalty > worst
        )
        if not continuing or not group.improvable or (params.early_stopping and is_full):
            for request, _ in group.running:
                self.scheduler.remove(request)
            return True
        self._continue(group, continuing)
        return False

    def _continue(self, group: BeamGroup, continuing: list[tuple[float, int, int]]) -> None:
        """The first continuation of a beam reuses its request, others fork it; the rest end."""
        before, running = group.running, []
        continued: set[int] = set()
        for value, place, token in continuing:
            beam = before[place][0]
            if place in continued:
                child = Request(
                    beam.prompt,
                    beam.sampling,
                    parent=beam.parent,
                    added_s=beam.added_s,
                    adapter=beam.adapter,
                )
                child.tokens = beam.tokens[:-1]  # the request has its new token already
                child.preemptions = beam.preemptions
                self.scheduler.fork(beam, [child])
                beam = child
            continued.add(place)
            beam.tokens.append(token)
            running.append((beam, value))
        for place, (beam, _) in enumerate(before):
            if place not in continued:
                self.scheduler.remove(beam)
        group.running = running


def _answers(group: BeamGroup) -> list[Request]:
    first, now = group.request, time.perf_counter()
    params = first.sampling
    answers: list[Request] = []
    for index, (_, tokens) in enumerate(group.finished[: params.n]):
        answer = first if not index else Request(first.prompt, params, index, first.parent)
        answer.tokens = [*first.prompt, *tokens]
        stopped = tokens[-1] in params.stop_token_ids and not params.ignore_eos
        answer.finish = "stop" if stopped else "length"
        answer.added_s, answer.first_token_s, answer.last_token_s = first.added_s, now, now
        answers.append(answer)
    return answers
