"""Compiled blocks learn what plain ones learn, under every plan that cuts them; what they take is
told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from tests.workers.training.pool import Pool, Result, train_alone

STEPS = 20
CALL = "tests.workers.training.test_compiled:ranks"
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
        "eval": {"every_steps": 10, "batches": 1},
        "seq_len": 14,
        "clip_norm": 0.5,
    }
    settings |= {"checkpoint": {"every_steps": STEPS, "async": False}}
    whole = {"micro_batch_size": 2, "global_batch_size": 8, **plan}
    return make_spec({**TINY, "layers": 2} if model is None else model, whole, **(settings | train))


def ranks(spec: dict[str, Any], directory: str) -> dict[str, Any]:
    """In a rank: the run with all that torch.compile does but writing code, which takes seconds for
    every piece.
    """
    import os

    from tests.workers.training.pool import _run
    from workers.training.parallel import compile

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    compile.BACKEND, kept = "aot_eager", compile.BACKEND
    try:
        return _run(spec, Path(directory), {name: os.environ[name] for name in names})
    finally:
        compile.BACKEND = kept


def same(ours: Result, theirs: Result) -> None:
    assert {each["class"] for each in ours.outcomes} == {"ok"}, ours.outcomes
    for name in ("loss", "grad_norm", *(["val_loss"] if ours.values("val_loss") else [])):
        assert ours.values(name) == pytest.approx(theirs.values(name), rel=1e-5), name
    want = final_weights(theirs, STEPS)
    assert all(
        relative(each, want[name]) <= 1e-4 for name, each in final_weights(ours, STEPS).items()
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
VALIDATED = "zero"  # the plan that also validates: another graph to be traced


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_losses_and_weights_of_one_eager_process(
    plan: dict[str, Any], eager: Result, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    more = {} if VALIDATED in plan else {"eval": None}
    outcomes = pools(2).call(CALL, spec=spec(plan, compile=True, **more), directory=str(tmp_path))
    found = Result(outcomes, tmp_path)
    same(found, eager)
    [told] = [event["data"] for event in found.events() if event["type"] == "compiled"]
    # a piece's forward and backward pass, however many layers it serves; around a ring attention
    # cuts blocks in more
    most = {"cp": 12, "tp": 4}.get(next(iter(plan)), 2)
    assert told["step"] == 1 and told["seconds"] > 0 and 2 <= told["pieces"] <= most


def test_routed_experts_stand_between_compiled_pieces(
    pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    plan, short = (
        {"dp": 2, "zero": 0, "precision": "bf16"},
        {"steps": 4, "eval": None, "checkpoint": None},
    )
    outcomes = pools(2).call(
        CALL, spec=spec(plan, MOE, compile=True, **short), directory=str(tmp_path / "compiled")
    )
    found = Result(outcomes, tmp_path / "compiled")
    plain = pools(2).train(spec(plan, MOE, **short), tmp_path / "plain")
    assert {each["class"] for each in found.outcomes} == {"ok"}, found.outcomes
    assert found.values("loss") == pytest.approx(plain.values("loss"), rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
def test_code_is_written_and_computes_the_same(tmp_path: Path) -> None:
    """The one run here with torch's own code generator and the machine's C++ compiler."""
    plain = train_alone(spec({}, LEAST, eval=None), tmp_path / "plain")
    found = train_alone(spec({}, LEAST, eval=None, compile=True), tmp_path / "compiled")
    same(found, plain)
    assert (
        found.values("memory/activations_bytes")[0] <= plain.values("memory/activations_bytes")[0]
    )


def test_a_machine_without_compiler_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder, exc

    def none(search: str) -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", none)
    [outcome] = train_alone(spec({}, compile=True), tmp_path).outcomes
    assert outcome["class"] == "user_error" and outcome["step"] == 0
    assert "no C++ compiler is found; try installing g++" in outcome["reason"]
    half = train_alone(spec({"precision": "fp16"}, compile=True), tmp_path / "half")
    assert "try precision bf16, or compile false" in half.outcomes[0]["reason"]
