"""A second, frozen model next to the trained one: the reference or the teacher of an objective.

A module of its own is sharded like the trained one and stored in the compute dtype, without
gradients, optimizer state or dropout; of an adapter the frozen weights themselves are a model.
Does not depend on what its outputs are used for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workers.contracts.specs.model import ModelSource
from workers.metrics.memory import held_bytes, local_tensor
from workers.models.adapters.disable_adapter import disable_adapter
from workers.models.decoder import Decoder
from workers.models.weights.parameter_shapes import named_weights
from workers.training.setup.initial_weights import fill_from, open_initial


class FrozenModule:
    """This rank's parts of a frozen model. `use` is reference or teacher."""

    def __init__(
        self, parts: Sequence[Decoder], *, use: str, source: ModelSource | None = None
    ) -> None:
        """`source`: its weights; None: a copy of the trained module's initial weights."""
        self.parts, self.use, self.source = list(parts), use, source
        self.field = "train.distill.teacher" if use == "teacher" else "train.dpo.reference"

    @property
    def bytes(self) -> int:
        """Bytes of this rank's weights."""
        return held_bytes(each for part in self.parts for each in part.parameters())

    @torch.no_grad()
    def load(self, trained: Sequence[Decoder]) -> dict[str, Any]:
        """Fill the weights before the first step; returns what was loaded. Raises UserError."""
        if self.source is None:
            for ours, theirs in zip(self.parts, trained, strict=True):
                values = named_weights(theirs)
                for name, target in named_weights(ours).items():
                    local_tensor(target).copy_(local_tensor(values[name]))
            return {"path": "initial weights"}
        return fill_from(
            self.parts,
            open_initial(self.source, self.parts[0].spec, field=self.field),
            field=self.field,
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around its forward passes, after which gathered weights of a sharded module are freed."""
        with torch.no_grad():
            yield
        self._release_gathered()

    def _release_gathered(self) -> None:
        for part in self.parts:
            for module in part.modules():
                reshard: Any = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()


class AdapterOff(FrozenModule):
    """The trained module without its adapter: no second copy of the weights."""

    def __init__(self, parts: Sequence[Decoder]) -> None:
        super().__init__(parts, use="reference")

    @property
    def bytes(self) -> int:
        """None of its own."""
        return 0

    def load(self, trained: Sequence[Decoder]) -> dict[str, Any]:
        """Nothing: the weights are the trained module's frozen ones."""
        return {"path": "the model without its adapter"}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `FrozenModule`; gathered weights stay for the trained module's own pass."""
        training = [part.training for part in self.parts]
        for part in self.parts:
            part.eval()
        with torch.no_grad(), disable_adapter(self.parts):
            yield
        for part, was in zip(self.parts, training, strict=True):
            part.train(was)
