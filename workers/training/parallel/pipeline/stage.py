"""One stage of a pipeline as torch's schedules want it: a part of the model, the shapes at its
ends, what it tells.

Does not know the order in which schedules call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from workers.models.layers.documents import Documents

# kind of action, stage, micro-batch -> what surrounds it
Around = Callable[[str, int, int], AbstractContextManager[Any]]
# micro-batch -> its documents, which every rank has with its data, so that they need not travel
Packed = Callable[[int], Documents | None]


@contextmanager
def plainly() -> Iterator[None]:
    """Torch wraps what a stage raises into a RuntimeError; its cause tells an exhausted memory from
    a mistake.
    """
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "ailed to run" in str(error):
            raise error.__cause__ from None
        raise


class Stage(PipelineStage):
    """A part under the eyes of whoever `around` is: F, B, I (input gradient alone) and W (weight
    gradient).

    Shapes are told beforehand, so that no forward pass is run only to learn them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        stages: int,
        ends: tuple[Tensor, Tensor],
        group: Any,
        device: torch.device,
        around: Around,
        packed: Packed = lambda micro_batch: None,
    ) -> None:
        inputs, outputs = ends
        super().__init__(
            module, index, stages, device, input_args=inputs, output_args=outputs, group=group
        )
        self.around, self.packed = around, packed
        self._documents: Documents | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._documents = self.packed(fwd_chunk_id)
        with plainly(), self.around("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """What goes through the module.

        Were they among the chunk's arguments, torch would look for their gradients.
        """
        plain: Any = super().forward_maybe_with_nosync
        return plain(*args, self._documents, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with (
            plainly(),
            self.around(
                "B" if kwargs.get("full_backward", True) else "I", self.stage_index, bwd_chunk_id
            ),
        ):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with plainly(), self.around("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
