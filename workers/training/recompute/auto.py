"""Recompute `auto`: measure one block of each kind and choose what to save within the budget.

Rank 0 chooses for all ranks, from the measurements of each pipeline rank's devices. Does not depend
on how sets are chosen (`knapsack`) or operators measured (`operators`).
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
from workers.runtime.exit_codes import UserError
from workers.training.loop.rank_sync import broadcast_decision
from workers.training.numerics.precision import DTYPES, matmul_context
from workers.training.parallel.parallelize import Parallel
from workers.training.recompute.apply import recomputed_blocks
from workers.training.recompute.checkpointing import Call, Recomputed
from workers.training.recompute.knapsack import Choice, best_sets, choose_sets
from workers.training.recompute.memory_budget import (
    OtherModule,
    activation_room_bytes,
    in_flight,
)
from workers.training.recompute.operators import Operator, Probe, Profile
from workers.training.setup.spec_loading import TrainingRun

RUNS = 3


@dataclass(frozen=True, slots=True)
class BlockMeasurement:
    """One rank's measurement: pipeline rank, a profile per kind of block, and each layer's kind.

    `room_bytes` is for all micro-batches in flight; None if the plan has a budget.
    """

    stage: int
    profiles: tuple[Profile, ...]
    layers: tuple[int, ...]
    room_bytes: int | None


@dataclass(frozen=True, slots=True)
class RetainedOutputs:
    """What a layer saves: `kind` none (all that autograd saves), full (its input) or some (also
    outputs).

    `bytes` per micro-batch; `seconds` and `flops_share` of the forward pass that each backward pass
    recomputes.
    """

    kind: str
    bytes: int
    seconds: float
    flops_share: float
    calls: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """`event`: data of `recompute_chosen`; `recomputed_share`: of the blocks' forward FLOPs."""

    event: dict[str, Any]
    recomputed_share: float


def choose_recompute(
    run: TrainingRun,
    parallel: Parallel,
    *,
    local_world_size: int,
    masked: bool = False,
    loss_from_hidden: bool = False,
    other: OtherModule = None,
) -> RecomputeChoice:
    """Measure, choose and apply; collective, before the first step.

    `masked`: attention is limited to documents, which uses another operator. `loss_from_hidden`:
    the loss needs a chunk of the logits at a time. `other`: see `activation_room_bytes`. Raises
    UserError on every rank for a budget below that of full recomputation.
    """
    world = parallel.world
    mine = measure(
        run,
        parallel,
        local_world_size=local_world_size,
        masked=masked,
        loss_from_hidden=loss_from_hidden,
        other=other,
    )
    measurements: list[Any] = [mine]
    if world.size > 1:
        measurements = [None] * world.size
        dist.all_gather_object(measurements, mine)
    by_stage = [
        _merge_ranks([each for each in measurements if each.stage == stage])
        for stage in range(run.plan.pp)
    ]
    chosen = broadcast_decision(
        world, lambda: [choose(run, each) for each in by_stage], leads=world.rank == 0
    )
    layers = chosen[world.axis("pp").rank]
    blocks = [block for part in parallel.parts for block in recomputed_blocks(part)]
    for (_, recomputed), retained in zip(blocks, layers, strict=True):
        set_retained(recomputed, retained)
    shares = [retained.flops_share for stage in chosen for retained in stage]
    return RecomputeChoice(_event(run, by_stage, chosen), sum(shares) / len(shares))


def measure(
    run: TrainingRun,
    parallel: Parallel,
    *,
    local_world_size: int,
    masked: bool = False,
    loss_from_hidden: bool = False,
    other: OtherModule = None,
) -> BlockMeasurement:
    """Run forward passes on random tokens, on all ranks; leaves gradients and random state
    unchanged.
    """
    blocks = [block for part in parallel.parts for block in recomputed_blocks(part)]
    shapes = [
        tuple((name, tuple(p.shape)) for name, p in block.named_parameters()) for block, _ in blocks
    ]
    kinds = list(dict.fromkeys(shapes))
    probes = [Probe(blocks[shapes.index(kind)][0]) for kind in kinds]
    for kind, probe in zip(kinds, probes, strict=True):
        blocks[shapes.index(kind)][1].probe = probe
    device = parallel.world.device
    outside = 0
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        matmul_context(run.plan.precision, device),
    ):
        for _ in range(RUNS):
            outside = sum(
                _outside_bytes(
                    run, parallel, part, masked=masked, loss_from_hidden=loss_from_hidden
                )
                for part in parallel.parts
            )
    parallel.release_gathered()
    for _, recomputed in blocks:
        recomputed.probe = None
    profiles = tuple(probe.profile() for probe in probes)
    room = None
    layers = tuple(kinds.index(shape) for shape in shapes)
    if run.plan.recompute_budget_bytes is None:
        # a block's backward pass holds its activations again, and gradients of the same size
        working = 2 * max(each.saved_bytes for each in profiles)
        room = activation_room_bytes(
            parallel,
            run.train.optimizer,
            local_world_size=local_world_size,
            outside_bytes=max(0, outside - sum(profiles[kind].input_bytes for kind in layers)),
            working_bytes=working,
            other=other,
        )
    return BlockMeasurement(parallel.world.axis("pp").rank, profiles, layers, room)


def choose(run: TrainingRun, measured: BlockMeasurement) -> list[RetainedOutputs]:
    """What each layer of a pipeline rank saves. Raises UserError if the budget is below their
    inputs.
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
            f"recomputation saves{where} ({len(measured.layers)} layers, {flight:g} micro-batches "
            "in flight). "
            f"Use {round(least * flight)} or more, or a smaller micro_batch_size."
        )
    room = measured.room_bytes if budget is None else budget
    assert room is not None
    choices = [[Choice(retained.bytes, retained.seconds) for retained in some] for some in options]
    places = choose_sets(
        [choices[kind] for kind in measured.layers], max(int(room / flight), least)
    )
    return [options[kind][place] for kind, place in zip(measured.layers, places, strict=True)]


def set_retained(recomputed: Recomputed, retained: RetainedOutputs) -> None:
    """Make a block save the chosen outputs."""
    recomputed.checkpointed = retained.kind != "none"
    names = frozenset(retained.calls)

    def rule(call: Call, out: Any) -> bool:
        return (str(call[0]), call[1]) in names

    recomputed.rule = rule if names else None


def _options(profile: Profile) -> list[RetainedOutputs]:
    """A layer's options, smallest first."""
    operators, flops = profile.operators, max(1, profile.flops)
    keepable = [each for each in operators if each.keepable]
    beyond = profile.seconds - sum(each.seconds for each in keepable)
    options = []
    for best in best_sets([each.bytes for each in keepable], [each.seconds for each in keepable]):
        calls = [keepable[place] for place in best.items]
        recomputed_flops = sum(each.flops for each in operators) - sum(each.flops for each in calls)
        size, seconds = profile.input_bytes + best.bytes, best.seconds + beyond
        names = tuple((each.name, each.nth) for each in calls)
        if not calls or size < profile.saved_bytes:
            options.append(
                RetainedOutputs(
                    "some" if calls else "full", size, seconds, recomputed_flops / flops, names
                )
            )
    return [
        *options,
        RetainedOutputs("none", max(profile.saved_bytes, profile.input_bytes), 0.0, 0.0),
    ]


def _merge_ranks(ranks: list[BlockMeasurement]) -> BlockMeasurement:
    """One measurement per pipeline rank: the slowest and largest of each operator, as the others
    wait.

    If ranks ran different operators (experts without tokens), the first rank's operators.
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
        saved_bytes=max(each.saved_bytes for each in (first, *others)),
        input_bytes=max(each.input_bytes for each in (first, *others)),
    )


def _outside_bytes(
    run: TrainingRun, parallel: Parallel, part: Decoder, *, masked: bool, loss_from_hidden: bool
) -> int:
    """Bytes that a part saves in one forward pass, with only inputs of blocks, and its loss's."""
    part.train()
    inputs = _example(run, parallel, part)
    documents = _documents(run, parallel) if masked else None
    fused = loss_from_hidden and part.part.last
    with SavedForBackward() as saved:
        out = (
            part(inputs, documents, torch.zeros_like(inputs)) if fused else part(inputs, documents)
        )
    held = saved.held(without=storage_keys(parallel.stored_weights()))
    if fused:
        return max(0, held) + _loss_bytes(run, parallel)
    # fp32 logits, their log-softmax and its gradient
    return max(0, held) + (3 * 4 * out.numel() if part.part.last else 0)


def _loss_bytes(run: TrainingRun, parallel: Parallel) -> int:
    """Bytes that a loss from hidden states holds outside of autograd: the logits of a chunk of
    tokens, the gradient of the hidden states, and the fp32 gradient of the head.
    """
    from kernels.cross_entropy.linear import CHUNK_BYTES  # imports triton

    plan, device = run.plan, parallel.world.device
    vocab = run.model.vocab // plan.tp
    tokens = plan.micro_batch_size * run.train.seq_len // plan.cp
    width = DTYPES[plan.precision].itemsize
    chunk = min(tokens * vocab * width, CHUNK_BYTES[device.type])
    return chunk + (tokens * width + 4 * vocab) * run.model.hidden


def _example(run: TrainingRun, parallel: Parallel, part: Decoder) -> Tensor:
    """Token ids or hidden states of a micro-batch, equal on every rank, as inputs of this part."""
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
    """One document per row: attention cost grows with document length."""
    return Documents([[0]] * run.plan.micro_batch_size, run.train.seq_len, parallel.world.device)


def _event(
    run: TrainingRun, measured: list[BlockMeasurement], chosen: list[list[RetainedOutputs]]
) -> dict[str, Any]:
    """The choice as event data, per pipeline rank, for one micro-batch."""
    stages = []
    for each, layers in zip(measured, chosen, strict=True):
        flight = in_flight(run.plan, each.stage)
        every = [each.profiles[kind] for kind in each.layers]
        stages.append(
            {
                "stage": each.stage,
                "in_flight": flight,
                "bytes": round(flight * sum(retained.bytes for retained in layers)),
                "none_bytes": round(flight * sum(profile.saved_bytes for profile in every)),
                "full_bytes": round(flight * sum(profile.input_bytes for profile in every)),
                "room_bytes": each.room_bytes if run.plan.recompute_budget_bytes is None else None,
                "extra_s": sum(retained.seconds for retained in layers),
                "full_extra_s": sum(profile.seconds for profile in every),
                "layers": [
                    {
                        "count": count,
                        **{k: v for k, v in asdict(retained).items() if k != "calls"},
                        "keeps": _count_calls(retained),
                    }
                    for retained, count in Counter(layers).items()
                ],
            }
        )
    return {"budget_bytes": run.plan.recompute_budget_bytes, "stages": stages}


def _count_calls(retained: RetainedOutputs) -> dict[str, int]:
    """The number of saved outputs per operator."""
    return dict(Counter(name for name, _ in retained.calls))
