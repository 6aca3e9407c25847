"""The part of a model that one rank holds: its stage's layers, and its shard of each.

Shards follow `models.tensor_parallel_plan` and are taken before weights are read, so that no rank
holds more. Every rank of a stage has its norms; the first and last stage have their full tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.contracts.specs.inference_support import RankPlacement
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.inference.parallel.groups import RankGroup, connection_errors
from workers.inference.quantize.tensor_parallel import check_shape, inputs, outputs
from workers.models.decoder import Decoder, ModelPart
from workers.models.hf.quantized_formats import Packed
from workers.models.initialize import fill_parameter
from workers.models.tensor_parallel_plan import ParameterShard, block_plan
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import Weights
from workers.runtime.exit_codes import UserError


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `parts` along `dim`.

    `dim` None: a bias that is added once, replicated on the first rank and 0 on the others.
    """

    dim: int | None
    parts: int = 1
    index: int = 0

    def take(self, tensor: Tensor) -> Tensor:
        """This shard of a full tensor."""
        if self.dim is None:
            return tensor if self.index == 0 else torch.zeros_like(tensor)
        start, stop = self.span(tensor.shape[self.dim])
        return tensor.narrow(self.dim, start, stop - start).contiguous()

    def span(self, size: int) -> tuple[int, int]:
        """Start and stop along a dim of `size`; the first shards get one more if it is uneven."""
        length, more = divmod(size, self.parts)
        start = self.index * length + min(self.index, more)
        return start, start + length + (self.index < more)


class AllReduceOutput:
    """A forward hook that sums a module's partial outputs over the ranks of `group`.

    Copies of the module share the group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """The hook."""
        with connection_errors():
            dist.all_reduce(out, group=self.group)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> AllReduceOutput:
        return self


class ShardedWeights:
    """This rank's shards of `weights`; without weights, of the random ones that `seed` gives.

    Random weights are the same as in one process.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights | None, shards: dict[str, Shard], seed: int
    ) -> None:
        self.spec, self.where = spec, "random weights" if weights is None else weights.where
        self._weights, self._shards, self._seed = weights, shards, seed
        self._shapes = weight_shapes(spec)
        self._random = _parameter_shapes(spec) if weights is None else {}

    @property
    def quantization(self) -> Any:
        """The weights' quantization, or None."""
        return getattr(self._weights, "quantization", None)

    def packed(self, name: str) -> list[Packed] | None:
        """This rank's shard of a quantized weight, one per expert; None for an unquantized one."""
        weights: Any = self._weights
        packed: list[Packed] | None = weights.packed(name)
        return None if packed is None else [self._shard_packed(name, item) for item in packed]

    def quantize_shards(
        self, name: str, quantize: Callable[[Tensor], list[Packed]]
    ) -> list[Packed]:
        """This rank's shard of the quantized full weight: rounded as in one process."""
        return [self._shard_packed(name, item) for item in quantize(self._read_full(name))]

    def read(self, name: str) -> Tensor:
        """This rank's shard of a weight."""
        full, shard = self._read_full(name), self._shards.get(name)
        return full if shard is None else shard.take(full)

    def _read_full(self, name: str) -> Tensor:
        if self._weights is not None:
            return self._weights.read(name)
        if name not in self._random:
            return torch.zeros(self._shapes[name])  # a router's balancing bias
        full = torch.empty(self._random[name])
        fill_parameter(name, full, layers=self.spec.layers, seed=self._seed)
        return full

    def _shard_packed(self, name: str, full: Packed) -> Packed:
        shard, shape = self._shards.get(name), self._shapes[name]
        check_shape(full, name, shape, self.where)
        if shard is None or shard.dim is None:
            return full
        take = outputs if shard.dim == len(shape) - 2 else inputs
        try:
            return take(full, *shard.span(shape[shard.dim]))
        except ValueError as error:
            raise UserError(
                f"plan.tp: quantized {name} cannot be sharded over {shard.parts} ranks: {error}. "
                "Use pp instead of tp, or unquantized weights."
            ) from None


def stage_part(plan: ParallelPlan, place: RankPlacement, layers: int) -> ModelPart:
    """The layers of this rank's stage. Raises UserError if there are fewer layers than stages."""
    if layers < place.stages:
        raise UserError(
            f"plan.pp: {layers} layers are too few for {place.stages} stages. Use pp {layers}."
        )
    counts = plan.layers_of_stages(layers)
    if len(counts) != place.stages or sum(counts) != layers or min(counts) < 1:
        raise UserError(
            f"plan.stage_layers: {counts} are not {layers} layers in {place.stages} stages; leave "
            "it out"
        )
    first = sum(counts[: place.stage])
    return ModelPart(range(first, first + counts[place.stage]), place.stage == 0, place.last)


def shard_decoder(decoder: Decoder, rank_group: RankGroup) -> dict[str, Shard]:
    """Shrink a decoder without values to this rank's shards, and sum its outputs over the ranks.

    Returns the shards by parameter name. Raises UserError for a model that does not divide.
    """
    place = rank_group.place
    if place.shares == 1:
        return {}
    _check_heads(decoder.spec, place.shares)
    block_shards = {
        name: rank_shard(shard, decoder.spec, place)
        for name, shard in block_plan(decoder.spec).items()
    }
    shards: dict[str, Shard] = {}
    for layer, block in decoder.blocks.items():
        for name, parameter in list(block.named_parameters()):
            if (shard := block_shards.get(name)) is None:
                continue
            path, _, kind = name.rpartition(".")
            module = block.get_submodule(path)
            local = nn.Parameter(shard.take(parameter.detach()), requires_grad=False)
            setattr(module, kind, local)
            shards[f"blocks.{layer}.{name}"] = shard
            if isinstance(module, nn.Linear) and kind == "weight":
                module.out_features, module.in_features = local.shape
        parts: Any = block
        for part in (parts.attn, parts.mlp):
            part.register_forward_hook(AllReduceOutput(rank_group.tensor_group))
    return shards


def rank_shard(shard: ParameterShard, spec: ModelSpec, place: RankPlacement) -> Shard:
    """The part of a parameter on the rank at `place`."""
    if shard.style == "kv_heads":
        heads = min(place.shares, spec.kv_heads)  # with fewer heads than ranks, several share one
        return Shard(shard.dim, heads, place.share * heads // place.shares)
    return Shard(shard.dim, place.shares, place.share)


def _parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {
            name: tuple(parameter.shape) for name, parameter in Decoder(spec).named_parameters()
        }


def _check_heads(spec: ModelSpec, shares: int) -> None:
    heads = spec.mfa.heads if spec.mfa is not None else spec.heads
    uneven = ("heads", heads) if heads % shares else None
    # MLA has one latent, MFA one key, for all heads
    one_kv_head = spec.mla is not None or spec.mfa is not None
    if uneven is None and not one_kv_head and spec.kv_heads % shares and shares % spec.kv_heads:
        uneven = "kv_heads", spec.kv_heads
    if uneven is not None:
        raise UserError(
            f"plan.tp: {spec.name} has {uneven[1]} {uneven[0]}, which {shares} ranks cannot divide "
            "evenly. Use a tp that divides them."
        )
