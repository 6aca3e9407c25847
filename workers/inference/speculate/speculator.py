"""Drafts around a step of the engine: asked for before it is planned, made once it is, judged when
it is computed.

Puts a way of drafting and the choice of lengths together; knows no logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from workers.inference.request import Request
from workers.inference.scheduling.step_plan import ScheduledTokens, StepPlan
from workers.inference.speculate.lengths import Lengths
from workers.inference.speculate.proposal import Proposer


class Speculator:
    """`wish`, then `draft`, then `judge`, once a step. Greedy answers are those without it, token
    for token, and so are
    those whose drafts are looked up; those whose drafts a model draws are so in distribution
    (`verify`).

    With a draft model and a temperature above 0 the same request and seed give the same tokens,
    whatever runs beside
    it, where lengths are not adaptive and neither blocks nor the step's tokens run out; adaptive
    lengths follow
    measured times.
    """

    def __init__(self, proposer: Proposer, *, tokens: int, adaptive: bool = True) -> None:
        self.proposer = proposer
        self.lengths = Lengths(tokens, adaptive=adaptive)

    def wish(self, running: Sequence[Request]) -> None:
        """How many tokens of each that decodes are to be drafted in the next step."""
        decoding = [each for each in running if each.is_decoding and each.sampling.beams == 1]
        for request, length in zip(decoding, self.lengths.of(decoding), strict=True):
            # the last token of an answer needs no draft: a step brings one more than it accepts
            most = min(length, request.sampling.max_new_tokens - len(request.output_tokens) - 1)
            request.draft, request.max_drafts = [], 0
            if most > 0:
                request.max_drafts = self.proposer.room(request, most)

    def draft(self, plan: StepPlan) -> tuple[StepPlan, Mapping[Request, Tensor]]:
        """The plan with every draft made, and what those that were drawn were drawn from."""
        drafting = [each for each in plan.scheduled if each.num_drafts]
        made = self.proposer.propose(plan.scheduled, drafting)
        for tokens, seconds in made.passes:
            self.lengths.draft.add(tokens, seconds)
        if made.late:
            plan = replace(
                plan,
                scheduled=tuple(
                    _without(each) if each.request in made.late else each for each in plan.scheduled
                ),
            )
        return plan, made.drawn_from

    def judge(self, plan: StepPlan, accepted: Mapping[Request, int], *, seconds: float) -> None:
        """How many tokens of each draft stayed, and what the model's own pass and the choosing
        took.
        """
        # prompts in the step: no measure of decoding
        if all(each.request in accepted for each in plan.scheduled):
            self.lengths.target.add(plan.tokens, seconds)
        for each in plan.scheduled:
            if each.num_drafts:
                self.lengths.judged(
                    each.request, accepted=accepted[each.request], drafted=each.num_drafts
                )

    def forget(self, request: Request) -> None:
        self.proposer.forget(request)
        self.lengths.forget(request)


def _without(given: ScheduledTokens) -> ScheduledTokens:
    return replace(given, count=given.count - given.num_drafts, num_logits=1)
