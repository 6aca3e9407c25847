"""Memory and time of rollouts in the planner: what they add, and that other runs have none."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.planner import api
from orchestrator.planner.explain import ExplainOptions
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import preset
from workers.contracts.catalog.rollout_limits import MAX_SEQUENCES

LENGTH, NEW = 1024, 512
GRPO = {
    "rewards": [{"kind": "exact"}],
    "group_size": 8,
    "prompts_per_step": 16,
    "rollout": {"max_new_tokens": NEW},
}


def estimate(grpo: dict[str, Any] | None = None, *names: str, dp: int = 8, **train: Any) -> Any:
    body = None if grpo is None else {"objective": "grpo", "grpo": grpo, **train}
    options = grpo or GRPO
    batch = 8 * options["prompts_per_step"] // options.get("minibatches", 1)
    line = {
        "model": "llama3-8b",
        "cluster": {"device": "h100-80g", "nodes": 1, "devices_per_node": dp},
        "workload": {"seq_len": LENGTH},
        "plan": {"dp": dp, "zero": 3, "precision": "bf16", "global_batch_size": batch},
        **({"train": body} if body else {}),
    }
    line["plan"]["micro_batch_size"] = 1
    options = ExplainOptions(names, 0) if names else None
    [answer] = api.estimate([line], explain=options)
    assert answer["ok"], answer
    return {name: answer["explained"][name]["value"] for name in names} if names else answer


def test_other_runs_have_no_rollouts() -> None:
    answer = estimate()
    assert answer["memory"]["rollout_bytes"] == answer["time"]["rollout_s"] == 0
    assert answer["generation_share"] == 0 and not any("Generation" in n for n in answer["notes"])


def test_the_sampler_is_a_full_copy_on_each_device() -> None:
    plain, sampled = estimate(), estimate(GRPO)
    weights = 2 * parameter_count(preset("llama3-8b")).total
    # 16 answers of 65 blocks of 16 tokens: less than the activations of an update
    assert sampled["memory"]["rollout_bytes"] >= weights
    added = sampled["memory"]["total_bytes"] - plain["memory"]["total_bytes"]
    assert added >= weights
    scored = estimate({**GRPO, "rewards": [{"kind": "model", "path": "r"}]})
    assert scored["memory"]["rollout_bytes"] == pytest.approx(
        sampled["memory"]["rollout_bytes"] + weights
    )
    assert any("Reward models" in note for note in scored["notes"])
    served = estimate({**GRPO, "rewards": [{"kind": "model", "run": 12}]})
    assert served["memory"] == sampled["memory"]
    assert not any("Reward models" in note for note in served["notes"])


def test_the_cache_has_the_blocks_that_the_engine_requests() -> None:
    result = estimate(GRPO, "rollout_sequences", "rollout_cache_bytes", "rollout_rounds")
    # two prompts per rank; 32 layers x 2 x 8 heads x 128 in bf16
    assert (result["rollout_sequences"], result["rollout_rounds"]) == (16, 1)
    assert result["rollout_cache_bytes"] == 16 * 65 * 16 * 32 * 2 * 8 * 128 * 2
    many = estimate({**GRPO, "prompts_per_step": 1024}, "rollout_sequences", "rollout_rounds")
    assert many == {"rollout_sequences": MAX_SEQUENCES, "rollout_rounds": 4}


def test_generation_is_a_share_of_the_step_and_is_stated() -> None:
    answer = estimate(GRPO)
    assert 0.2 < answer["generation_share"] < 0.99
    assert answer["step_time_s"] == pytest.approx(sum(answer["time"].values()))
    assert any("Generation takes" in note and "512" in note for note in answer["notes"])
    short = estimate({**GRPO, "rollout": {"max_new_tokens": 64}})
    assert short["generation_share"] < answer["generation_share"]


def test_several_updates_share_a_generation_phase_and_score_the_policy() -> None:
    names = ("generation_s", "scoring_s", "compute_s", "prefill_s", "decode_s")
    once, twice = estimate(GRPO, *names), estimate({**GRPO, "epochs": 2}, *names)
    assert once["scoring_s"] == 0
    assert twice["generation_s"] == pytest.approx(once["generation_s"] / 2)
    assert twice["scoring_s"] == pytest.approx(twice["compute_s"] / 6)
    parts = estimate({**GRPO, "minibatches": 4}, *names)
    assert parts["scoring_s"] == pytest.approx(parts["compute_s"] / 3)


def test_the_reference_is_counted_with_the_policy() -> None:
    with_reference = estimate({**GRPO, "kl": {"coef": 0.1}})
    assert with_reference["memory"]["reference_bytes"] > 0
    assert estimate(GRPO)["memory"]["reference_bytes"] == 0


PPO = {**GRPO, "group_size": 1, "prompts_per_step": 128, "kl": {"coef": 0}}


def policy(objective: str, options: dict[str, Any], **plan: Any) -> Any:
    line = {
        "model": "llama3-8b",
        "cluster": {"device": "h100-80g", "nodes": 1, "devices_per_node": 8},
        "workload": {"seq_len": LENGTH},
        "plan": {
            **{"dp": 8, "zero": 3, "precision": "bf16", "micro_batch_size": 1},
            "global_batch_size": 128,
            **plan,
        },
        "train": {"objective": objective, objective: options},
    }
    [answer] = api.estimate([line])
    assert answer["ok"], answer
    return answer


def test_the_value_model_of_ppo_has_states_and_updates_of_its_own() -> None:
    grpo, ppo = policy("grpo", GRPO), policy("ppo", PPO)
    count = parameter_count(preset("llama3-8b"))
    share = (count.total - count.head) / count.total  # it has one output, not a vocabulary
    for part in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        assert ppo["memory"][part] == pytest.approx(grpo["memory"][part] * (1 + share)), part
    # one more pass with gradients and one without, of its layers
    more = ppo["time"]["rollout_s"] - grpo["time"]["rollout_s"]
    compute = grpo["time"]["compute_s"]
    assert 1.2 * compute < more < 1.5 * (compute + grpo["time"]["exposed_comm_s"])
    assert ppo["time"]["optimizer_s"] == pytest.approx(grpo["time"]["optimizer_s"] * (1 + share))


def test_separate_rollouts_free_the_training_devices_and_overlap_if_they_may_be_stale() -> None:
    separate = {**GRPO, "rollout": {**GRPO["rollout"], "sync": "separate", "devices": 8}}
    stale = {**separate, "staleness": {"max": 2, "correction": "truncated"}}
    together, apart, overlapped = (policy("grpo", each) for each in (GRPO, separate, stale))
    assert together["memory"]["rollout_bytes"] > 0 == apart["memory"]["rollout_bytes"]
    # as many devices sample, so a synchronous step takes as long
    assert apart["step_time_s"] == pytest.approx(together["step_time_s"])
    generation = together["generation_share"] * together["step_time_s"]
    training = apart["step_time_s"] - generation
    slower = max(generation, training)
    assert overlapped["step_time_s"] == pytest.approx(slower, rel=0.05)
