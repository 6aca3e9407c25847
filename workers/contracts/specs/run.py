"""RunSpec: a complete run request with one body per kind, and checks between its fields.

Does not check memory or which data paths an installation allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Problem, Refused, problem
from workers.contracts.catalog.devices import check_device
from workers.contracts.catalog.presets import resolve_model
from workers.contracts.examples.shapes import FORMATS, needed_shape
from workers.contracts.specs.autotune import Autotune, autotune_problems
from workers.contracts.specs.data import DataSpec, data_problems
from workers.contracts.specs.finetuning.freezing import frozen_problems
from workers.contracts.specs.finetuning.produce import ProduceBody
from workers.contracts.specs.finetuning.reinforcement import PROMPT_FORMATS
from workers.contracts.specs.finetuning.reinforcement_checks import (
    policy_problems,
    with_prompts_per_step,
)
from workers.contracts.specs.inference import EvaluateBody, GenerateBody, ModelRef, ServeBody
from workers.contracts.specs.legality import plan_problems, rotary_problems
from workers.contracts.specs.model import Count, ModelSource, ModelSpec, Positive
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.script import ScriptBody
from workers.contracts.specs.train import BenchmarkBody, ExternalBody, TrainBody

Kind = Literal[
    "train", "generate", "serve", "evaluate", "script", "external", "benchmark", "produce"
]
KINDS: tuple[Kind, ...] = (
    "train",
    "generate",
    "serve",
    "evaluate",
    "script",
    "external",
    "benchmark",
    "produce",
)
_NEEDS_BODY = {
    "train": 'Add "train": {"steps": 200, "seq_len": 128}.',
    "produce": 'Add "produce": {"tasks": ["open_qa"], "count": 100, '
    '"server": {"url": …, "model": …}}.',
    "generate": 'Add "generate": {"input": "prompts.jsonl", "output": "answers.jsonl"}.',
}

Plan = Annotated[
    Annotated[Literal["auto"], Tag("@auto")] | Annotated[ParallelPlan, Tag("@plan")],
    Discriminator(lambda value: "@auto" if isinstance(value, str) else "@plan"),
]


_IMAGE = re.compile(r"(docker://)?[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


def check_image(text: str) -> str:
    """A reference such as nvcr.io/nvidia/pytorch:25.06-py3, or a path to a .sif file.

    Raises Refused.
    """
    is_file = text.endswith(".sif") and re.fullmatch(r"/?[A-Za-z0-9][A-Za-z0-9._/@-]{0,500}", text)
    if not (is_file or _IMAGE.fullmatch(text)) or ".." in text.split("/"):
        raise Refused(
            f"{text[:80]!r} is not the name of an image",
            "Use a reference such as nvcr.io/nvidia/pytorch:25.06-py3, or a path to a .sif file.",
        )
    return text


class Resources(Contract):
    """Resources of the run; `devices` defaults to the plan's world size."""

    devices: Positive | None = None
    # a training run may continue on fewer devices, at least these, with the same global batch
    min_devices: Positive | None = None
    pool: str | None = None
    device: Annotated[str, AfterValidator(check_device)] | None = None
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    # a training run without progress for this long ends as hang; default: ORRERY_HANG_S
    hang_s: Annotated[float, Field(ge=10)] | None = None
    # a container image for Docker or Apptainer; a path that ends with .sif for Apptainer alone
    image: Annotated[str, AfterValidator(check_image)] | None = None
    # limits of all processes on one node together
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    processes: Annotated[int, Field(ge=16)] | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """What a node must support to start the run: images, limits, limits of images."""
        return needs_of(self.to_dict())


def needs_of(resources: Mapping[str, Any]) -> tuple[str, ...]:
    """`Resources.needs` of stored resources, without reading them as a contract."""
    images = bool(resources.get("image"))
    limits = "limits of images" if images else "limits"
    limited = any(resources.get(name) is not None for name in ("memory_gb", "cpus", "processes"))
    return ("images",) * images + (limits,) * limited


class Retries(Contract):
    """How many new attempts each exit class allows; preemption is not limited."""

    user_error: Count = 0
    out_of_memory: Count = 0
    numerics: Count = 1
    hang: Count = 2
    infrastructure: Count = 5
    lost: Count = 10

    def budget(self, exit_class: str) -> int | None:
        """New attempts allowed after this exit class; None: unlimited, 0: never retried."""
        return None if exit_class == "preempted" else int(getattr(self, exit_class, 0))


class RunSpec(Contract):
    """A run: its kind with the body of that kind, model, plan, data and resources."""

    kind: Kind
    model: ModelRef = "llama-tiny"
    plan: Plan = ParallelPlan()
    data: DataSpec = DataSpec(preset="shakespeare")
    train: TrainBody | None = None
    generate: GenerateBody | None = None
    serve: ServeBody | None = None
    evaluate: EvaluateBody | None = None
    script: ScriptBody | None = None
    benchmark: BenchmarkBody | None = None
    external: ExternalBody | None = None
    produce: ProduceBody | None = None
    # training with an automatic plan: measure the best predicted plans first
    autotune: Autotune | None = None
    resources: Resources = Resources()
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    retries: Retries = Retries()
    tags: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=60)]], Field(max_length=50)
    ] = []
    notes: Annotated[str, Field(max_length=20_000)] = ""

    @model_validator(mode="before")
    @classmethod
    def _body(cls, data: Any) -> Any:
        """Require exactly the kind's body; a body whose fields all have defaults may be absent."""
        if not isinstance(data, dict) or data.get("kind") not in KINDS:
            return data
        kind = data["kind"]
        for other in KINDS:
            if other != kind and data.get(other) is not None:
                raise Refused(
                    f"kind is {kind} but a body {other} is given",
                    f"Use kind {other}, or remove {other}.",
                    field=other,
                )
        if data.get(kind) is None:
            if kind in _NEEDS_BODY:
                raise Refused(f"kind {kind} needs a body {kind}", _NEEDS_BODY[kind], field=kind)
            data = {**data, kind: {}}
        return with_prompts_per_step(data)

    @property
    def has_explicit_plan(self) -> bool:
        """False if the plan is the default: a control plane may then ask the planner."""
        return "plan" in self.model_fields_set

    @property
    def devices(self) -> int:
        """Devices of the run; 1 if an automatic plan is not resolved and none are requested."""
        if self.resources.devices is not None:
            return self.resources.devices
        if not isinstance(self.plan, ParallelPlan):
            return 1 + self.rollout_devices
        return self.plan.world_size + self.rollout_devices

    @property
    def rollout_devices(self) -> int:
        """Devices of rollouts besides those of the plan."""
        policy = None if self.train is None else self.train.policy
        return 0 if policy is None else policy.rollout.separate_devices

    @property
    def shape(self) -> ModelSpec | None:
        """The model's shape; None if it is stored with weights elsewhere."""
        return None if self.shape_source is not None else resolve_model(self.model)

    @property
    def shape_source(self) -> ModelSource | None:
        """The weights that give the model's shape: named as model, or the initial ones without a
        model.
        """
        if isinstance(self.model, ModelSource):
            return self.model
        train = self.train
        named = train is None or train.init_from is None or "model" in self.model_fields_set
        return None if named or train is None else train.init_from

    @property
    def trained_shape(self) -> ModelSpec | None:
        """The shape that a training run gives the model: with a scalar head for a reward model."""
        shape = self.shape
        return shape if shape is None or self.train is None else self.train.trained_shape(shape)

    @property
    def body(self) -> Contract:
        """The body of this kind."""
        body = getattr(self, self.kind)
        assert isinstance(body, Contract)
        return body


_ON_NODES = ("image", "memory_gb", "cpus", "processes")


def spec_problems(spec: RunSpec) -> list[Problem]:
    """Contradictions between valid fields; an empty list means the run may be submitted."""
    problems: list[Problem] = []
    plan, shape = spec.plan, spec.shape
    trains = spec.train or spec.benchmark
    seq_len = trains.seq_len if trains else None
    problems += autotune_problems(spec)
    if spec.kind == "external":
        needless = [_needless(field) for field in _ON_NODES if getattr(spec.resources, field)]
        return problems + needless
    if shape is not None and seq_len is not None:
        problems += [
            item.model_copy(update={"field": f"{spec.kind}.{item.field}"})
            for item in rotary_problems(shape, seq_len)
        ]
    if isinstance(plan, ParallelPlan):
        for item in plan_problems(plan, model=shape, seq_len=seq_len):
            field = f"{spec.kind}.seq_len" if item.field == "seq_len" else item.field
            problems.append(item.model_copy(update={"field": field}))
        if (
            spec.resources.devices is not None
            and spec.resources.devices != plan.world_size + spec.rollout_devices
            and spec.kind != "script"
        ):
            more = f" and rollouts have {spec.rollout_devices}" if spec.rollout_devices else ""
            problems.append(
                problem(
                    "resources.devices",
                    f"resources.devices is {spec.resources.devices}, but the plan's world size is "
                    f"{plan.world_size} "
                    f"(dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp}){more}",
                    f"Use devices {plan.world_size + spec.rollout_devices}.",
                )
            )
    if spec.train:
        problems += _train_problems(spec, spec.train)
    if spec.benchmark and spec.shape is not None:
        problems += data_problems(spec.data, vocab=spec.shape.vocab)
    if spec.script:
        problems += _script_problems(spec.script, spec.resources)
    return problems


def _needless(field: str) -> Problem:
    return problem(
        f"resources.{field}",
        "Orrery does not start an external run, so this has no effect",
        f"Omit {field}.",
    )


def _script_problems(script: ScriptBody, resources: Resources) -> list[Problem]:
    problems: list[Problem] = []
    if not script.command:
        problems.append(
            problem("script.command", "there is no program to run", 'Use ["train.py"].')
        )
    problems += _environment_problems(script, resources)
    for field, variables in (("env", script.env), ("secrets", script.secrets)):
        for name, text in variables.items():
            if not name or len(name) > 200 or "=" in name or "\0" in name + text:
                message = f"{name[:40]!r} cannot be an environment variable"
                hint = "Use a name of 1 to 200 characters without =, and a value without NUL."
                problems.append(problem(f"script.{field}", message, hint))
            elif len(text) > 100_000:
                message = f"the value of {name} has {len(text)} characters"
                problems.append(
                    problem(f"script.{field}", message, "Use at most 100,000 characters.")
                )
    return problems


def _environment_problems(script: ScriptBody, resources: Resources) -> list[Problem]:
    environment = script.environment
    if environment is None:
        return []
    field = "script.environment"
    if resources.image is not None and (environment.lock or environment.modules):
        message = f"the image {resources.image} has its own packages"
        return [problem(field, message, "Use either resources.image or script.environment.")]
    if environment.lock is not None and script.workdir is None:
        message = f"{environment.lock} is a file of the work folder, but script.workdir is not set"
        return [
            problem(f"{field}.lock", message, "Set script.workdir to the folder with the lock.")
        ]
    return []


def _train_problems(spec: RunSpec, train: TrainBody) -> list[Problem]:
    problems = []
    if isinstance(spec.plan, ParallelPlan) and train.accumulate not in (
        None,
        spec.plan.accumulation,
    ):
        batch = spec.plan.micro_batch_size * spec.plan.dp * (train.accumulate or 1)
        problems.append(
            problem(
                "train.accumulate",
                f"{train.accumulate} contradicts the plan, which accumulates "
                f"{spec.plan.accumulation} micro-batches",
                f"Use global_batch_size {batch}, or omit accumulate.",
            )
        )
    if train.lr_schedule.warmup_steps > train.steps:
        problems.append(
            problem(
                "train.lr_schedule.warmup_steps",
                f"a warmup of {train.lr_schedule.warmup_steps} steps is longer than the "
                f"{train.steps} steps of the run",
                f"Use {max(1, train.steps // 10)}.",
            )
        )
    if train.lr_schedule.min_lr > train.optimizer.lr:
        problems.append(
            problem(
                "train.lr_schedule.min_lr",
                f"{train.lr_schedule.min_lr} is above the learning rate {train.optimizer.lr}",
                f"Use {train.optimizer.lr / 10}.",
            )
        )
    if (
        train.samples
        and train.samples.prompts
        and not spec.data.reads_text
        and train.init_from is None
    ):
        message = "token files have no tokenizer, so prompts cannot be encoded"
        problems.append(
            problem("train.samples.prompts", message, "Set data.tokenizer, or omit the prompts.")
        )
    plan = spec.plan if isinstance(spec.plan, ParallelPlan) else None
    if train.optimizer.paged and spec.resources.device == "cpu":
        message = "a CPU's optimizer states are in the host's memory already"
        problems.append(problem("train.optimizer.paged", message, "Use paged false, or a GPU."))
    if train.dpo and train.dpo.loss == "kto" and plan and plan.global_batch_size < 2:
        message = "kto compares each prompt with another one's answer, the batch has one sample"
        problems.append(problem("plan.global_batch_size", message, "Use 2 or more."))
    problems += frozen_problems(train, spec.trained_shape, plan)
    if spec.shape is not None and spec.shape.scalar_head and train.reward is None:
        message = f"{train.objective} predicts tokens, this head gives one number"
        problems.append(problem("model.scalar_head", message, "Use false, or objective reward."))
    if train.reward is not None and train.samples is not None and train.samples.count:
        message = "a reward model scores texts and writes none"
        problems.append(problem("train.samples", message, "Omit the field."))
    if train.policy is not None:
        problems += policy_problems(train.policy, train.seq_len, plan, hang_s=spec.resources.hang_s)
    problems += _evaluation_problems(train)
    if spec.shape is not None:
        shape = needed_shape(train)
        formats = FORMATS[shape] if shape is not None else ()
        if train.policy is not None:
            formats = PROMPT_FORMATS
        problems += data_problems(spec.data, vocab=spec.shape.vocab, examples=formats)
        if train.eval and train.eval.data:
            problems += data_problems(
                train.eval.data,
                vocab=spec.shape.vocab,
                field="train.eval.data",
                training=spec.data,
                examples=formats,
            )
    return problems


def _evaluation_problems(train: TrainBody) -> list[Problem]:
    """What the evaluation after training lacks: weights before and after it."""
    body = train.evaluate
    if body is None:
        return []
    problems = []
    if train.init_from is None:
        message = "an evaluation compares with train.init_from, which names no weights"
        problems.append(problem("train.evaluate", message, "Set init_from, or omit evaluate."))
    if train.checkpoint is None:
        message = "an evaluation reads the last checkpoint, the run saves none"
        problems.append(problem("train.evaluate", message, "Set train.checkpoint."))
    if body.baseline is not None:
        message = "the baseline is train.init_from"
        problems.append(problem("train.evaluate.baseline", message, "Omit the field."))
    return problems
