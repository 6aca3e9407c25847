"""Drafts of an engine step: requested before planning, computed after it, evaluated at the end.

Combines a proposer with the choice of draft lengths. Does not depend on logits.
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
    """Per step: `request_drafts`, then `draft`, then `record`.

    Greedy answers, and answers with n-gram drafts, are the same tokens as without drafts; those
    with sampled drafts have the same distribution (`verify`). With a draft model and a temperature
    above 0 the same request and seed give the same tokens in any batch, if lengths are not adaptive
    and neither blocks nor the step's tokens run out; adaptive lengths depend on measured times.
    """

    def __init__(self, proposer: Proposer, *, tokens: int, adaptive: bool = True) -> None:
        self.proposer = proposer
        self.lengths = Lengths(tokens, adaptive=adaptive)

    def request_drafts(self, running: Sequence[Request]) -> None:
        """Set `max_drafts` of each decoding request for the next step."""
        decoding = [r for r in running if r.is_decoding and r.sampling.beams == 1]
        for request, length in zip(decoding, self.lengths.choose(decoding), strict=True):
            # a step brings one token more than it accepts, so the last token needs no draft
            most = min(length, request.sampling.max_new_tokens - len(request.output_tokens) - 1)
            request.draft, request.max_drafts = [], 0
            if most > 0:
                request.max_drafts = self.proposer.count_drafts(request, most)

    def draft(self, plan: StepPlan) -> tuple[StepPlan, Mapping[Request, Tensor]]:
        """The plan with all drafts set, and the probabilities of the sampled ones."""
        drafting = [part for part in plan.scheduled if part.num_drafts]
        proposal = self.proposer.propose(plan.scheduled, drafting)
        for tokens, seconds in proposal.passes:
            self.lengths.draft.add(tokens, seconds)
        if proposal.late:
            plan = replace(
                plan,
                scheduled=tuple(
                    _without_drafts(part) if part.request in proposal.late else part
                    for part in plan.scheduled
                ),
            )
        return plan, proposal.draft_probs

    def record(self, plan: StepPlan, accepted: Mapping[Request, int], *, seconds: float) -> None:
        """Record the accepted tokens of each draft and the duration of the model's own pass."""
        # a step with prompts does not measure decoding
        if all(part.request in accepted for part in plan.scheduled):
            self.lengths.target.add(plan.tokens, seconds)
        for part in plan.scheduled:
            if part.num_drafts:
                self.lengths.record(
                    part.request, accepted=accepted[part.request], drafted=part.num_drafts
                )

    def forget(self, request: Request) -> None:
        """Drop a finished request."""
        self.proposer.forget(request)
        self.lengths.forget(request)


def _without_drafts(part: ScheduledTokens) -> ScheduledTokens:
    return replace(part, count=part.count - part.num_drafts, num_logits=1)
