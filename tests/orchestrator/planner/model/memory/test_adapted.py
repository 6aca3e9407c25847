"""Memory of frozen weights, adapters and second modules against torch's tracker and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from orchestrator.planner.model import all_terms  # noqa: F401  registers the terms
from orchestrator.planner.model.finetuning.second_module import DIVERGENCE_BYTES
from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from tests.matrix import select
from tests.orchestrator.planner.model.memory.adapted_step import tracked_step
from tests.orchestrator.planner.model.memory.live_bytes import LiveBytes
from workers.contracts.catalog.adapter_shapes import trained_parameter_count
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.model_flops import head_flops_per_token
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.finetuning.objectives import DistillBody
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import TrainBody
from workers.training.objectives.distill.divergences import divergence

# two micro-batches: gradients of the first exist in the second
BATCH = {"precision": "bf16", "micro_batch_size": 1, "global_batch_size": 2}
LORA = {"method": "lora", "rank": 16}


def body(seq_len: int = 512, **options: Any) -> TrainBody:
    init = {"init_from": {"path": "base"}} if "adapter" in options else {}
    return TrainBody.from_dict({"steps": 1, "seq_len": seq_len, **init, **options})


def table(
    model: ModelSpec,
    train: TrainBody,
    second: ModelSpec | None = None,
    trained_share: float = 1.0,
    columns: Sequence[str] = (),
    **plan: Any,
) -> dict[str, float]:
    laid = ParallelPlan.from_dict({**BATCH, **plan})
    cluster = ClusterSpec(device="cpu", nodes=1, devices_per_node=laid.world_size)
    using = framework("orrery")
    made = Request(
        model,
        laid,
        cluster,
        train.seq_len,
        using,
        train=train,
        second=second,
        trained_share=trained_share,
    )
    result = table_of([made], columns_for([made]))
    if columns:
        return {name: float(result.column(name).max()) for name in columns}
    names = ("params", "grads", "optimizer", "reference", "activations", "buffers", "explained")
    return {name: float(result.column(f"{name}_bytes").max()) for name in names}


def wide(layers: int) -> ModelSpec:
    """Llama 3 8B with fewer layers."""
    return preset("llama3-8b").model_copy(update={"layers": layers})


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qlora", {"adapter": {"method": "qlora", "rank": 16}}, {}),
    ("qlora, recomputed", {"adapter": {"method": "qlora", "rank": 16}}, {"recompute": "full"}),
    ("qlora, products saved", {"adapter": {"method": "qlora"}}, {"recompute": "selective"}),
    ("lower layer frozen", {"freeze": ["embed.*", "blocks.0.*"]}, {}),
    ("lora", {"adapter": LORA}, {}),
    ("lora of q and v", {"adapter": {**LORA, "targets": ["q", "v"]}}, {}),
    ("dora", {"adapter": {**LORA, "method": "dora"}}, {}),
    ("ia3", {"adapter": {"method": "ia3"}}, {}),
    ("bottleneck", {"adapter": {"method": "adapter"}}, {}),
    ("bitfit", {"adapter": {"method": "bitfit"}}, {}),
]


@pytest.mark.parametrize(("name", "options", "plan"), select(CASES, [2, 3]), ids=lambda each: "")
def test_the_peak_is_that_of_torchs_tracker(name, options, plan):
    train = body(**options)
    tracked = tracked_step(wide(2), ParallelPlan.from_dict({**BATCH, **plan}), train)
    predicted = table(wide(2), train, **plan)
    rel = 0.03 if "freeze" in options else 0.02
    assert predicted["explained"] == pytest.approx(tracked["Total"], rel=rel), name


@pytest.mark.parametrize("recompute", select(["selective", "none", "full"], []))
def test_the_peak_of_qlora_8b(recompute):
    train = body(2048, adapter={"method": "qlora", "rank": 16})
    plan = ParallelPlan.from_dict({**BATCH, "recompute": recompute})
    tracked = tracked_step(wide(32), plan, train)
    predicted = table(wide(32), train, recompute=recompute)
    assert predicted["explained"] == pytest.approx(tracked["Total"], rel=0.02)


def test_a_cpu_has_logits_of_tokens_with_loss_only():
    train, layers = body(adapter=LORA), wide(1)
    plan = ParallelPlan.from_dict(BATCH)
    tracked = tracked_step(layers, plan, train, trained_share=0.25)["Total"]
    assert table(layers, train, trained_share=0.25)["explained"] == pytest.approx(tracked, rel=0.02)
    assert table(layers, train)["explained"] > 1.05 * tracked
    # with pp every stage's loss needs the logits of all positions
    split = wide(2)
    whole = table(split, train, pp=2)
    assert table(split, train, trained_share=0.25, pp=2) == whole


def test_states_of_an_adapter_are_its_own():
    model, train = preset("llama3-8b"), body(adapter={"method": "qlora", "rank": 16})
    count, own = parameter_count(model), trained_parameter_count(model, train)
    sizes = table(model, train)
    assert sizes["grads"] == 4 * own and sizes["optimizer"] == 8 * own
    linear = count.total - count.embedding - count.head - 65 * 4096
    scales = (1 + 4 / 256) / 64
    stored = 2 * (count.total - linear) + linear * (0.5 + scales) + 4 * own
    assert sizes["params"] == pytest.approx(stored, rel=1e-6)
    single = body(adapter={"method": "qlora", "rank": 16, "double_quant": False})
    assert table(model, single)["params"] - sizes["params"] == pytest.approx(
        linear * (4 / 64 - scales), rel=1e-6
    )


def test_frozen_weights_have_neither_gradient_nor_optimizer_state():
    model = preset("llama3-8b")
    train = body(freeze=["embed.*", *(f"blocks.{layer}.*" for layer in range(16))])
    own = trained_parameter_count(model, train)
    sizes, full = table(model, train), table(model, body())
    assert sizes["grads"] == 4 * own and sizes["optimizer"] == 8 * own
    frozen = parameter_count(model).total - own
    assert sizes["params"] == 4 * own + 2 * frozen
    # only the upper half of the layers saves activations
    assert sizes["activations"] == pytest.approx(full["activations"] / 2, rel=0.05)


@pytest.mark.parametrize("zero", [0, 3])
def test_second_modules_are_stored_in_the_compute_type(zero):
    model, teacher = preset("llama-15m"), preset("smollm2-135m")
    plan = {"dp": 2, "zero": zero}
    pairs = body(objective="dpo", dpo={})
    weights = table(model, pairs, **plan)
    share = 2 if zero else 1
    assert weights["reference"] == pytest.approx(2 * parameter_count(model).total / share, rel=1e-3)
    for without in ({"loss": "orpo"}, {"reference": "adapter_off"}):
        options = {"objective": "dpo", "dpo": without}
        assert table(model, body(**options), **plan)["reference"] == 0
    taught = body(objective="distill", distill={"teacher": {"path": "teacher"}})
    stored = table(model, taught, teacher, **plan)["reference"]
    assert stored == pytest.approx(2 * parameter_count(teacher).total / share, rel=1e-3)
    assert table(model, taught, **plan)["reference"] == 0, "the shape is not known"


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
def test_a_divergence_holds_what_torch_allocates(loss):
    options = DistillBody.from_dict({"teacher": {"path": "teacher"}, "loss": loss})
    with LiveBytes() as live:
        hidden = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
        teacher = torch.zeros(64, 4096, dtype=torch.bfloat16)
        student = hidden @ torch.randn(8, 4096, dtype=torch.bfloat16)
        total = divergence(student, teacher, options).sum()
        del student
        total.backward()
    per_logit = DIVERGENCE_BYTES[loss] + 2 * 2
    assert live.peak / (64 * 4096) == pytest.approx(per_logit, rel=0.02)


def test_a_reward_model_has_no_logits():
    model = preset("llama-15m")
    train = body(objective="reward")
    sizes = table(train.trained_shape(model), train)
    assert sizes["params"] == 4 * (parameter_count(model.with_scalar_head()).total)
    assert sizes["reference"] == 0
    assert sizes["explained"] < table(model, body())["explained"]


@pytest.mark.parametrize(
    ("objective", "second"), [({}, 0), ({"adapter": LORA}, 0), ({"objective": "dpo"}, 2)]
)
def test_mfu_counts_the_head_for_positions_with_logits(
    objective: dict[str, Any], second: int
) -> None:
    """As the engine's metric; a tied head that is frozen and reached counts 4 instead of 6."""
    model, train = preset("smollm2-135m"), body(**objective)
    names = ("model_flops_per_token", "model_flops", "executed_flops", "step_tokens")
    few = table(model, train, trained_share=0.25, columns=names)
    head = ((4 if "adapter" in objective else 6) + second) * model.vocab * model.hidden
    assert head_flops_per_token(model, train) == head
    own = few["model_flops_per_token"] - 0.75 * head
    assert few["model_flops"] == few["executed_flops"] == pytest.approx(own * few["step_tokens"])
    split = table(model, train, trained_share=0.25, columns=names, tp=3)
    assert split["model_flops"] == few["model_flops_per_token"] * few["step_tokens"]
    # and so does the predicted time
    names = ("head_products_s", "loss_s", "step_time_s")
    few = table(model, train, trained_share=0.25, columns=names)
    all_positions = table(model, train, columns=names)
    for name in names[:2]:
        assert few[name] == pytest.approx(0.25 * all_positions[name])
    assert few["step_time_s"] < all_positions["step_time_s"]
    split = table(model, train, columns=names, tp=3)
    assert table(model, train, trained_share=0.25, columns=names, tp=3) == split
