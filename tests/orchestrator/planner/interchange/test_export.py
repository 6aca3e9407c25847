"""All engines: legal plans give readable files or a refusal with a hint."""

from __future__ import annotations

import itertools
import json
import shlex
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from orchestrator.planner.interchange import KINDS, Inexpressible, export
from tests.orchestrator.planner.interchange.plans import legal_cases, write
from workers.contracts import ClusterSpec, ModelSpec, ParallelPlan
from workers.contracts.catalog.presets import PRESETS

_READERS: dict[str, Callable[[str], Any]] = {
    "torchtitan": tomllib.loads,
    "megatron": lambda text: shlex.split(text, comments=True),
    "deepspeed": json.loads,
    "accelerate": yaml.safe_load,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_legal_plan_is_exported_or_refused_with_a_hint(kind: str) -> None:
    written = 0
    for model, plan, cluster, seq_len in legal_cases(400, seed=3):
        try:
            result = export(kind, model=model, plan=plan, cluster=cluster, seq_len=seq_len)
        except Inexpressible as refused:
            assert refused.hint, (str(refused), plan.to_json())
            continue
        written += 1
        assert _READERS[kind](result.text)
        for note in result.notes:
            if kind != "deepspeed":  # JSON has no comments
                assert f"# {note}\n" in result.text
        world = _world(kind, _READERS[kind](result.text), plan, cluster)
        assert world == plan.world_size, (plan.to_json(), result.text)
    assert written > 30


def _world(kind: str, read: Any, plan: ParallelPlan, cluster: ClusterSpec) -> int:
    """The number of devices in the file, checked against its batch."""
    if kind == "torchtitan":
        mesh, training = read["parallelism"], read["training"]
        dp = mesh["data_parallel_replicate_degree"] * mesh["data_parallel_shard_degree"]
        steps, rest = divmod(training["global_batch_size"], training["local_batch_size"] * dp)
        rows = training["local_batch_size"] // mesh.get(
            "pipeline_parallel_microbatch_size", training["local_batch_size"]
        )
        assert (rest, steps * rows, training["global_batch_size"]) == (
            0,
            plan.accumulation,
            plan.global_batch_size,
        )
        return int(
            dp
            * mesh["tensor_parallel_degree"]
            * mesh["pipeline_parallel_degree"]
            * mesh["context_parallel_degree"]
        )
    if kind == "megatron":
        flags = dict(itertools.pairwise(read))
        inner = [
            f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context")
        ]
        degrees = [int(flags[name]) for name in inner]
        dp, rest = divmod(cluster.devices, degrees[0] * degrees[1] * degrees[2])
        batch, micro = int(flags["--global-batch-size"]), int(flags["--micro-batch-size"])
        assert (rest, batch) == (0, micro * dp * plan.accumulation)
        return dp * degrees[0] * degrees[1] * degrees[2]
    if kind == "deepspeed":
        batch, micro = read["train_batch_size"], read["train_micro_batch_size_per_gpu"]
        dp, rest = divmod(batch, micro * read["gradient_accumulation_steps"])
        assert (rest, batch) == (0, plan.global_batch_size)
        return int(dp * plan.tp * plan.pp * read.get("sequence_parallel_size", 1))
    mesh = read.get("parallelism_config", {})
    axes = ("dp_replicate", "dp_shard", "tp", "cp")
    if mesh:
        total = 1
        for axis in axes:
            total *= mesh[f"parallelism_config_{axis}_size"]
        assert total == read["num_processes"]
    return int(read["num_processes"])


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_name_gives_a_valid_file(kind: str) -> None:
    hostile = 'a"b\\\n[model]\nname = 1 # \x7f\x00\u2028 – é: {yes}'
    model = ModelSpec.from_dict({**PRESETS["llama2-7b"].to_dict(), "name": hostile})

    result = write(kind, model, dp=8, zero=3)

    read = _READERS[kind](result.text)
    result.text.encode("utf-8")
    if kind == "torchtitan":
        assert set(read["model"]) == {"name", "flavor"}
        assert 'a"b\\' in read["model"]["flavor"]
    if kind != "deepspeed":
        head = result.text.split("\n\n")[0]
        assert all(line.startswith("# ") for line in head.splitlines())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": ParallelPlan(dp=4)}, ["dp", "4 devices, not 8"]),
        ({"plan": ParallelPlan(dp=8, global_batch_size=9)}, ["global_batch_size", "8 or 16"]),
        ({"plan": ParallelPlan(tp=8), "model": PRESETS["gpt2-124m"]}, ["tp", "heads"]),
        ({"kind": "colossal"}, ["colossal", "torchtitan, megatron, deepspeed, accelerate"]),
    ],
)
def test_illegal_plans_and_unknown_engines_are_refused(
    change: dict[str, Any], words: list[str]
) -> None:
    given = {
        "kind": "torchtitan",
        "model": PRESETS["llama3-8b"],
        "plan": ParallelPlan(dp=8, zero=3, precision="bf16"),
        "cluster": ClusterSpec(device="h100-80g", devices_per_node=8),
        "seq_len": 1024,
    }
    assert export(**given).text  # type: ignore[arg-type]  # only the change is refused

    with pytest.raises(ValueError) as refused:
        export(**{**given, **change})  # type: ignore[arg-type]

    for word in words:
        assert word in str(refused.value)


def test_steps_and_learning_rate_are_exported() -> None:
    def given(kind: str) -> str:
        plan, cluster = (
            ParallelPlan(dp=2, zero=1, precision="bf16"),
            ClusterSpec(device="a100-80g", devices_per_node=2),
        )
        model = PRESETS["llama2-7b"]
        return export(
            kind, model=model, plan=plan, cluster=cluster, seq_len=512, steps=900, lr=2e-5
        ).text

    titan = tomllib.loads(given("torchtitan"))
    assert (titan["training"]["steps"], titan["optimizer"]["lr"]) == (900, 2e-5)
    assert "--train-iters 900\n" in given("megatron")
    assert "--lr 2e-05\n" in given("megatron")
    assert json.loads(given("deepspeed"))["optimizer"] == {"type": "AdamW", "params": {"lr": 2e-5}}
    assert "# Set the number of steps, 900, in your training loop\n" in given("accelerate")
