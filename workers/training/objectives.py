"""What is minimised: the token loss of a micro-batch.

Does not know where micro-batches come from, or what multiplies the loss. Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from workers.training.batches import IGNORED
from workers.training.cross_entropy import cross_entropy


def token_losses(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy summed over each row's tokens, `[B]` in fp32; targets IGNORED count nothing."""
    return _each(logits_BSV, targets_BS).view_as(targets_BS).sum(dim=1)


def token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """The sum over all tokens, in fp32."""
    return _each(logits_BSV, targets_BS).sum()


def _each(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy of each token, `[B · S]`, over logits that may be sharded over the vocabulary, and are used up."""
    if _is_sharded(logits_BSV):
        from workers.training.tensor import vocabulary

        return vocabulary.cross_entropy(logits_BSV, targets_BS.flatten(), ignored=IGNORED)
    return cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), ignored=IGNORED)


def _is_sharded(logits: Tensor) -> bool:
    return hasattr(logits, "to_local")
