"""Log-probabilities of an iteration's answers by the trained model and by its reference.

Computed by the training engine under its plan, without gradients. Shapes: S positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.posttraining.reinforcement.rows import AnswerRows, RolloutRows
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import matmul_context
from workers.training.objectives.policy import Policy, TokenPolicy
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.context.apply import rank_positions
from workers.training.parallel.mesh import Axis
from workers.training.parallel.pipeline.stage_transfer import pipeline_outputs, score_reference


@torch.no_grad()
def score_answers(
    context: StepContext, rows: RolloutRows, *, policy: bool, reference: bool
) -> None:
    """Set `old_logprobs` and `reference_logprobs` of all rollouts, if requested. Collective."""
    objective = context.objective
    assert isinstance(objective, Policy)
    samples = AnswerRows(rows)
    count, device = samples.windows, context.world.device
    # [0]: by the policy, [1]: by the reference; every target is filled by one rank
    filled = torch.zeros(2, count, samples.seq_len, device=device)
    cp = context.world.axis("cp")
    fills = context.world.axis("tp").rank == 0
    modules = context.parallel.modules
    for module in modules:
        module.eval()
    for microbatch in context.microbatches(0, count):
        context.progress.enter("scoring")
        batch = context.load(samples, microbatch)
        with matmul_context(context.run.plan.precision, device):
            parts = []
            if policy:
                parts.append((0, _policy_losses(context, objective, batch)))
            if reference:
                parts.append((1, _reference_losses(context, batch)))
        rows_here = slice(microbatch.first, microbatch.first + microbatch.count)
        for kind, losses in parts:
            if fills and microbatch.count and losses is not None:
                fill_rows(filled[kind, rows_here], -losses.float(), batch, cp)
    context.parallel.release_gathered()
    for module in modules:
        module.train()
    total = context.world.sum_(filled).cpu().numpy()
    for number, rollout in enumerate(rows.rollouts):
        span = rows.span(number)
        if policy:
            rollout.old_logprobs = total[0, number, span].tolist()
        if reference:
            rollout.reference_logprobs = total[1, number, span].tolist()


def _policy_losses(context: StepContext, objective: Policy, batch: Batch) -> Tensor | None:
    """The cross-entropy of each target; None on ranks without the pipeline's last stage."""
    if context.world.axis("pp").size > 1:
        logits = pipeline_outputs(context, batch)
        return None if logits is None else objective.scaled_losses(logits, batch)
    [module] = context.parallel.modules
    if context.loss_from_hidden and isinstance(objective, TokenPolicy):
        losses: Tensor = module(batch.inputs, batch.documents, batch.targets, True)
        return losses
    return objective.scaled_losses(module(batch.inputs, batch.documents), batch)


def _reference_losses(context: StepContext, batch: Batch) -> Tensor | None:
    """As `_policy_losses`, by the frozen module."""
    if context.world.axis("pp").size > 1:
        scored = score_reference(context, batch).reference
    else:
        scored = context.score_reference(batch).reference
    assert scored is None or isinstance(scored, Tensor)
    return scored


def fill_rows(rows_NS: Tensor, own: Tensor, batch: Batch, cp: Axis) -> None:
    """Write the values at this rank's positions of a batch into its rows of full length."""
    if batch.places is not None:
        rows_NS.view(-1)[batch.places] = own.flatten()[: len(batch.places)]
        return
    own = own[: len(rows_NS)]
    if cp.size > 1:
        rows_NS[:, rank_positions(batch.length, cp, own.device)] = own
    else:
        rows_NS[:, : batch.length] = own
