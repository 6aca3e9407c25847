"""Types and notes that all exports share: the job, the result and the refusal.

Does not depend on any engine's option names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.planner.interchange.text_formats import printable
from workers.contracts import ClusterSpec, ModelSpec, ParallelPlan, plan_problems
from workers.contracts.base import with_hint


class Inexpressible(ValueError):
    """An engine cannot run a plan or model: why, and a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(with_hint(message, hint))
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class Exported:
    """An engine's configuration: text, file name, and notes on deviations and manual steps.

    The text also has the notes as comments if the format supports them (JSON does not).
    """

    text: str
    filename: str
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class ExportJob:
    """The input of one export, a legal plan for a model on a cluster, and the notes so far.

    `steps` (optimizer steps) and `lr` use the engine's default if None.
    """

    model: ModelSpec
    plan: ParallelPlan
    cluster: ClusterSpec
    seq_len: int
    steps: int | None = None
    lr: float | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises Inexpressible for a plan that is illegal for the model, sequence or cluster."""
        problems = plan_problems(
            self.plan, model=self.model, seq_len=self.seq_len, devices=self.cluster.devices
        )
        if problems:
            raise Inexpressible(" ".join(str(item) for item in problems))

    def note(self, text: str) -> None:
        """Adds a note once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def headline(self) -> str:
        """The plan in one line, `llama3-8b on 8 x h100-80g: dp 4, tp 2, ...`."""
        plan, cluster = self.plan, self.cluster
        degrees = ", ".join(
            f"{name} {getattr(plan, name)}" for name in ("dp", "tp", "pp", "cp", "ep", "zero")
        )
        batch = (
            f"micro-batch {plan.micro_batch_size} x {plan.accumulation}, global batch "
            f"{plan.global_batch_size}"
        )
        devices = f"{cluster.nodes} x {cluster.devices_per_node} x {cluster.device}"
        return f"{self.model.name} on {devices}: {degrees}, {batch}, {self.seq_len} tokens"

    def comments(self) -> list[str]:
        """The headline and the notes as `#` comment lines."""
        lines = [f"Written by Orrery: {self.headline}", *self.notes]
        return ["# " + " ".join(printable(line).split()) for line in lines]


def refuse(engine: str, message: str, hint: str) -> Inexpressible:
    """The error for an unsupported plan."""
    return Inexpressible(f"{engine} {message}", hint)


def note_cpu(job: ExportJob, engine: str) -> None:
    """Notes that the engine does not train on CPUs."""
    if job.cluster.entry.kind == "cpu":
        job.note(
            f"{engine} trains on accelerators, but the cluster's devices are CPUs: only Orrery's "
            "own engine runs this plan there"
        )


def note_gathering(job: ExportJob, engine: str) -> None:
    """Notes limits on gathered ZeRO-3 weights, which most engines do not support."""
    for name in ("prefetch_layers", "max_live_params", "param_persistence_threshold"):
        value = getattr(job.plan, name)
        if value is not None:
            job.note(f"{name} {value} has no counterpart in {engine}")


def torchrun(job: ExportJob) -> str:
    """The command that starts a node's ranks; HOST is the first node's address."""
    nodes = f"--nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.devices_per_node}"
    rendezvous = " --rdzv-backend c10d --rdzv-endpoint HOST:29500" if job.cluster.nodes > 1 else ""
    return f"torchrun {nodes}{rendezvous}"
