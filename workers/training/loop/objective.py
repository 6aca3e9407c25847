"""The training objective: the token loss of a micro-batch.

Does not depend on data or on loss scaling. Shapes: B batch, S sequence, V vocabulary.
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
    """Cross-entropy summed over each row's tokens, `[B]` fp32; targets IGNORED count nothing.

    Without `fused`: torch's function, which stores more tensors of the logits' size.
    """
    return _per_token(logits_BSV, targets_BS, fused).view_as(targets_BS).sum(dim=1)


def token_loss(logits_BSV: Tensor, targets_BS: Tensor, *, fused: bool = True) -> Tensor:
    """The sum over all tokens, in fp32."""
    return _per_token(logits_BSV, targets_BS, fused).sum()


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


def _per_token(logits_BSV: Tensor, targets_BS: Tensor, fused: bool) -> Tensor:
    """Cross-entropy of each token, `[B · S]`; overwrites the logits, which may be sharded over the
    vocabulary.
    """
    if _is_sharded(logits_BSV):
        from workers.training.parallel.tensor import vocabulary

        return vocabulary.cross_entropy(logits_BSV, targets_BS.flatten(), ignored=IGNORED)
    logits_NV, targets_N = logits_BSV.float().flatten(0, 1), targets_BS.flatten()
    if fused:
        return cross_entropy(logits_NV, targets_N, ignored=IGNORED)
    return functional.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="none")


def _is_sharded(logits: Tensor) -> bool:
    return hasattr(logits, "to_local")
