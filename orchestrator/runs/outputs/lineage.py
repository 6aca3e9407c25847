"""Where a run's data and weights come from, and which runs use what it wrote, as a graph.

Reads the paths in specs; a path in a run's folder belongs to that run. Runs that the user may not
see are left out. Does not depend on how the graph is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db.models import Q, TextField
from django.db.models.functions import Cast

from orchestrator.accounts.models import User
from orchestrator.runs.datasets.references import references
from orchestrator.runs.models import Checkpoint, DataSetVersion, Run
from orchestrator.runs.outputs import produce_servers
from orchestrator.runs.selectors import runs_visible_to
from orchestrator.runs.submission.run_paths import run_of_path, spec_texts

MOST_NODES: Final = 40
_LEVELS: Final = 6  # in each direction
_STEP: Final = re.compile(r"/checkpoints/step-0*(\d+)")
# what a field's path is used as; the longest matching prefix counts
_USES: Final = {
    "model": "model",
    "train.init_from": "initial_weights",
    "train.dpo.reference": "reference",
    "train.distill.teacher": "teacher",
    "train.ppo.reward_model": "reward_model",
    "train.ppo.rewards": "reward_model",
    "train.grpo.rewards": "reward_model",
    "train.ppo.value.init_from": "value_model",
    "serve.adapters": "adapter",
    "evaluate.baseline": "baseline",
    "data": "data",
    "train.eval.data": "validation_data",
    "generate.input": "prompts",
    "generate.draft": "draft",
    "serve.draft": "draft",
    "produce.seeds": "seeds",
    "produce.server": "server",
    "evaluate.input": "prompts",
    "evaluate.references": "references",
}
_FILES: Final = frozenset({"data", "validation_data", "prompts", "seeds", "references", "excluded"})


@dataclass(frozen=True, slots=True)
class Node:
    """A run, a data file or weights from outside (`kind`).

    `level` is 0 for the run in question, below 0 for what it uses, above for what uses it.
    """

    id: str
    kind: str
    label: str
    level: int
    run: Run | None = None
    path: str = ""
    data_set: str = ""  # of a data file: its registered name, `chats@3`

    @property
    def adapter(self) -> str | None:
        """The method of the adapter that the run trains; None for other nodes."""
        train = self.run.spec.get("train") if self.run is not None else None
        adapter = train.get("adapter") if isinstance(train, dict) else None
        if not isinstance(adapter, dict):
            return None
        return str(adapter.get("method") or adapter.get("name") or "lora")


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` uses `source` as `use`; `step` is that of the checkpoint, if known."""

    source: str
    target: str
    use: str
    step: int | None = None


@dataclass(slots=True)
class Lineage:
    """Nodes by id, in the order in which they were added, and edges between them."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    complete: bool = True

    def add(self, node: Node) -> bool:
        """Add a node; False if it is known or there are too many."""
        if node.id in self.nodes:
            return False
        if len(self.nodes) >= MOST_NODES:
            self.complete = False
            return False
        self.nodes[node.id] = node
        return True

    def connect(self, edge: Edge) -> None:
        """Add an edge between known nodes, once."""
        known = edge.source in self.nodes and edge.target in self.nodes
        if known and edge not in self.edges and edge.source != edge.target:
            self.edges.append(edge)


@dataclass(frozen=True, slots=True)
class _Reference:
    """One path or package of a spec."""

    use: str
    path: str
    run: int | None
    step: int | None
    data_set: str = ""


def lineage_of(*, run: Run, user: User) -> Lineage:
    """The graph around a run, at most MOST_NODES nodes."""
    graph = Lineage()
    graph.add(_run_node(run, 0))
    visible = runs_visible_to(user=user)
    level = [run]
    for depth in range(1, _LEVELS + 1):
        level = _add_sources(graph, level, -depth, visible)
    level = [run]
    for depth in range(1, _LEVELS + 1):
        level = _add_users(graph, level, depth, visible)
    return graph


def newest_checkpoint(*, run: Run) -> Checkpoint | None:
    """The run's newest retained checkpoint."""
    return Checkpoint.objects.filter(run=run, deleted=None).order_by("-step", "-id").first()


def _add_sources(graph: Lineage, runs: list[Run], level: int, visible: Any) -> list[Run]:
    """Add what `runs` use; returns the runs that were added."""
    references = {run.pk: list(_references(run.spec)) for run in runs}
    wanted = {each.run for own in references.values() for each in own if each.run is not None}
    wanted |= {run.forked_from_id for run in runs if run.forked_from_id is not None}
    paths = {each.path for own in references.values() for each in own if each.use in _FILES}
    producers = {
        str(match.spec["produce"].get("output")): match
        for match in (
            visible.filter(kind="produce", spec__produce__output__in=sorted(paths)) if paths else ()
        )
    }
    writers = _writers(each.data_set for own in references.values() for each in own)
    wanted |= set(writers.values())
    known = {match.pk: match for match in visible.filter(pk__in=sorted(wanted))} if wanted else {}
    added: list[Run] = []
    for run in runs:
        target = f"run:{run.pk}"
        for each in references[run.pk]:
            if each.run is not None and each.run != run.pk:
                if (match := known.get(each.run)) is not None:
                    added += _add_run(graph, match, level)
                    graph.connect(Edge(f"run:{match.pk}", target, each.use, each.step))
            elif each.run is None:
                node = _file_node(each, level)
                graph.add(node)
                graph.connect(Edge(node.id, target, each.use))
                writer = known.get(writers.get(each.data_set, 0))
                if (producer := writer or producers.get(each.path)) is not None:
                    added += _add_run(graph, producer, level - 1)
                    graph.connect(Edge(f"run:{producer.pk}", node.id, "produced"))
        if (origin := known.get(run.forked_from_id)) is not None:
            added += _add_run(graph, origin, level)
            graph.connect(Edge(f"run:{origin.pk}", target, "fork"))
    return added


def _add_users(graph: Lineage, runs: list[Run], level: int, visible: Any) -> list[Run]:
    """Add runs that use what `runs` wrote; returns the runs that were added."""
    if not runs:
        return []
    ids = {run.pk for run in runs}
    users = Q(forked_from__in=ids) | Q(data_set_uses__data_set__run__in=ids)
    for id in sorted(ids):
        users |= Q(text__contains=f"/runs/{id}/")
        # a served model, at the end of an object or before its next field
        users |= Q(text__contains=f'"run": {id}}}') | Q(text__contains=f'"run": {id},')
    outputs = {
        str(run.spec["produce"]["output"]): run.pk
        for run in runs
        if run.kind == "produce" and run.spec.get("produce", {}).get("output", "").startswith("/")
    }
    for path in outputs:
        users |= Q(text__contains=path)
    # a run can only use files of earlier runs
    later = visible.filter(pk__gt=min(ids)).annotate(text=Cast("spec", TextField()))
    added: list[Run] = []
    for match in later.filter(users).distinct().order_by("pk")[: MOST_NODES + 1]:
        if match.pk in ids:
            continue
        references = list(_references(match.spec))
        writers = _writers(each.data_set for each in references)
        used = [
            each
            for each in references
            if each.run in ids or outputs.get(each.path) in ids or writers.get(each.data_set) in ids
        ]
        forked = match.forked_from_id in ids
        if not used and not forked:
            continue
        added += _add_run(graph, match, level)
        for each in used:
            source = each.run if each.run in ids else outputs.get(each.path)
            if each.data_set:
                node = _file_node(each, level)
                graph.add(node)
                writer = writers.get(each.data_set, source)
                graph.connect(Edge(f"run:{writer}", node.id, "produced"))
                graph.connect(Edge(node.id, f"run:{match.pk}", each.use))
                continue
            graph.connect(Edge(f"run:{source}", f"run:{match.pk}", each.use, each.step))
        if forked:
            graph.connect(Edge(f"run:{match.forked_from_id}", f"run:{match.pk}", "fork"))
    return added


def _add_run(graph: Lineage, run: Run, level: int) -> list[Run]:
    return [run] if graph.add(_run_node(run, level)) else []


def _run_node(run: Run, level: int) -> Node:
    return Node(f"run:{run.pk}", "run", run.name, level, run)


def _writers(labels: Iterable[str]) -> dict[str, int]:
    """The run that wrote each of these data sets, if one did."""
    wanted = {label for label in labels if label}
    if not wanted:
        return {}
    names = {label.partition("@")[0] for label in wanted}
    rows = DataSetVersion.objects.filter(name__in=names).exclude(run=None)
    return {row.label: row.run_id for row in rows if row.label in wanted and row.run_id}


def _file_node(reference: _Reference, level: int) -> Node:
    if reference.data_set:
        label = reference.data_set
        return Node(f"data:{label}", "data", label, level, None, reference.path, label)
    kind = "data" if reference.use in _FILES else "weights"
    label = reference.path.rstrip("/").rsplit("/", 1)[-1]
    return Node(f"{kind}:{reference.path}", kind, label, level, None, reference.path)


def _references(spec: Mapping[str, Any]) -> Iterator[_Reference]:
    """The paths and packages of a spec that name data or weights; each path once per use."""
    seen = set()
    data_sets = list(references(spec))
    for each in data_sets:
        path = str(each.data.get("path") or "") if each.data is not None else ""
        yield _Reference(each.use, path, None, None, each.label)
    labels = {each.field for each in data_sets}
    preset = (spec.get("data") or {}).get("preset") if isinstance(spec.get("data"), dict) else None
    if isinstance(preset, str) and spec.get("kind") in ("train", "benchmark"):
        yield _Reference("data", preset, None, None)
    for name, text in spec_texts(spec):
        use = _use_of(name)
        if use is None or name.rpartition(".")[2] not in (
            "path",
            "package",
            "input",
            "seeds",
            "references",
            *_tail(name),
        ):
            continue
        if name in labels or (use == "reward_model" and text.endswith(".py")):
            continue
        package = name.endswith(".package")
        run = None if package else run_of_path(_expanded(text), settings.ENV.media_runs)
        if (use, text) in seen or (not package and run is None and "/" not in text):
            continue
        seen.add((use, text))
        match = _STEP.search(text)
        yield _Reference(use, text, run, int(match[1]) if match else None)
    for place, served in produce_servers.named(spec).items():
        yield _Reference(_use_of_server(spec, place), "", served, None)
    script = spec.get("script")
    for text in script.get("command") or [] if isinstance(script, Mapping) else []:
        # such as a checkpoint that the program merges
        run = run_of_path(Path(text), settings.ENV.media_runs) if text.startswith("/") else None
        if run is not None:
            match = _STEP.search(text)
            yield _Reference("model", text, run, int(match[1]) if match else None)


def _tail(name: str) -> tuple[str, ...]:
    """The last part of `serve.adapters.NAME`, whose values are paths."""
    return (name.rpartition(".")[2],) if name.startswith("serve.adapters.") else ()


def _use_of(name: str) -> str | None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (use := _USES.get(".".join(parts[:length]))) is not None:
            return use
    return None


def _use_of_server(spec: Mapping[str, Any], field: str) -> str:
    if ".rewards." in field:
        _, policy, _, number = field.split(".")
        kind = spec["train"][policy]["rewards"][int(number)].get("kind")
        return "reward_model" if kind == "model" else "judge"
    return "judge" if field.endswith(".judge") else "server"


def _expanded(text: str) -> Path:
    path = Path(text)
    return path if path.is_absolute() else Path(settings.ENV.home) / path
