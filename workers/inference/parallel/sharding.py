"""The part of a model that one rank of a team keeps: its stage's layers, and its share of each
(arXiv 1909.08053).

Cut before weights are read, so that no rank holds more. Every rank of a stage has its norms, and
the first and the last
stage their tables, whole. Knows modules and tensors; knows no process groups but the one that sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.contracts.specs.inference_support import Place
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.inference.parallel.groups import Team, reached
from workers.inference.quantize.tensor_parallel import check_shape, inputs, outputs
from workers.models.decoder import Decoder, Part
from workers.models.hf.packed import Packed
from workers.models.initialise import fill_parameter
from workers.models.layers.attention import Attention
from workers.models.layers.mla import LatentAttention
from workers.models.moe.layer import RoutedMlp
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import Weights
from workers.runtime.exits import UserError


@dataclass(frozen=True, slots=True)
class Cut:
    """The `index`-th of `parts` along `axis`; None of a bias that is added once, which others than
    the first lack.
    """

    axis: int | None
    parts: int = 1
    index: int = 0

    def of(self, whole: Tensor) -> Tensor:
        if self.axis is None:
            return whole if self.index == 0 else torch.zeros_like(whole)
        start, stop = self.span(whole.shape[self.axis])
        return whole.narrow(self.axis, start, stop - start).contiguous()

    def span(self, size: int) -> tuple[int, int]:
        """Which of `size` places along the axis."""
        each, more = divmod(size, self.parts)
        start = self.index * each + min(self.index, more)
        return start, start + each + (self.index < more)


class Summed:
    """A hook: what a module gives is this rank's share of a sum.

    Copies of the module sum in the same group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def __call__(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        with reached():
            dist.all_reduce(out, group=self.group)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Summed:
        return self


class Parts:
    """Of `weights` what this rank keeps; of a shape without weights those that `seed` gives, as in
    one process.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights | None, cuts: dict[str, Cut], seed: int
    ) -> None:
        self.spec, self.where = spec, "random weights" if weights is None else weights.where
        self._weights, self._cuts, self._seed = weights, cuts, seed
        self._shapes = weight_shapes(spec)
        self._drawn = _parameters(spec) if weights is None else {}

    @property
    def quantization(self) -> Any:
        return getattr(self._weights, "quantization", None)

    def packed(self, name: str) -> list[Packed] | None:
        """This rank's share of a weight that lies in few bits, of experts one each; None for one
        that is whole.
        """
        weights: Any = self._weights
        found: list[Packed] | None = weights.packed(name)
        return None if found is None else [self._share(name, each) for each in found]

    def rounded(self, name: str, made: Callable[[Tensor], list[Packed]]) -> list[Packed]:
        """This rank's share of what is `made` of the whole weight: rounded as in one process."""
        return [self._share(name, each) for each in made(self._whole(name))]

    def read(self, name: str) -> Tensor:
        whole, cut = self._whole(name), self._cuts.get(name)
        return whole if cut is None else cut.of(whole)

    def _whole(self, name: str) -> Tensor:
        if self._weights is not None:
            return self._weights.read(name)
        if name not in self._drawn:
            return torch.zeros(self._shapes[name])  # a router's balancing bias
        whole = torch.empty(self._drawn[name])
        fill_parameter(name, whole, layers=self.spec.layers, seed=self._seed)
        return whole

    def _share(self, name: str, whole: Packed) -> Packed:
        cut, shape = self._cuts.get(name), self._shapes[name]
        check_shape(whole, name, shape, self.where)
        if cut is None or cut.axis is None:
            return whole
        take = outputs if cut.axis == len(shape) - 2 else inputs
        try:
            return take(whole, *cut.span(shape[cut.axis]))
        except ValueError as error:
            message = f"{name} in few bits is not shared by {cut.parts} ranks: {error}"
            raise UserError(
                f"plan.tp: {message}; try pp in place of tp, or weights that are whole"
            ) from None


def part_of(plan: ParallelPlan, place: Place, layers: int) -> Part:
    """The layers of this rank's stage.

    Raises UserError where there are fewer layers than stages.
    """
    if layers < place.stages:
        raise UserError(
            f"plan.pp: {layers} layers are too few for {place.stages} stages; try pp {layers}"
        )
    counts = plan.layers_of_stages(layers)
    if len(counts) != place.stages or sum(counts) != layers or min(counts) < 1:
        raise UserError(
            f"plan.stage_layers: {counts} are not {layers} layers in {place.stages} stages; leave "
            "it out"
        )
    first = sum(counts[: place.stage])
    return Part(range(first, first + counts[place.stage]), place.stage == 0, place.last)


def cut(decoder: Decoder, team: Team) -> dict[str, Cut]:
    """Make every layer of a decoder without values as small as this rank's share, and have what it
    gives summed; how
    weights come to be as small, by name. Raises UserError for a model that does not divide so."""
    place = team.place
    if place.shares == 1:
        return {}
    _check(decoder.spec, place.shares)
    cuts: dict[str, Cut] = {}
    for layer, block in decoder.blocks.items():
        for name, module, how in _cuts_of(block, decoder.spec, place):
            for kind, each in (("weight", how), ("bias", _of_bias(module, how, place))):
                held = getattr(module, kind)
                if held is not None:
                    setattr(module, kind, nn.Parameter(each.of(held.detach()), requires_grad=False))
                    cuts[f"blocks.{layer}.{name}.{kind}"] = each
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
        parts: Any = block
        for part in (parts.attn, parts.mlp):
            part.register_forward_hook(Summed(team.sharers))
    return cuts


def _cuts_of(block: Any, spec: ModelSpec, place: Place) -> Iterator[tuple[str, Any, Cut]]:
    """Modules of a block by name: rows of what spreads out, columns of what comes together."""
    shares, share = place.shares, place.share
    attention, mlp = block.attn, block.mlp
    rows, columns = Cut(0, shares, share), Cut(1, shares, share)
    if isinstance(attention, Attention):
        yield "attn.q", attention.q, rows
        # fewer key-value heads than shares: several hold the same one
        heads = min(shares, spec.kv_heads)
        for name in ("k", "v"):
            yield f"attn.{name}", getattr(attention, name), Cut(0, heads, share * heads // shares)
    elif isinstance(attention, LatentAttention):
        name = "q_up" if attention.mla.q_lora_rank else "q"
        yield f"attn.{name}", getattr(attention, name), rows
        yield "attn.kv_up", attention.kv_up, rows
    else:
        yield "attn.q_up", attention.q_up, rows
    yield "attn.o", attention.o, columns
    if not isinstance(mlp, RoutedMlp):
        yield from _cuts_of_mlp("mlp", mlp, rows, columns)
        return
    yield from _cuts_of_mlp(
        "mlp.experts", mlp.experts, Cut(1, shares, share), Cut(2, shares, share)
    )
    if mlp.shared is not None:
        yield from _cuts_of_mlp("mlp.shared", mlp.shared, rows, columns)


def _cuts_of_mlp(name: str, mlp: Any, rows: Cut, columns: Cut) -> Iterator[tuple[str, Any, Cut]]:
    if mlp.gate is not None:
        yield f"{name}.gate", mlp.gate, rows
    yield f"{name}.up", mlp.up, rows
    yield f"{name}.down", mlp.down, columns


def _of_bias(module: Any, how: Cut, place: Place) -> Cut:
    """Rows have theirs with them; one that comes after a sum is added once."""
    rows = module.weight.dim() - 2
    return how if how.axis == rows else Cut(None, place.shares, place.share)


def _parameters(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in Decoder(spec).named_parameters()}


def _check(spec: ModelSpec, shares: int) -> None:
    heads = spec.mfa.heads if spec.mfa is not None else spec.heads
    wrong = ("heads", heads) if heads % shares else None
    # one latent, or one key, for all heads
    one_for_all = spec.mla is not None or spec.mfa is not None
    if wrong is None and not one_for_all and spec.kv_heads % shares and shares % spec.kv_heads:
        wrong = "kv_heads", spec.kv_heads
    if wrong is not None:
        message = f"{spec.name} has {wrong[1]} {wrong[0]}, which {shares} ranks cannot share evenly"
        raise UserError(f"plan.tp: {message}; try a tp that divides them")
