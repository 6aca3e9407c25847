"""Cross-entropy of each token from logits, complete or sharded over the vocabulary.

Does not depend on data, objectives or loss scaling. Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import runtime
from kernels.dispatch import Candidate, choose
from workers.contracts.specs.plan import ParallelPlan
from workers.training.numerics.cross_entropy import cross_entropy
from workers.training.parallel.batch_sharding import IGNORED


def token_losses(logits_BSV: Tensor, targets_BS: Tensor, *, fused: bool = True) -> Tensor:
    """Cross-entropy of each token, `[B, S]` fp32; 0 for targets IGNORED. Overwrites the logits.

    Without `fused`: torch's function, which stores more tensors of the logits' size.
    """
    if _is_sharded(logits_BSV):
        from workers.training.parallel.tensor import vocabulary

        losses_N = vocabulary.cross_entropy(logits_BSV, targets_BS.flatten(), ignored=IGNORED)
        return losses_N.view_as(targets_BS)
    logits_NV, targets_N = logits_BSV.float().flatten(0, 1), targets_BS.flatten()
    if fused:
        losses_N = cross_entropy(logits_NV, targets_N, ignored=IGNORED)
    else:
        losses_N = functional.cross_entropy(
            logits_NV, targets_N, ignore_index=IGNORED, reduction="none"
        )
    return losses_N.view_as(targets_BS)


def token_losses_at(
    logits_1RV: Tensor, targets_BS: Tensor, at_R: Tensor, *, fused: bool = True
) -> Tensor:
    """`token_losses` from the logits of the flattened positions `at_R`; 0 at all others."""
    targets = targets_BS.flatten()
    losses = token_losses(logits_1RV, targets[at_R].unsqueeze(0), fused=fused).flatten()
    every = losses.new_zeros(len(targets)).index_copy(0, at_R, losses)
    return every.view_as(targets_BS)


def token_loss(logits_BSV: Tensor, targets_BS: Tensor, *, fused: bool = True) -> Tensor:
    """The sum over all tokens, in fp32."""
    return token_losses(logits_BSV, targets_BS, fused=fused).sum()


def uses_hidden_states(plan: ParallelPlan, device: torch.device) -> bool:
    """Whether the loss is computed from hidden states, the head's product in chunks of tokens.

    The choice is recorded like every choice of kernels.
    """
    why = None
    if plan.pp > 1:
        why = "a pipeline's schedule takes logits from its last stage"
    elif runtime.mode(device) == "reference":
        why = f"full logits, overwritten in place, are faster on a {device.type.upper()}"
    facts: dict[str, object] = {"device": device.type, "sharded": plan.tp > 1}
    choice = choose("cross_entropy", facts, [Candidate("own", why), Candidate("torch")])
    return choice.backend == "own"


def _is_sharded(logits: Tensor) -> bool:
    return hasattr(logits, "to_local")
