"""One pipeline stage for torch's schedules: a model part with known input and output shapes.

Does not depend on the order in which schedules call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from workers.models.layers.documents import Documents

# (kind of action, stage, micro-batch index) -> context around it
Around = Callable[[str, int, int], AbstractContextManager[Any]]
# micro-batch index -> its documents; every rank loads them with its data, so they are not sent
DocumentsOf = Callable[[int], Documents | None]


@contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Raise the original error of a stage; torch wraps it into a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "ailed to run" in str(error):
            raise error.__cause__ from None
        raise


class Stage(PipelineStage):
    """A part whose actions run inside `around`: F, B, I (input gradient only), W (weight gradient).

    Shapes are given, so no forward pass is needed to infer them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        stages: int,
        boundary: tuple[Tensor, Tensor],
        group: Any,
        device: torch.device,
        around: Around,
        documents: DocumentsOf = lambda index: None,
    ) -> None:
        inputs, outputs = boundary
        super().__init__(
            module, index, stages, device, input_args=inputs, output_args=outputs, group=group
        )
        self.around, self.documents_of = around, documents
        self._documents: Documents | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Action F."""
        self._documents = self.documents_of(fwd_chunk_id)
        with unwrapped_errors(), self.around("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the documents added.

        As chunk arguments, torch would look for their gradients.
        """
        plain: Any = super().forward_maybe_with_nosync
        return plain(*args, self._documents, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Action B or I."""
        kind = "B" if kwargs.get("full_backward", True) else "I"
        with unwrapped_errors(), self.around(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Action W."""
        with unwrapped_errors(), self.around("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
