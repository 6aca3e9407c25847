"""The value model: a second trained module of the policy's shape with a scalar head.

Sharded and adapted like the policy, with an optimizer of its own. Does not depend on how answers
are sampled or scored.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.contracts.specs.finetuning.reinforcement import PpoBody
from workers.models.moe.balance_control import Balancer, routing_layers
from workers.models.weights.checkpoint_table import read_table
from workers.models.weights.manifest import read_manifest
from workers.posttraining.reinforcement.rows import AnswerRows, RolloutRows
from workers.posttraining.reinforcement.scoring import fill_rows
from workers.posttraining.reinforcement.value.objective import Value, scores
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import NumericsError, UserError
from workers.training.checkpoint import load_training, training_tensors
from workers.training.loop.lr_schedule import lr_at
from workers.training.loop.rank_sync import run_on_leaders
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import matmul_context
from workers.training.numerics.step_checks import StepChecks
from workers.training.objectives.build import trained_adapter, trained_model
from workers.training.objectives.counts import Counts
from workers.training.optim import Norms, fill_state, set_lr, update
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.parallelize import parallelize
from workers.training.parallel.pipeline.stage_transfer import pipeline_outputs
from workers.training.setup.initial_weights import fill_from, open_initial
from workers.training.setup.loop_builder import build_runner
from workers.training.setup.trained_module import module_optimizer, module_recompute

_MODEL, _OPTIMIZER = "value_model", "value_optim"  # in checkpoints
_LOSS_SCALE = "value_loss_scale"  # in a checkpoint's manifest
_FIELD = "train.ppo.value.init_from"
NAME = "value"  # in events


class ValueModel:
    """`load` once, then for each iteration `score`, and `update` after each of the policy's."""

    def __init__(self, policy: StepContext, options: PpoBody, environment: Environment) -> None:
        """Builds module and optimizer. Collective."""
        run, world = policy.run, policy.world
        self.options, self.run, self.world = options, run, world
        model = trained_model(run).with_scalar_head()
        self.parallel = parallelize(
            model,
            run.plan,
            world,
            seed=run.train.seed,
            compile=run.train.compile,
            fused=run.train.fused_kernels,
            adapter=trained_adapter(run),
        )
        self.parameters = self.parallel.parameters()
        self.peak_lr = options.value.lr or run.train.optimizer.lr
        choice = module_recompute(
            run, self.parallel, environment, masked=policy.samples.masked, value_model=True
        )
        if choice is not None and world.rank == 0:
            policy.recorder.event("recompute_chosen", model=NAME, **choice.event)
        optimizer = module_optimizer(
            run,
            self.parallel,
            environment,
            spec=run.train.optimizer.model_copy(update={"lr": self.peak_lr}),
        )
        self.checks = StepChecks(run, self.parallel, self.parameters, policy.recorder, model=NAME)
        moe = run.model.moe
        self.balancer = (
            None if moe is None else Balancer(routing_layers(self.parallel.parts, run.model), moe)
        )
        objective = Value(options)
        self.context = replace(
            policy,
            parallel=self.parallel,
            optimizer=optimizer,
            objective=objective,
            counts=Counts(objective, policy.samples),
            source_losses=None,
            frozen=None,
            loss_from_hidden=False,
            trace=policy.trace.without_timeline(),
        )
        self.optimizer, self.objective = optimizer, objective
        self.runner = build_runner(self.context)
        self.norms = Norms(
            [0] * len(self.parameters),
            [self.parallel.copies_of(name, each) for name, each in self.parameters.items()],
            count=1,
        )
        self._has_state = False

    def load(self, checkpoint: Path | None) -> None:
        """Initial weights, then those of a checkpoint with optimizer state. Collective.

        Raises UserError for weights of another model, or a checkpoint without a value model.
        """
        began = time.perf_counter()
        named = self.options.value.init_from
        source = named or self.run.train.init_from
        if source is not None and (checkpoint is None or self.run.train.adapter is not None):
            shape = self.parallel.parts[0].spec
            field = _FIELD if named is not None else "train.init_from"
            run_on_leaders(self.world, lambda: open_initial(source, shape, field=field), leads=True)
            weights = open_initial(source, shape, field=field)
            loaded = fill_from(self.parallel.parts, weights, field=field)
            if self.world.rank == 0:
                self.context.recorder.event(
                    "value_weights_loaded",
                    **loaded,
                    head="loaded" if weights.spec.scalar_head else "new",
                    seconds=time.perf_counter() - began,
                )
        if checkpoint is not None:
            run_on_leaders(self.world, lambda: _require_value(checkpoint), leads=True)
            self.checks.restore(read_manifest(checkpoint).get(_LOSS_SCALE))
            load_training(checkpoint, self._saved(), self.optimizer, model=_MODEL, optim=_OPTIMIZER)
            self._has_state = True
        self.parallel.finish_update()

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        if not self._has_state:
            fill_state(self.optimizer, self.parameters.values())
            self._has_state = True
        return training_tensors(self._saved(), self.optimizer, model=_MODEL, optim=_OPTIMIZER)

    def manifest(self) -> dict[str, Any]:
        """What a checkpoint's manifest holds of it."""
        return {} if self.checks.state is None else {_LOSS_SCALE: self.checks.state}

    @torch.no_grad()
    def score(self, rows: RolloutRows) -> None:
        """Set `values` of all rollouts: of each token before it is sampled. Collective."""
        context, device = self.context, self.world.device
        samples = AnswerRows(rows)
        count = samples.windows
        filled = torch.zeros(count, samples.seq_len, device=device)  # by one rank each
        cp = self.world.axis("cp")
        modules = self.parallel.modules
        for module in modules:
            module.eval()
        for microbatch in context.microbatches(0, count):
            context.progress.enter("scoring")
            batch = context.load(samples, microbatch)
            with matmul_context(self.run.plan.precision, device):
                outputs = self._outputs(batch)
            if outputs is not None and self.world.axis("tp").rank == 0 and microbatch.count:
                rows_here = slice(microbatch.first, microbatch.first + microbatch.count)
                fill_rows(filled[rows_here], scores(outputs), batch, cp)
        self.parallel.release_gathered()
        for module in modules:
            module.train()
        total = self.world.sum_(filled).cpu().numpy()
        for number, rollout in enumerate(rows.rollouts):
            rollout.values = total[number, rows.span(number)].tolist()

    def update(self, step: int, first: int) -> dict[str, float]:
        """One update from the global batch of `step`, and its metrics. Collective.

        Raises NumericsError if loss or gradients are not finite.
        """
        train, size = self.run.train, self.run.plan.global_batch_size
        count = self.context.counts.of_samples(first, size)
        for module in self.parallel.modules:
            module.train()
        self._scale_balance()
        loss, _ = self.runner.forward_backward(first, self.checks.loss_factor(count))
        missing = [name for name, each in self.parameters.items() if each.grad is None]
        if missing:
            raise RuntimeError(f"the value model has parameters without gradient: {missing[:4]}")
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        values, balance = self._read(loss, gradients, count)
        norm = values["value/grad_norm"]
        if math.isfinite(norm) and math.isfinite(values["value_loss"]):
            lr = lr_at(step, steps=train.steps, peak=self.peak_lr, schedule=train.lr_schedule)
            set_lr(self.optimizer, lr)
            scale = self.checks.gradient_scale
            update(self.optimizer, gradients, norm=norm, limit=train.clip_norm, scale=scale)
            self.parallel.finish_update()
            weights = self.parallel.stored_weights()
            self.context.memory.count_second([*weights], gradients, self.optimizer)
            self._has_state = True
            if self.balancer and train.adapter is None:
                self.balancer.update(balance)
            self.checks.updated(step)
        elif not self.checks.skip(step, values["value_loss"]):
            raise NumericsError(
                f"the value model is not finite at step {step} (value_loss "
                f"{values['value_loss']}, gradient norm {norm}). Use a lower train.ppo.value.lr "
                "or train.clip_norm 1.0."
            )
        self.optimizer.zero_grad(set_to_none=True)
        return values | {f"value/{name}": each for name, each in self.checks.values.items()}

    def _scale_balance(self) -> None:
        """As of the policy: the balance loss is a mean over all sequences."""
        if self.balancer:
            by_token = self.checks.loss_factor(self.run.tokens_per_step)
            self.balancer.scale_gradients(by_token * self.run.train.seq_len / self.run.plan.tp)

    def _read(
        self, loss: Tensor, gradients: list[Tensor], count: float
    ) -> tuple[dict[str, float], list[float]]:
        """The update's metrics and the statistics of the experts, over all ranks. Collective."""
        device, share = self.world.device, self.context.loss_share
        metrics = self.objective.take(device) * share
        parts = [loss.reshape(1), self.norms.squares(gradients), metrics]
        if self.balancer:
            parts.append(self.balancer.take(device) * share)
        _, square, *sums = self.world.sum_(torch.cat(parts)).tolist()
        values = self.objective.values(sums[: len(metrics)], count=count)
        norm = math.sqrt(square) if square >= 0 else math.nan
        values["value/grad_norm"] = norm / self.checks.gradient_scale
        if self.checks.scaler:
            values["value/loss_scale"] = self.checks.scaler.scale
        return values, sums[len(metrics) :]

    def _outputs(self, batch: Batch) -> Tensor | None:
        """The scalar head's outputs; None on ranks without the pipeline's last stage."""
        if self.world.axis("pp").size > 1:
            return pipeline_outputs(self.context, batch)
        [module] = self.parallel.modules
        outputs: Tensor = module(batch.inputs, batch.documents)
        return outputs

    def _saved(self) -> dict[str, Tensor]:
        adapts = self.run.train.adapter is not None
        return self.parameters if adapts else self.parallel.weights()


def _require_value(folder: Path) -> None:
    names = read_table(folder).state_dict_metadata
    if not any(name.startswith(f"{_MODEL}.") for name in names):
        raise UserError(
            f"resume: {folder} has no value model. Use train.init_from with its path, in another "
            "run directory."
        )
