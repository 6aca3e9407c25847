"""A real `transformers.Trainer` on a tiny model and a Lightning-like loop record themselves."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import factories
from tests.workers.recorder.server import TOKEN, Ingest
from workers.contracts import RunSpec
from workers.contracts.catalog.counts import parameter_count
from workers.recorder.orrery_lightning import OrreryLogger


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_a_real_trainer_records_itself(
    server: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from workers.recorder.orrery_hf import OrreryCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
    )
    rows = [{"input_ids": (ids := torch.randint(0, 64, (16,))), "labels": ids} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=6,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[OrreryCallback(server.url, TOKEN, "trainer")],
    )
    trainer.train()
    points = server.points("r1")
    losses = {p["step"]: p["values"] for p in points if "loss" in p["values"]}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert {step: values["loss"] for step, values in losses.items()} == logged
    assert all({"lr", "grad_norm", "step_time_s"} <= set(values) for values in losses.values())
    assert [p["step"] for p in points if "val_loss" in p["values"]] == [3, 6]
    assert points[-1]["tokens"] == 6 * 4 * 16
    (saved,) = [e for e in server.store["r1"]["events"].values() if e["type"] == "checkpoint_saved"]
    assert saved["data"]["step"] == 6 and Path(saved["data"]["path"]).is_dir()
    spec = RunSpec.from_dict(server.runs["r1"]["spec"])
    assert "LlamaForCausalLM" in spec.notes and spec.shape is not None
    assert parameter_count(spec.shape).total == sum(p.numel() for p in trainer.model.parameters())
    assert server.ends["r1"]["status"] == "finished"
    (details,) = server.store["r1"]["details"].values()
    recorded = details["config"]
    assert recorded["per_device_train_batch_size"] == 4 and recorded["model"]["hidden_size"] == 32
    assert not [name for name in recorded if name.endswith("_token")]


@pytest.mark.django_db
def test_training_arguments_are_stored_as_configuration(
    owner: Any, live_redis: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from workers.recorder import orrery_hf

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), learning_rate=3e-4, use_cpu=True, report_to=[], hub_token="hf_x"
    )
    model = SimpleNamespace(config=transformers.LlamaConfig(hidden_size=32))
    config = orrery_hf._config(arguments, model)
    run, client = factories.external_run(owner), factories.api(owner)
    answer = client.post(
        f"/api/v1/runs/{run.pk}/details",
        {"details": [{"seq": 1, "config": json.loads(json.dumps(config, default=str))}]},
        content_type="application/json",
    )
    assert answer.json()["accepted"] == 1, answer.content
    document = client.get(f"/api/v1/runs/{run.pk}/details").json()["config"]
    assert document["learning_rate"] == 3e-4 and document["model"]["hidden_size"] == 32
    assert not [name for name in document if name.endswith("_token")]
    listed = client.get("/api/v1/runs", {"query": "config.learning_rate < 1e-3"}).json()["items"]
    assert [each["id"] for each in listed] == [str(run.pk)]


def test_the_labels_of_a_model_are_left_out() -> None:
    pytest.importorskip("transformers")
    from workers.recorder import orrery_hf

    labels = {"id2label": {"0": "a"}, "label2id": {"a": 0}}
    config = SimpleNamespace(to_dict=lambda: {"model_type": "llama", **labels})
    model = SimpleNamespace(config=config)
    assert orrery_hf._config(SimpleNamespace(), model) == {"model": {"model_type": "llama"}}


def test_a_lightning_shaped_loop_records_itself(
    server: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = OrreryLogger(server.url, TOKEN, "lightning")
    logger.log_hyperparams(Namespace(lr=0.1, layers=2, name=int))
    for step in (1, 2):
        logger.log_metrics({"train_loss": 1.0 / step, "epoch": 0}, step)
    logger.after_save_checkpoint(SimpleNamespace(last_model_path="", best_model_path="a.ckpt"))
    logger.save()
    assert logger.version.startswith("lightning-") and logger.name == "lightning"
    logger.finalize("success")
    assert [(p["step"], p["values"]) for p in server.points("r1")] == [
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
    ]
    events = {e["type"]: e["data"] for e in server.store["r1"]["events"].values()}
    assert events == {"checkpoint_saved": {"path": "a.ckpt"}}
    (details,) = server.store["r1"]["details"].values()
    assert details["config"] == {"lr": 0.1, "layers": 2, "name": "<class 'int'>"}
    assert server.ends["r1"]["status"] == "finished"
    monkeypatch.setenv("LOCAL_RANK", "1")
    silent = OrreryLogger(server.url, TOKEN)
    silent.log_metrics({"loss": 1.0}, 1)
    assert len(server.runs) == 1
