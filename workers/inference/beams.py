"""Beam search: the likeliest whole answers, by following several beginnings of one at a time.

A beam is a request that shares the others' blocks; beams of one prompt go on together. Knows
scores; where keys and
values lie is the scheduler's. The same answers as transformers' beam search gives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.inference.request import Request
from workers.inference.scheduler import Scheduler

_NEVER = -1e9


@dataclass(slots=True)
class Group:
    """Beams of the request that was `asked`, the best first, with the sum of their
    log-probabilities.
    """

    asked: Request
    running: list[tuple[Request, float]]
    # score by length, new tokens; the best first
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    logits: dict[Request, Tensor] = field(default_factory=dict)
    improvable: bool = True


class Beams:
    """`offer` what each step computed, then `advance`. A beam whose logits are there waits for the
    others of its group,
    which blocks or a step's tokens may hold up; one that is preempted meanwhile is computed and
    offered again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.groups: dict[int, Group] = {}

    def offer(self, request: Request, logits_V: Tensor) -> None:
        group = self.groups.setdefault(request.parent, Group(request, [(request, 0.0)]))
        group.logits[request] = logits_V

    def advance(self) -> list[Request]:
        """Let every group go on that is complete; the answers, `n` each, of those that have ended."""
        answers: list[Request] = []
        for number, group in list(self.groups.items()):
            if len(group.logits) == len(group.running) and self._ends(group):
                del self.groups[number]
                answers += _answers(group)
        return answers

    def abort(self, parent: int) -> None:
        group = self.groups.pop(parent, None)
        if group is not None:
            group.asked.finish = "aborted"

    def _ends(self, group: Group) -> bool:
        asked = group.asked.sampling
        beams, ends = asked.beams, () if asked.ignore_eos else asked.ends
        length = len(group.running[0][0].new_tokens) + 1
        scores = torch.stack(
            [group.logits[beam].log_softmax(-1) + score for beam, score in group.running]
        )
        group.logits.clear()
        # so many, that enough go on where as many as can be have ended
        values, places = scores.flatten().topk(min((1 + max(1, len(ends))) * beams, scores.numel()))
        going: list[tuple[float, int, int]] = []
        full = asked.early_stopping and len(group.ended) == beams
        for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            beam, token = divmod(place, scores.shape[1])
            if length < asked.max_new_tokens and token not in ends:
                going.append((value, beam, token))
            elif rank < beams and not full and group.improvable:
                tokens = [*group.running[beam][0].new_tokens, token]
                group.ended.append((value / length**asked.length_penalty, tokens))
        group.ended = sorted(group.ended, key=lambda each: -each[0])[:beams]
        going = going[:beams]
        all_ended = len(group.ended) == beams
        worst = group.ended[-1][0] if all_ended else _NEVER
        group.improvable = (
            group.improvable and bool(going) and going[0][0] / length**asked.length_penalty > worst
        )
        if not going or not group.improvable or (asked.early_stopping and all_ended):
            for beam, _ in group.running:
                self.scheduler.remove(beam)
            return True
        self._go_on(group, going)
        return False

    def _go_on(self, group: Group, going: list[tuple[float, int, int]]) -> None:
        """The first that follows a beam takes its place, others fork from it; a beam that none
        follows ends.
        """
        before, running = group.running, []
        followed: set[int] = set()
        for value, place, token in going:
            beam = before[place][0]
            if place in followed:
                child = Request(
                    beam.prompt, beam.sampling, parent=beam.parent, added_s=beam.added_s
                )
                child.tokens = beam.tokens[:-1]  # the one that took its place has gone on already
                child.preemptions = beam.preemptions
                self.scheduler.fork(beam, [child])
                beam = child
            followed.add(place)
            beam.tokens.append(token)
            running.append((beam, value))
        for place, (beam, _) in enumerate(before):
            if place not in followed:
                self.scheduler.remove(beam)
        group.running = running


def _answers(group: Group) -> list[Request]:
    asked, now = group.asked, time.perf_counter()
    found: list[Request] = []
    for answer, (_, tokens) in enumerate(group.ended[: asked.sampling.n]):
        each = asked if not answer else Request(asked.prompt, asked.sampling, answer, asked.parent)
        each.tokens = [*asked.prompt, *tokens]
        ended = tokens[-1] in asked.sampling.ends and not asked.sampling.ignore_eos
        each.finish = "stop" if ended else "length"
        each.added_s, each.first_token_s, each.last_token_s = asked.added_s, now, now
        found.append(each)
    return found
