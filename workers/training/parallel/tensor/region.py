"""A module of a tensor-parallel model: its parameters are DTensors, its forward uses local shards.

So the model's own code, and any kernel or variant of a linear layer, works on plain tensors. Inputs
and outputs are redistributed once: two collectives forward and two backward for attention and MLP
together (Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2). Torch's column- and row-wise styles redistribute per linear layer: an
all-reduce each for the gradients of q, k and v, and one more per latent. Does not depend on which
module has which sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from workers.models.wrapped import Inner, wrapped

LocalView = Callable[[Tensor], Tensor]
Redistribute = Callable[[Tensor, DeviceMesh], Tensor]
Around = Callable[[nn.Module, Tensor], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class ParameterSharding:
    """Placements of a parameter and of its gradient; `view` selects what the forward pass uses."""

    placement: Placement
    gradient: Placement
    view: LocalView | None = None


def sharded(dim: int) -> ParameterSharding:
    """Sharded over `dim`."""
    return ParameterSharding(Shard(dim), Shard(dim))


# used alike on every rank: each computes the full gradient
REPLICATED = ParameterSharding(Replicate(), Replicate())
# used on every rank for its own heads, columns or tokens: the gradient is a sum over ranks
# (`gradient_sums.sum_partial`)
SUMMED = ParameterSharding(Replicate(), Partial())


def unchanged(module: nn.Module, first: Tensor) -> AbstractContextManager[None]:
    """A `Region`'s `around` that does nothing."""
    return nullcontext()


class Region(ParallelStyle):
    """Shards a module, replaced by its wrapped variant: `parameters` by name, `other` for the rest.

    `enter` redistributes the first argument, `leave` the output; `around` surrounds both.
    Parameters of an inner region stay its own.
    """

    def __init__(
        self,
        parameters: Mapping[str, ParameterSharding],
        *,
        enter: Redistribute | None = None,
        leave: Redistribute | None = None,
        other: ParameterSharding = SUMMED,
        around: Around = unchanged,
    ) -> None:
        super().__init__()
        self.parameters, self.enter, self.leave = parameters, enter, leave
        self.other, self.around = other, around

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        places: list[tuple[nn.Module, str, ParameterSharding]] = []
        module = wrapped(module, _Redistributed(self, places, device_mesh))
        for path, owner in module.named_modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    continue
                sharding = self.parameters.get(f"{path}.{name}" if path else name, self.other)
                distribute(owner, name, parameter, sharding.placement, device_mesh)
                places.append((owner, name, sharding))
        return module


@dataclass(frozen=True, slots=True)
class _Redistributed:
    """The wrapper of a region's module."""

    region: Region
    places: list[tuple[nn.Module, str, ParameterSharding]]
    mesh: DeviceMesh

    def __call__(self, module: nn.Module, inner: Inner, /, first: Tensor, *rest: Any) -> Any:
        region = self.region
        with region.around(module, first):
            if region.enter is not None:
                first = region.enter(first, self.mesh)
            with _local_parameters(self.places):
                out = inner(first, *rest)
            return out if region.leave is None else region.leave(out, self.mesh)


def distribute(
    module: nn.Module, name: str, parameter: Tensor, placement: Placement, mesh: DeviceMesh
) -> None:
    """Replace a parameter by a DTensor; no communication, each rank keeps its own shard."""
    distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(
        name, nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    )


def gathered(outside: Placement) -> Redistribute:
    """From `outside` (Replicate, or Shard(1) of the sequence) to replicated; its gradient is
    partial.
    """

    def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
        full = DTensor.from_local(x, mesh, [outside], run_check=False).redistribute(
            placements=[Replicate()]
        )
        return full.to_local(grad_placements=[Partial()])

    return enter


def reduced(outside: Placement) -> Redistribute:
    """From partial sums to `outside`."""

    def leave(x: Tensor, mesh: DeviceMesh) -> Tensor:
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[outside]).to_local()

    return leave


def replicated_dtensor(outside: Placement) -> Redistribute:
    """From `outside` to a replicated DTensor, for a linear layer that takes DTensors."""

    def leave(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, mesh, [outside], run_check=False).redistribute(
            placements=[Replicate()]
        )

    return leave


@contextmanager
def _local_parameters(places: list[tuple[nn.Module, str, ParameterSharding]]) -> Iterator[None]:
    """Local shards in place of the parameters, or of what replaced them (a cast copy)."""
    # frozen weights in 4 bits are buffers, already this rank's shard
    places = [place for place in places if place[1] in place[0]._parameters]
    originals = [module._parameters[name] for module, name, _ in places]
    try:
        for (module, name, sharding), parameter in zip(places, originals, strict=True):
            dtensor: Any = parameter
            # experts are sharded over their own axis first
            local: Tensor = dtensor.to_local(
                grad_placements=[*dtensor.placements[:-1], sharding.gradient]
            )
            module._parameters[name] = cast(
                nn.Parameter, local if sharding.view is None else sharding.view(local)
            )
        yield
    finally:
        for (module, name, _), parameter in zip(places, originals, strict=True):
            module._parameters[name] = parameter


def rows(start: int, stop: int) -> LocalView:
    """The rows of a replicated parameter that this rank's heads use."""
    return lambda parameter: parameter[start:stop]


def first_rank_only(rank: int) -> LocalView:
    """A bias that is added to partial sums: nonzero on one rank only."""
    return lambda bias: bias if rank == 0 else bias * 0.0
