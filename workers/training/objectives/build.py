"""The objective of a run by its name, the model it trains, and the frozen module it compares with.

Does not depend on data.
"""

from __future__ import annotations

from pathlib import Path

from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.finetuning.objectives import DistillBody
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.models.errors import WeightsError
from workers.models.weights.locations import locate_weights
from workers.models.weights.open import open_source
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.samples import ExampleSamples
from workers.training.data.rows import RowSource
from workers.training.objectives.distill.distillation import Distillation
from workers.training.objectives.distill.on_policy import OnPolicyRows
from workers.training.objectives.distill.teacher_files import TaughtRows, is_teacher_file
from workers.training.objectives.frozen_module import AdapterOff, FrozenModule
from workers.training.objectives.kto import KtoObjective
from workers.training.objectives.next_token import NextToken
from workers.training.objectives.objective import Objective
from workers.training.objectives.policy import Policy, TokenPolicy
from workers.training.objectives.preference import Preference
from workers.training.objectives.reward import Reward
from workers.training.parallel.mesh import World
from workers.training.parallel.parallelize import Parallel, build_frozen
from workers.training.setup.spec_loading import TrainingRun


def build_objective(run: TrainingRun, world: World) -> Objective:
    """The objective of `train.objective` with its options."""
    train = run.train
    if train.dpo is not None and train.dpo.loss == "kto":
        return KtoObjective(train.dpo, world.axis("cp"), fused=train.fused_kernels)
    if train.dpo is not None:
        return Preference(train.dpo, world.axis("cp"), fused=train.fused_kernels)
    if train.reward is not None:
        return Reward(train.reward, world.axis("cp"), fused=train.fused_kernels)
    if train.distill is not None:
        return Distillation(train.distill, seed=train.seed, fused=train.fused_kernels)
    if train.policy is not None:
        kind = TokenPolicy if train.policy.rollout.temperature == 1 else Policy
        return kind(train.policy, fused=train.fused_kernels)
    return NextToken(reports_count=train.objective != "pretrain", fused=train.fused_kernels)


def objective_rows(run: TrainingRun, samples: RowSource, *, training: bool) -> RowSource:
    """The samples as the objective reads them: with a teacher's tokens, or replaceable answers.

    Raises UserError for a teacher's files that do not belong to the samples.
    """
    options = run.train.distill
    if options is None:
        return samples
    folder = teacher_folder(options)
    if folder is not None:
        if options.on_policy:
            raise UserError(
                f"train.distill.on_policy: {folder} has a teacher's probabilities of given answers "
                "only. Use a model as teacher, or on_policy 0."
            )
        if not isinstance(samples, ExampleSamples):
            raise UserError(f"train.distill.teacher: {folder} is for files of examples only")
        vocab = run.model.vocab
        return TaughtRows(samples, folder, vocab=vocab, top_k=options.top_k)
    return OnPolicyRows(samples) if options.on_policy and training else samples


def teacher_folder(options: DistillBody) -> Path | None:
    """The folder of a teacher's files; None if the teacher is a model."""
    try:
        where = locate_weights(options.teacher)
    except WeightsError:
        return None  # reported when the model is opened
    return where if is_teacher_file(where) else None


def trained_model(run: TrainingRun) -> ModelSpec:
    """The run's model; without dropout if its answers are compared with one another."""
    compares = run.train.dpo or run.train.reward or run.train.policy
    return run.model.model_copy(update={"dropout": 0.0}) if compares else run.model


def trained_adapter(run: TrainingRun) -> AdapterSpec | None:
    """The run's adapter; without dropout if answers are compared with one another."""
    adapter, compares = run.train.adapter, run.train.dpo or run.train.reward or run.train.policy
    return adapter.model_copy(update={"dropout": 0.0}) if adapter and compares else adapter


def build_frozen_module(run: TrainingRun, world: World, parallel: Parallel) -> FrozenModule | None:
    """The reference of preference optimization or the teacher; None without one. Collective.

    Raises UserError if the teacher cannot run under the plan or has other tokens.
    """
    if run.train.distill is not None:
        if teacher_folder(run.train.distill) is not None:
            return None
        return _build_teacher(run, run.train.distill, world)
    options = run.train.dpo or run.train.policy
    if options is None or not options.needs_reference:
        return None
    if run.train.reference == "adapter_off":
        return AdapterOff(parallel.parts)
    named = run.train.dpo.reference if run.train.dpo is not None else None
    source = named if isinstance(named, ModelSource) else None
    parts = build_frozen(
        trained_model(run),
        run.plan,
        world,
        seed=run.train.seed,
        fused=run.train.fused_kernels,
        adapter=run.train.adapter if source is None else None,
    )
    return FrozenModule(parts, use="reference", source=source)


def _build_teacher(run: TrainingRun, options: DistillBody, world: World) -> FrozenModule:
    model = _teacher_shape(run, options.teacher)
    # a dense teacher has no experts to distribute
    experts = {} if model.moe is not None else {"ep": 1}
    plan = run.plan.model_copy(update={"stage_layers": None, **experts})
    for item in plan_problems(plan, model=model, seq_len=run.train.seq_len):
        raise UserError(f"train.distill.teacher: {item.message}. {item.hint}")
    parts = build_frozen(model, plan, world, seed=run.train.seed, fused=run.train.fused_kernels)
    return FrozenModule(parts, use="teacher", source=options.teacher)


def _teacher_shape(run: TrainingRun, source: ModelSource) -> ModelSpec:
    """The teacher's shape without dropout. Raises UserError if it has another vocabulary."""
    try:
        model = open_source(source).spec
    except WeightsError as error:
        raise UserError(f"train.distill.teacher: {error}") from None
    if model.vocab != run.model.vocab:
        raise UserError(
            f"train.distill.teacher: its vocabulary has {model.vocab} tokens, the model's "
            f"{run.model.vocab}. Use a teacher with the same tokenizer."
        )
    if run.train.seq_len > model.max_seq_len:
        raise UserError(
            f"train.distill.teacher: its context is {model.max_seq_len} tokens. "
            f"Use seq_len {model.max_seq_len}."
        )
    return model.model_copy(update={"dropout": 0.0})
