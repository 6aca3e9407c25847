"""Recomputation changes memory and nothing else: bytes as the planner says, gradients to the bit,
budgets kept.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional

import orchestrator.planner.model.all_terms  # noqa: F401  registers the terms
from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.schedules.inflight import in_flight
from orchestrator.planner.schedules.orders import SCHEDULES
from tests.matrix import select
from tests.workers.training.conftest import TINY, make_spec
from tests.workers.training.pool import train_alone
from workers.contracts.catalog.model_flops import flops_per_token
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.metrics.memory import SavedForBackward, storage_keys
from workers.models.adapters.apply import apply_adapter, freeze, trained_names
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.training.recompute import apply_recompute, hardware_factor, memory_budget
from workers.training.recompute.knapsack import best_sets, choose_sets
from workers.training.setup import loop_builder

KINDS = ("none", "selective", "full")
WIDE = {
    "name": "wide",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 160,
    "vocab": 64,
    "max_seq_len": 64,
}
GPT = {
    "bias": "all",
    "norm": "layernorm",
    "gated_mlp": False,
    "position": "learned",
    "activation": "gelu",
}
MLA = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MOE = {"experts": 8, "top_k": 2, "expert_ffn": 96, "shared_experts": 1, "aux_loss": 0.01}
BLOCKS = {
    "mha": {},
    "gqa": {"kv_heads": 2},
    "mqa, relu": {"kv_heads": 1, "activation": "relu"},
    "gpt-2": GPT,
    "gpt-2 with dropout": {**GPT, "dropout": 0.1},
    "qk norms in a window": {"qk_norm": True, "window": 16},
    "mla": {"attention": "mla", "mla": MLA},
    "mfa": {"attention": "mfa", "mfa": {"qk_rank": 24, "head_dim": 16, "heads": 6}},
    "moe": {"moe": MOE},
}
BATCH = {"global_batch_size": 4, "micro_batch_size": 2}


def forward(
    model: ModelSpec, kind: str, dtype: torch.dtype, adapter: AdapterSpec | None = None
) -> tuple[int, Decoder]:
    """Bytes that autograd saved, and the model with its gradients."""
    decoder = Decoder(model)
    if adapter is not None:
        apply_adapter(decoder, adapter)
        freeze(decoder, trained_names(decoder, adapter), dtype)
    initialize(decoder, layers=2, seed=1)
    decoder.to(dtype)
    apply_recompute(decoder, kind)
    torch.manual_seed(0)
    tokens = torch.randint(model.vocab, (2, 64))
    with SavedForBackward() as saved:
        logits = decoder(tokens)
    held = saved.held(without=storage_keys(decoder.parameters()))
    functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    return held, decoder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_of_the_planner_and_gradients_to_the_bit(name, precision):
    if name == "moe" and precision == "bf16":
        pytest.skip("the planner's router is 16 bits wide, the engine's 32")
    model = ModelSpec.from_dict({**WIDE, **BLOCKS[name]})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    whole = None
    for kind in KINDS:
        taller, decoder = forward(model, kind, dtype)
        lower, _ = forward(model.model_copy(update={"layers": 1}), kind, dtype)
        plan = ParallelPlan(precision=precision, micro_batch_size=2, recompute=kind)
        cluster = ClusterSpec(device="cpu", nodes=1, devices_per_node=1)
        table = table_of([Request(model, plan, cluster, 64, framework("orrery"))], {})
        message = float(table[f"layer_activation_{'moe' if model.moe else 'dense'}_bytes"][0])
        assert taller - lower == pytest.approx(message, rel=0.005), kind
        gradients = {name: each.grad for name, each in decoder.named_parameters()}
        assert all(each is not None for each in gradients.values())
        reported = [module.recorded for module in decoder.modules() if hasattr(module, "recorded")]
        whole = whole or (gradients, reported)
        assert all(torch.equal(gradients[name], each) for name, each in whole[0].items()), kind
        assert all(torch.equal(*pair) for pair in zip(reported, whole[1], strict=True)), (
            "expert loads count once"
        )


def test_an_adapted_layer_saves_its_output_once():
    model, adapter = ModelSpec.from_dict(WIDE), AdapterSpec(rank=4)
    saved, gradients = {}, {}
    for kind in KINDS:
        saved[kind], decoder = forward(model, kind, torch.float32, adapter)
        named = decoder.named_parameters()
        gradients[kind] = {name: each.grad for name, each in named if each.requires_grad}
    plain, _ = forward(model, "selective", torch.float32)
    inner = model.layers * 7 * 2 * 64 * adapter.rank * 4
    assert saved["full"] < saved["selective"] <= plain + inner
    for kind in ("selective", "full"):
        for name, each in gradients["none"].items():
            torch.testing.assert_close(gradients[kind][name], each, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "plan",
    select(
        [
            {},
            {"precision": "bf16"},
            {"precision": "fp16"},
            {"dp": 2, "zero": 0, "precision": "bf16"},
            {"dp": 2, "zero": 2},
            {"dp": 2, "zero": 3},
            {"dp": 2, "zero": 3, "precision": "fp16"},
        ],
        [0, 1, 2, 4, 6],  # each precision and ZeRO stage once
    ),
    ids=lambda plan: "-".join(map(str, plan.values())),
)
def test_every_kind_learns_the_same(plan, train, tmp_path):
    dropout = {**TINY, "dropout": 0.1}
    kinds = {kind: {"recompute": kind} for kind in KINDS} | {
        "auto": {"recompute": "auto", "recompute_budget_bytes": 40_000}
    }
    results = {
        kind: train(make_spec(dropout, {**BATCH, **plan, **kinds[kind]}, steps=2), tmp_path / kind)
        for kind in kinds
    }
    none = results["none"]
    assert {outcome["class"] for each in results.values() for outcome in each.outcomes} == {"ok"}
    for kind, each in results.items():
        assert each.values("loss") == none.values("loss"), kind
        assert each.values("grad_norm") == none.values("grad_norm"), kind
    held = {kind: each.values("memory/activations_bytes")[0] for kind, each in results.items()}
    assert held["none"] > held["selective"] > held["full"] < 0.6 * held["none"]
    full = results["full"]
    assert all(hfu > mfu for hfu, mfu in zip(full.values("hfu"), full.values("mfu"), strict=True))
    [reported] = [
        event["data"] for event in results["auto"].events() if event["type"] == "recompute_chosen"
    ]
    [stage] = reported["stages"]
    assert (
        stage["full_bytes"]
        <= stage["bytes"]
        <= reported["budget_bytes"]
        == 40_000
        < stage["none_bytes"]
    )
    assert 0 < stage["extra_s"] < stage["full_extra_s"]
    # what was foretold is what autograd holds, to the byte
    assert held["none"] - held["auto"] == stage["none_bytes"] - stage["bytes"]


def test_auto_counts_no_logits_that_the_loss_never_makes(train, tmp_path, monkeypatch):
    """The loss from hidden states, which a GPU uses, holds a chunk of logits."""
    model, plan = {**TINY, "vocab": 4096}, {**BATCH, "recompute": "auto"}
    rooms = {}
    for fused in (False, True):
        monkeypatch.setattr(loop_builder, "uses_hidden_states", lambda *_, fused=fused: fused)
        result = train_alone(make_spec(model, plan, steps=1), tmp_path / str(fused))
        assert result.outcomes[0]["class"] == "ok", result.outcomes
        [event] = [each for each in result.events() if each["type"] == "recompute_chosen"]
        [stage] = event["data"]["stages"]
        rooms[fused] = stage["room_bytes"]
    logits = 2 * 16 * 4096 * 4
    head = 4096 * 32 * 4
    # three copies of the logits, or a chunk that holds all of these few and the head's gradient
    assert rooms[True] - rooms[False] == pytest.approx(3 * logits - logits - head, rel=0.1)


def test_auto_keeps_all_where_there_is_room_and_refuses_less_than_the_least(train, tmp_path):
    roomy = train(make_spec(None, {**BATCH, "recompute": "auto"}, steps=1), tmp_path / "roomy")
    [reported] = [event["data"] for event in roomy.events() if event["type"] == "recompute_chosen"]
    assert [layer["kind"] for layer in reported["stages"][0]["layers"]] == ["none"]
    assert reported["stages"][0]["extra_s"] == 0
    least = reported["stages"][0]["full_bytes"]
    assert least == 2 * 2 * 16 * 32 * 4, "two layers' inputs of two sequences of 16 tokens"
    plan = {**BATCH, "dp": 2, "recompute": "auto", "recompute_budget_bytes": least - 1}
    poor = train(make_spec(None, plan, steps=1), tmp_path / "poor")
    assert [outcome["class"] for outcome in poor.outcomes] == ["user_error"] * 2
    assert all(
        f"{least - 1} is less than the {least} bytes" in outcome["reason"]
        for outcome in poor.outcomes
    )
    exact = train(
        make_spec(None, {**plan, "recompute_budget_bytes": least}, steps=1), tmp_path / "exact"
    )
    [reported] = [event["data"] for event in exact.events() if event["type"] == "recompute_chosen"]
    assert [layer["kind"] for layer in reported["stages"][0]["layers"]] == ["full"]


def test_best_sets_and_their_spread_over_layers_are_the_best():
    draw = random.Random(5)
    for _ in range(20):
        sizes = [64 * draw.randint(1, 9) for _ in range(7)]
        seconds = [draw.choice([0.0, draw.random()]) for _ in sizes]
        sets = best_sets(sizes, seconds)
        subsets = [c for n in range(8) for c in itertools.combinations(range(7), n)]
        for budget in range(0, sum(sizes) + 64, 64):
            best = min(
                sum(seconds) - sum(seconds[i] for i in c)
                for c in subsets
                if sum(sizes[i] for i in c) <= budget
            )
            result = min((c for c in sets if c.bytes <= budget), key=lambda c: c.seconds)
            assert result.seconds == pytest.approx(best, abs=1e-12)
            assert result.bytes == sum(sizes[i] for i in result.items)
        layers = [sets, best_sets(sizes[:4], seconds[:4]), sets]
        budget = draw.randint(0, 2 * sum(sizes))
        places = choose_sets(layers, budget)
        taken = [choices[place] for choices, place in zip(layers, places, strict=True)]
        assert sum(c.bytes for c in taken) <= budget
        every = itertools.product(*layers)
        best = min(
            sum(c.seconds for c in some) for some in every if sum(c.bytes for c in some) <= budget
        )
        assert sum(c.seconds for c in taken) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_micro_batches_in_flight_are_those_of_the_planner(schedule):
    for virtual, micro_batches in ((2, 8), (2, 16), (3, 8)):
        wants = virtual if schedule in ("interleaved_1f1b", "zb1p") else None
        plan = ParallelPlan(
            pp=4, schedule=schedule, virtual_stages=wants, global_batch_size=micro_batches
        )
        for rank in range(4):
            message = in_flight(
                SCHEDULES.index(schedule), 4, plan.virtual_stages, micro_batches, rank
            )
            assert memory_budget.in_flight(plan, rank) == pytest.approx(float(message))


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-124m", "deepseek-v2", "qwen3-30b-a3b"])
def test_executed_flops_are_those_of_the_planner(name):
    model = preset(name)
    for kind in KINDS:
        plan = ParallelPlan(recompute=kind)
        cluster = ClusterSpec(device="h100-80g", nodes=1, devices_per_node=1)
        table = table_of([Request(model, plan, cluster, 1024, framework("orrery"))], {})
        message = float(table["executed_flops"][0] / table["model_flops"][0])
        assert hardware_factor(
            model, plan, 1024, flops_per_token=flops_per_token(model, 1024)
        ) == pytest.approx(message, rel=1e-6)
    assert (
        hardware_factor(
            model, ParallelPlan(recompute="auto"), 1024, flops_per_token=1.0, recomputed_share=0.0
        )
        == 1.0
    )
