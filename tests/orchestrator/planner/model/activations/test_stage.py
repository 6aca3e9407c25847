"""Activations and logits of a pipeline rank: whole models measured, micro-batches in flight,
budgets, splits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker

from orchestrator.planner.model.memory import peak as memory  # noqa: F401  their terms are registered
from orchestrator.planner.model.terms import explain
from tests.orchestrator.planner.predicted import predicted
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.training.objectives.token_losses import token_loss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "precision", "batch", "seq_len", "changes"),
    [
        ("llama-15m", "fp32", 4, 256, {}),
        ("llama-15m", "bf16", 4, 1024, {}),
        ("llama-15m", "bf16", 4, 256, {"logit_softcap": 30.0}),
        ("gpt2-124m", "bf16", 4, 1024, {"layers": 3}),
        ("gpt2-124m", "fp32", 4, 512, {"layers": 3, "dropout": 0.1}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_whole_model_and_its_loss(
    name: str, precision: str, batch: int, seq_len: int, changes: Any
) -> None:
    model = preset(name).model_copy(update=changes)
    saved, peak = _measured(model, DTYPES[precision], batch, seq_len)
    plan = {"precision": precision, "micro_batch_size": batch}
    table = predicted(model, plan, device="cpu", seq_len=seq_len)
    assert float(table["saved_for_backward_bytes"][0, 0]) == pytest.approx(saved, rel=5e-4)
    # at its worst the loss, or the head's backward pass, in addition to what the layers save; there
    # are no
    # earlier gradients
    held = float(
        (table["activations_bytes"] + table["logits_bytes"] + table["head_moment_bytes"])[0, 0]
    )
    assert held == pytest.approx(peak, rel=5e-3)


def test_micro_batches_in_flight_multiply_what_layers_keep() -> None:
    plan = {"pp": 4, "precision": "bf16", "global_batch_size": 16, "recompute": "full"}
    each = 8 * 2 * 2048 * 4096  # 8 layers a rank, 2 bytes, tokens x hidden
    for schedule, in_flight in {"gpipe": [16] * 4, "1f1b": [4, 3, 2, 1], "naive": [1] * 4}.items():
        table = predicted("llama3-8b", {**plan, "schedule": schedule}, using="fsdp2")
        around = (
            table["embedding_saved_bytes"]
            + table["final_norm_saved_bytes"]
            + table["rotary_tables_bytes"]
        )
        assert (table["activations_bytes"] - around)[:, 0].tolist() == [
            each * count for count in in_flight
        ]
        # all micro-batches of GPipe have passed the loss before the first goes back
        logits = table["logits_bytes"][:, 0]
        losses = 16 if schedule == "gpipe" else 1
        per_logit = 12 + 4 * (losses - 1)
        assert logits[:3].tolist() == [0, 0, 0]
        assert logits[3] == pytest.approx(2048 * 128256 * per_logit, rel=1e-4)


def test_a_recompute_budget_lies_between_full_and_none() -> None:
    def layers(budget: int, recompute: str = "auto") -> float:
        plan = {"precision": "bf16", "recompute": recompute, "recompute_budget_bytes": budget}
        table = predicted("llama3-8b", plan)
        around = table["final_norm_saved_bytes"][0, 0] + table["rotary_tables_bytes"][0]
        return float(table["activations_bytes"][0, 0] - around)

    full, none = layers(0, "full"), layers(0, "none")
    extra = float(predicted("llama3-8b")["embedding_saved_bytes"][0, 0])
    assert layers(0) == full
    assert layers(5 * 10**9) == pytest.approx(5e9 + extra)
    assert layers(10**12) == none


def test_key_and_value_heads_are_split_only_as_far_as_they_go() -> None:
    keys = {tp: float(predicted("llama3-8b", {"tp": tp})["key_bytes"][0]) for tp in (1, 4, 8, 16)}
    assert keys[4] == keys[1] / 4
    assert keys[16] == keys[8] == keys[1] / 8
    one_head = [float(predicted("llama3-8b", {"cp": cp})["key_bytes"][0]) for cp in (1, 4)]
    assert one_head[1] == one_head[0] / 4


def test_inputs_are_saved_in_full_unless_gathered_again() -> None:
    plan = {"tp": 8, "sequence_parallel": True, "precision": "bf16"}
    parts = predicted("llama3-8b", plan, using="megatron")
    whole = predicted("llama3-8b", plan, using={"name": "megatron", "regathers_inputs": False})
    more = float((whole["layer_activation_dense_bytes"] - parts["layer_activation_dense_bytes"])[0])
    assert more == 2 * (2048 * 4096 * 2) * 7 / 8


def test_losses_in_place_fused_and_in_pieces() -> None:
    def per_logit(
        name: str = "fsdp2", seq_len: int = 2048, tp: int = 1, pp: int = 1, **switches: Any
    ) -> float:
        plan = {"precision": "bf16", "tp": tp, "pp": pp}
        table = predicted("llama3-8b", plan, using={"name": name, **switches}, seq_len=seq_len)
        return float(table["logits_bytes"][-1, 0]) / (seq_len * 128256 / tp)

    assert per_logit() == 12
    assert per_logit(cross_entropy_in_place=True) == 6
    assert per_logit(fused_cross_entropy=True) == 2
    # the engine's: in place where they are whole, twice in fp32 where tp splits them; with pieces
    # of 256 MiB
    assert per_logit("orrery", tp=2, pp=2) == 10
    assert per_logit("orrery", pp=2) == pytest.approx(6 + 2 * 2**28 / (2048 * 128256), rel=1e-3)
    # and on a GPU, where no pipeline asks for them, those of 2,048 tokens at a time, 4,096 with
    # half the vocabulary
    assert per_logit("orrery", seq_len=8192) == pytest.approx(2 / 4)
    assert per_logit("orrery", seq_len=8192, tp=2) == pytest.approx(2 / 2, rel=0.02)
    # an eighth of the logits, and two bytes of each hidden state and eight of each target
    assert per_logit(loss_chunks=8) == pytest.approx(1.5 + (2 * 4096 + 8) / 128256)


def test_a_layer_with_experts_keeps_rows_by_choice_not_by_parallelism() -> None:
    for ep in (1, 8):
        table = predicted("mixtral-8x7b", {"dp": 8, "ep": ep, "precision": "bf16"})
        assert float(table["permuted_input_bytes"][0]) == 2 * 2048 * 4096 * 2
    dropping = preset("mixtral-8x7b").model_dump()
    dropping["moe"]["capacity"] = 1.25
    table = predicted(ModelSpec.from_dict(dropping), {"precision": "bf16"})
    assert float(table["permuted_input_bytes"][0]) == 1.25 * 2 * 2048 * 4096 * 2


@pytest.mark.parametrize("model", ["gpt3-175b", "llama3-70b", "mixtral-8x7b", "deepseek-v3"])
def test_the_tree_of_a_layer_adds_up(model: str) -> None:
    table = predicted(model, {"tp": 4, "precision": "bf16", "sequence_parallel": True})
    for name in (
        "full_dense_bytes",
        "layer_shared_bytes",
        "attention_bytes",
        "attention_core_bytes",
    ):
        tree = explain(table, name)
        parts = [
            float(np.ravel(each.value)[0]) * (2 if each.name == "residual_mask_bytes" else 1)
            for each in tree.inputs
        ]
        assert sum(parts) == pytest.approx(float(np.ravel(tree.value)[0]))
        assert all(each.source for each in tree.inputs)


def _measured(model: ModelSpec, dtype: torch.dtype, batch: int, seq_len: int) -> tuple[int, int]:
    """Bytes that autograd keeps after the forward pass, and the peak without weights
    (weight gradients of
    the head come later than the loss's worst moment)."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(dtype)
        try:
            decoder = Decoder(model).train()
        finally:
            torch.set_default_dtype(torch.float32)
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
        targets = torch.zeros(batch, seq_len, dtype=torch.int64)
        given = {each.untyped_storage()._cdata for each in decoder.parameters()}
        held: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                held[storage._cdata] = storage
            return tensor

        def loss() -> torch.Tensor:
            return token_loss(decoder(tokens), targets)

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss()
        saved = sum(storage.nbytes() for storage in held.values())
        held.clear()
        tracker = MemTracker()
        tracker.track_external(decoder)
        with tracker:
            loss().backward()
        snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        sizes = {str(getattr(kind, "value", kind)): size for kind, size in snapshot.items()}
        return saved, sizes["Total"] - sizes["Parameter"] - sizes["Gradient"]


@pytest.mark.parametrize(
    "using", ["orrery", "fsdp2", "megatron", "megatron-deepspeed", "llm-foundry", "deepspeed"]
)
def test_more_recomputation_never_keeps_more(using: str) -> None:
    for model in ("gpt2-xl-1.5b", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "qwen3-0.6b"):
        for laid in (
            {},
            {"tp": 8},
            {"tp": 8, "sequence_parallel": True},
            {"cp": 4, "pp": 4, "global_batch_size": 8},
        ):
            saved, working = [], []
            for recompute in ("none", "selective", "full"):
                table = predicted(
                    model, {"precision": "bf16", "recompute": recompute, **laid}, using=using
                )
                saved.append(table["activations_bytes"])
                working.append(table["layer_working_bytes"])
            assert (saved[0] >= saved[1]).all(), (model, laid)
            assert (saved[1] > saved[2]).all(), (model, laid)
            assert working[0] <= working[1] <= working[2], (model, laid)
            assert np.isfinite(saved).all() and (saved[2] > 0).all()
