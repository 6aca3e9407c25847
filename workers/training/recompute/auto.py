"""Recompute `auto`: measure a block of each kind, choose what to keep within the budget, tell it.

Rank 0 chooses for all, each pipeline rank's blocks by the measurements of that rank's devices. Does
not know how a set
is best chosen (`knapsack`) nor how an operator is measured (`operators`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.metrics.memory import SavedForBackward, storage_keys
from workers.models.decoder import Decoder
from workers.models.layers.documents import Documents
from workers.runtime.exits import UserError
from workers.training.loop.rank_sync import broadcast_decision
from workers.training.numerics.precision import DTYPES, matmul_context
from workers.training.parallel.parallelize import Parallel
from workers.training.recompute.apply import recomputed_blocks
from workers.training.recompute.checkpointing import Call, Recomputed
from workers.training.recompute.knapsack import Choice, best_sets, spread
from workers.training.recompute.memory_budget import in_flight, left_bytes
from workers.training.recompute.operators import Operator, Probe, Profile
from workers.training.setup.spec_loading import TrainingRun

RUNS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank tells: its pipeline rank, a profile of each kind of block, and of which kind
    each layer is.

    `room_bytes` are for all micro-batches in flight; None where the plan gives a budget.
    """

    stage: int
    profiles: tuple[Profile, ...]
    layers: tuple[int, ...]
    room_bytes: int | None


@dataclass(frozen=True, slots=True)
class Kept:
    """What a layer keeps: `kind` none (all that autograd saves), full (its input), or some outputs
    besides that.

    `bytes` a micro-batch, `seconds` and `flops_share` of its forward pass that are run again in
    each backward pass.
    """

    kind: str
    bytes: int
    seconds: float
    flops_share: float
    calls: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KernelOperations:
    """`event` is what `recompute_chosen` tells; `again` the share of the blocks' forward FLOPs that
    run again.
    """

    event: dict[str, Any]
    again: float


def choose_recompute(
    run: TrainingRun, parallel: Parallel, *, local_world_size: int, masked: bool = False
) -> KernelOperations:
    """Measure, choose and set; all ranks call it together, before the first step. `masked`:
    attention is to keep to
    documents, which is another operator.

    Raises UserError on every rank for a budget below what full recomputation keeps.
    """
    world = parallel.world
    mine = measure(run, parallel, local_world_size=local_world_size, masked=masked)
    told: list[Any] = [mine]
    if world.size > 1:
        told = [None] * world.size
        dist.all_gather_object(told, mine)
    by_stage = [
        _together([each for each in told if each.stage == stage]) for stage in range(run.plan.pp)
    ]
    chosen = broadcast_decision(world, lambda: [choose(run, each) for each in by_stage], leads=world.rank == 0)
    layers = chosen[world.axis("pp").rank]
    blocks = [block for part in parallel.parts for block in recomputed_blocks(part)]
    for block, kept in zip(blocks, layers, strict=True):
        set_kept(block.forward, kept)
    shares = [kept.flops_share for stage in chosen for kept in stage]
    return KernelOperations(_event(run, by_stage, chosen), sum(shares) / len(shares))


def measure(
    run: TrainingRun, parallel: Parallel, *, local_world_size: int, masked: bool = False
) -> Measured:
    """Forward passes on random tokens, all ranks together: no gradient, counter or random state is
    left changed.
    """
    blocks = [block for part in parallel.parts for block in recomputed_blocks(part)]
    shapes = [
        tuple((name, tuple(p.shape)) for name, p in block.named_parameters()) for block in blocks
    ]
    kinds = list(dict.fromkeys(shapes))
    probes = [Probe(blocks[shapes.index(kind)]) for kind in kinds]
    for kind, probe in zip(kinds, probes, strict=True):
        blocks[shapes.index(kind)].forward.probe = probe
    device = parallel.world.device
    outside = 0
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        matmul_context(run.plan.precision, device),
    ):
        for _ in range(RUNS):
            outside = sum(
                _outside_bytes(run, parallel, part, masked=masked) for part in parallel.parts
            )
    parallel.release_gathered()
    for block in blocks:
        block.forward.probe = None
    profiles = tuple(probe.profile() for probe in probes)
    room = None
    layers = tuple(kinds.index(shape) for shape in shapes)
    if run.plan.recompute_budget_bytes is None:
        # a block's backward pass holds all of the block once more, and gradients of as much
        working = 2 * max(each.whole_bytes for each in profiles)
        room = left_bytes(
            parallel,
            run.train.optimizer,
            local_world_size=local_world_size,
            outside_bytes=max(0, outside - sum(profiles[kind].input_bytes for kind in layers)),
            working_bytes=working,
        )
    return Measured(parallel.world.axis("pp").rank, profiles, layers, room)


def choose(run: TrainingRun, measured: Measured) -> list[Kept]:
    """What each layer of a pipeline rank keeps.

    Raises UserError where the budget does not hold their inputs.
    """
    plan = run.plan
    flight = in_flight(plan, measured.stage)
    options = [_options(profile) for profile in measured.profiles]
    least = sum(options[kind][0].bytes for kind in measured.layers)
    budget = plan.recompute_budget_bytes
    if budget is not None and budget < least * flight:
        where = f" on pipeline rank {measured.stage}" if plan.pp > 1 else ""
        raise UserError(
            f"plan.recompute_budget_bytes: {budget} is less than the {round(least * flight)} "
            "bytes that full "
            f"recomputation keeps{where} ({len(measured.layers)} layers, {flight:g} micro-batches "
            "in flight); "
            f"try {round(least * flight)} or more, or a smaller micro_batch_size"
        )
    room = measured.room_bytes if budget is None else budget
    assert room is not None
    choices = [[Choice(kept.bytes, kept.seconds) for kept in some] for some in options]
    places = spread([choices[kind] for kind in measured.layers], max(int(room / flight), least))
    return [options[kind][place] for kind, place in zip(measured.layers, places, strict=True)]


def set_kept(forward: Recomputed, kept: Kept) -> None:
    """Make a block keep what was chosen."""
    forward.checkpointed = kept.kind != "none"
    names = frozenset(kept.calls)

    def rule(call: Call, out: Any) -> bool:
        return (str(call[0]), call[1]) in names

    forward.rule = rule if names else None


def _options(profile: Profile) -> list[Kept]:
    """A layer's ways, the least first."""
    operators, flops = profile.operators, max(1, profile.flops)
    keepable = [each for each in operators if each.keepable]
    beyond = profile.seconds - sum(each.seconds for each in keepable)
    found = []
    for best in best_sets([each.bytes for each in keepable], [each.seconds for each in keepable]):
        calls = [keepable[place] for place in best.kept]
        again = sum(each.flops for each in operators) - sum(each.flops for each in calls)
        size, seconds = profile.input_bytes + best.bytes, best.seconds + beyond
        names = tuple((each.name, each.nth) for each in calls)
        if not calls or size < profile.whole_bytes:
            found.append(Kept("some" if calls else "full", size, seconds, again / flops, names))
    return [*found, Kept("none", max(profile.whole_bytes, profile.input_bytes), 0.0, 0.0)]


def _together(ranks: list[Measured]) -> Measured:
    """One measurement of a stage's ranks: the slowest and the largest of each operator, since the
    others wait for it.

    Where ranks ran different operators (experts without tokens), the first rank's.
    """
    first = ranks[0]
    rooms = [each.room_bytes for each in ranks if each.room_bytes is not None]
    profiles = tuple(_merged(some) for some in zip(*(each.profiles for each in ranks), strict=True))
    return replace(first, profiles=profiles, room_bytes=min(rooms) if rooms else None)


def _merged(profiles: Iterable[Profile]) -> Profile:
    first, *others = profiles
    calls = [(each.name, each.nth) for each in first.operators]
    alike = [
        other for other in others if [(each.name, each.nth) for each in other.operators] == calls
    ]
    operators = [
        Operator(
            *calls[i],
            max(e.seconds for e in some),
            max(e.bytes for e in some),
            some[0].flops,
            all(e.keepable for e in some),
        )
        for i, some in enumerate(zip(*(each.operators for each in (first, *alike)), strict=True))
    ]
    return replace(
        first,
        operators=tuple(operators),
        whole_bytes=max(each.whole_bytes for each in (first, *others)),
        input_bytes=max(each.input_bytes for each in (first, *others)),
    )


def _outside_bytes(run: TrainingRun, parallel: Parallel, part: Decoder, *, masked: bool) -> int:
    """One forward pass of a part: what it keeps, its blocks no more than their inputs, and the loss
    of its logits.
    """
    part.train()
    with SavedForBackward() as saved:
        out = part(_example(run, parallel, part), _documents(run, parallel) if masked else None)
    held = saved.held(without=storage_keys(parallel.parameters().values()))
    # fp32 logits, their log-softmax and its gradient
    return max(0, held) + (3 * 4 * out.numel() if part.part.last else 0)


def _example(run: TrainingRun, parallel: Parallel, part: Decoder) -> Tensor:
    """Token ids or hidden states of a micro-batch, alike on every rank, as this part takes them."""
    plan, device = run.plan, parallel.world.device
    generator = torch.Generator().manual_seed(run.train.seed)
    length = run.train.seq_len // plan.cp
    if part.part.first:
        shape = (plan.micro_batch_size, length)
        return torch.randint(run.model.vocab, shape, generator=generator).to(device)
    if plan.sequence_parallel:
        length //= plan.tp
    hidden = torch.randn((plan.micro_batch_size, length, run.model.hidden), generator=generator).to(
        device, DTYPES[plan.precision]
    )
    return hidden.requires_grad_()


def _documents(run: TrainingRun, parallel: Parallel) -> Documents:
    """One a row: attention costs the more, the longer documents are."""
    return Documents([[0]] * run.plan.micro_batch_size, run.train.seq_len, parallel.world.device)


def _event(run: TrainingRun, measured: list[Measured], chosen: list[list[Kept]]) -> dict[str, Any]:
    """The choice in numbers of one micro-batch, a pipeline rank at a time."""
    stages = []
    for each, layers in zip(measured, chosen, strict=True):
        flight = in_flight(run.plan, each.stage)
        every = [each.profiles[kind] for kind in each.layers]
        stages.append(
            {
                "stage": each.stage,
                "in_flight": flight,
                "bytes": round(flight * sum(kept.bytes for kept in layers)),
                "none_bytes": round(flight * sum(profile.whole_bytes for profile in every)),
                "full_bytes": round(flight * sum(profile.input_bytes for profile in every)),
                "room_bytes": each.room_bytes if run.plan.recompute_budget_bytes is None else None,
                "extra_s": sum(kept.seconds for kept in layers),
                "full_extra_s": sum(profile.seconds for profile in every),
                "layers": [
                    {
                        "count": count,
                        **{k: v for k, v in asdict(kept).items() if k != "calls"},
                        "keeps": _named(kept),
                    }
                    for kept, count in Counter(layers).items()
                ],
            }
        )
    return {"budget_bytes": run.plan.recompute_budget_bytes, "stages": stages}


def _named(kept: Kept) -> dict[str, int]:
    """How many outputs of each operator are kept."""
    return dict(Counter(name for name, _ in kept.calls))
