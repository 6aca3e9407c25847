"""Compiled blocks equal eager ones under every sharding; compile time is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import FULL
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from tests.workers.training.pool import Pool, Result, train_alone

STEPS = 20 if FULL else 4
CALL = "tests.workers.training.test_compiled:train_with_graphs_only"
MOE = {**TINY, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 24}}
LEAST = {
    **TINY,
    "layers": 2,
    "hidden": 16,
    "ffn": 24,
    "position": "none",
    "gated_mlp": False,
    "activation": "relu",
}


def spec(plan: dict[str, Any], model: Any = None, **train: Any) -> dict[str, Any]:
    settings = {
        "steps": STEPS,
        "eval": {"every_steps": STEPS // 2, "batches": 1},
        "seq_len": 14,
        "clip_norm": 0.5,
    }
    settings |= {"checkpoint": {"every_steps": STEPS, "async": False}}
    full_plan = {"micro_batch_size": 2, "global_batch_size": 8, **plan}
    return make_spec(
        {**TINY, "layers": 2} if model is None else model, full_plan, **(settings | train)
    )


def train_with_graphs_only(spec: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train on a rank with torch.compile but without code generation, which takes seconds."""
    import os

    from tests.workers.training.pool import _run
    from workers.training.parallel import compile

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    compile.BACKEND, backend = "aot_eager", compile.BACKEND
    try:
        return _run(spec, Path(directory), {name: os.environ[name] for name in names})
    finally:
        compile.BACKEND = backend


def assert_equal(actual: Result, expected: Result) -> None:
    assert {outcome["class"] for outcome in actual.outcomes} == {"ok"}, actual.outcomes
    for name in ("loss", "grad_norm", *(["val_loss"] if actual.values("val_loss") else [])):
        assert actual.values(name) == pytest.approx(expected.values(name), rel=1e-5), name
    weights = final_weights(expected, STEPS)
    assert all(
        relative(weight, weights[name]) <= 1e-4
        for name, weight in final_weights(actual, STEPS).items()
    )


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train_alone(spec({}), tmp_path_factory.mktemp("eager"))


PLANS: list[dict[str, Any]] = [
    {"dp": 2, "zero": 3, "recompute": "selective"},
    {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"pp": 2, "schedule": "1f1b"},
    {"cp": 2, "micro_batch_size": 1},
]
VALIDATED = "zero"  # the plan with this field also validates, which traces another graph


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_losses_and_weights_of_one_eager_process(
    plan: dict[str, Any], eager: Result, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    more = {} if VALIDATED in plan else {"eval": None}
    outcomes = pools(2).call(CALL, spec=spec(plan, compile=True, **more), directory=str(tmp_path))
    compiled = Result(outcomes, tmp_path)
    assert_equal(compiled, eager)
    [event] = [event["data"] for event in compiled.events() if event["type"] == "compiled"]
    # forward and backward of one graph serve all layers; ring attention breaks a block into more
    # graphs
    most = {"cp": 12, "tp": 4}.get(next(iter(plan)), 2)
    assert event["step"] == 1 and event["seconds"] > 0 and 2 <= event["pieces"] <= most


def test_routed_experts_run_between_compiled_graphs(
    pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    plan, short = (
        {"dp": 2, "zero": 0, "precision": "bf16"},
        {"steps": 4, "eval": None, "checkpoint": None},
    )
    outcomes = pools(2).call(
        CALL, spec=spec(plan, MOE, compile=True, **short), directory=str(tmp_path / "compiled")
    )
    compiled = Result(outcomes, tmp_path / "compiled")
    plain = pools(2).train(spec(plan, MOE, **short), tmp_path / "plain")
    assert {outcome["class"] for outcome in compiled.outcomes} == {"ok"}, compiled.outcomes
    assert compiled.values("loss") == pytest.approx(plain.values("loss"), rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code
def test_generated_code_computes_the_same(tmp_path: Path) -> None:
    """The only run in this file with torch's code generator and the machine's C++ compiler."""
    plain = train_alone(spec({}, LEAST, eval=None), tmp_path / "plain")
    compiled = train_alone(spec({}, LEAST, eval=None, compile=True), tmp_path / "compiled")
    assert_equal(compiled, plain)
    assert (
        compiled.values("memory/activations_bytes")[0]
        <= plain.values("memory/activations_bytes")[0]
    )


def test_a_missing_compiler_is_reported_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder, exc

    def raise_no_compiler(search: str) -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", raise_no_compiler)
    [outcome] = train_alone(spec({}, compile=True), tmp_path).outcomes
    assert outcome["class"] == "user_error" and outcome["step"] == 0
    assert "no C++ compiler is installed. Install g++" in outcome["reason"]
    half = train_alone(spec({"precision": "fp16"}, compile=True), tmp_path / "half")
    assert "Use precision bf16, or compile false." in half.outcomes[0]["reason"]
