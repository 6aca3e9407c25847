"""A module of a tensor-parallel model: its parameters are DTensors, its forward pass runs on the
local parts of them.

So the model's own code, and whatever kernel or number format stands in a linear's place, sees plain
tensors. What
enters and leaves is redistributed once: two collectives forward and two backward for attention and
MLP together
(Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2). Torch's
column- and row-wise styles meet each linear by itself: an all-reduce each for the gradients of q, k
and v, and one more
for each latent. Does not know which module wants what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

Take = Callable[[Tensor], Tensor]
Travel = Callable[[Tensor, DeviceMesh], Tensor]


@dataclass(frozen=True, slots=True)
class ParameterSharding:
    """How a parameter lies over the axis, how its gradient does, and what of the local part the
    forward pass uses.
    """

    placement: Placement
    gradient: Placement
    take: Take | None = None


def sharded(dim: int) -> ParameterSharding:
    return ParameterSharding(Shard(dim), Shard(dim))


# used by every rank alike: each has the whole gradient
ALIKE = ParameterSharding(Replicate(), Replicate())
# used by every rank for its own heads, columns or tokens: the gradient is the sum over ranks
# (`gradients.sum_partial`)
SUMMED = ParameterSharding(Replicate(), Partial())


class Region(ParallelStyle):
    """`held` by parameter name within the module, `other` for those not named; `enter` and `leave`
    treat what goes in
    first and what comes out. What an inner region holds already stays its own."""

    def __init__(
        self,
        held: Mapping[str, ParameterSharding],
        *,
        enter: Travel | None = None,
        leave: Travel | None = None,
        other: ParameterSharding = SUMMED,
    ) -> None:
        super().__init__()
        self.held, self.enter, self.leave, self.other = held, enter, leave, other

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        places = []
        for path, each in module.named_modules():
            for name, parameter in list(each.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    continue
                held = self.held.get(f"{path}.{name}" if path else name, self.other)
                distribute(each, name, parameter, held.placement, device_mesh)
                places.append((each, name, held))
        plain = module.forward

        def forward(first: Tensor, *rest: Any) -> Any:
            if self.enter is not None:
                first = self.enter(first, device_mesh)
            with _local_parameters(places):
                out = plain(first, *rest)
            return out if self.leave is None else self.leave(out, device_mesh)

        module.forward = forward
        return module


def distribute(
    module: nn.Module, name: str, parameter: Tensor, placement: Placement, mesh: DeviceMesh
) -> None:
    """Put a DTensor in a parameter's place; nothing travels, each rank keeps its own part."""
    lying = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(lying, requires_grad=parameter.requires_grad))


def gathered(outside: Placement) -> Travel:
    """What lies outside in `outside` (Replicate, or Shard(1) of the sequence) is whole inside, its
    gradient partial.
    """

    def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
        whole = DTensor.from_local(x, mesh, [outside], run_check=False).redistribute(
            placements=[Replicate()]
        )
        return whole.to_local(grad_placements=[Partial()])

    return enter


def reduced(outside: Placement) -> Travel:
    """Partial sums inside, summed into `outside`."""

    def leave(x: Tensor, mesh: DeviceMesh) -> Tensor:
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[outside]).to_local()

    return leave


def whole_dtensor(outside: Placement) -> Travel:
    """What lies in `outside` becomes a whole DTensor, for a linear that is met as one."""

    def leave(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, mesh, [outside], run_check=False).redistribute(
            placements=[Replicate()]
        )

    return leave


@contextmanager
def _local_parameters(places: list[tuple[nn.Module, str, ParameterSharding]]) -> Iterator[None]:
    """Local parts in the parameters' place.

    What stood there (a parameter, a cast copy of it) comes back after.
    """
    stood = [module._parameters[name] for module, name, _ in places]
    try:
        for (module, name, held), parameter in zip(places, stood, strict=True):
            lying: Any = parameter
            # experts lie over their own axis first
            local: Tensor = lying.to_local(grad_placements=[*lying.placements[:-1], held.gradient])
            module._parameters[name] = cast(
                nn.Parameter, local if held.take is None else held.take(local)
            )
        yield
    finally:
        for (module, name, _), parameter in zip(places, stood, strict=True):
            module._parameters[name] = parameter


def rows(start: int, stop: int) -> Take:
    """The part of a replicated parameter that this rank's heads need."""
    return lambda parameter: parameter[start:stop]


def once(rank: int) -> Take:
    """Of a bias that is added to partial sums: on one rank alone."""
    return lambda bias: bias if rank == 0 else bias * 0.0
