"""The cache that a serve run gets is the one that its forecast states before submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.runs.submission.prediction import serving
from orchestrator.runs.submission.prediction.serving import predict_serving
from orchestrator.runs.submission.prediction.training import Prediction
from orchestrator.runs.submission.target_hardware import TargetHardware
from webui.forms.forecast_serving import describe
from workers.contracts import ModelSpec, ParallelPlan, RunSpec
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.specs.inference import ServeBody
from workers.inference import engine_builder
from workers.inference.model_loading import LoadedModel
from workers.inference.serve import build_serve_engine
from workers.inference.speculate.setup import Drafting
from workers.models.decoder import Decoder

SHAPE = {
    "name": "small",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "vocab": 256,
    "max_seq_len": 1000,
}
DRAFT = {**SHAPE, "name": "draft", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1}
SHORT_DRAFT = {**DRAFT, "max_seq_len": 200}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, head size, fp32


def weight_bytes(shape: dict[str, Any]) -> int:
    return sum(4 * tensor.numel() for tensor in Decoder(ModelSpec.from_dict(shape)).parameters())


WEIGHTS = weight_bytes(SHAPE)


def hardware(memory_bytes: int) -> TargetHardware:
    entry = DEVICES["cpu"].model_copy(update={"memory_bytes": memory_bytes})
    return TargetHardware(entry=entry, per_node=1, known=True)


def predict(body: dict[str, Any], memory_bytes: int) -> Prediction:
    spec = RunSpec.from_dict({"kind": "serve", "model": SHAPE, "serve": body})
    prediction = predict_serving(spec, ParallelPlan(precision="fp32"), hardware(memory_bytes))
    assert prediction is not None
    return prediction


def forecast(body: dict[str, Any], memory_bytes: int) -> dict[str, Any]:
    return predict(body, memory_bytes).document


@pytest.mark.parametrize(
    ("body", "memory_bytes"),
    [
        ({"max_seqs": 4}, 2**30),  # full contexts of all sequences decide
        ({"max_seqs": 64}, WEIGHTS + 500 * BLOCK_BYTES),  # memory decides
        ({"max_seqs": 64, "kv_blocks": 7}, 2**30),
        ({"max_seqs": 64, "kv_cache_dtype": "int8"}, WEIGHTS + 500 * BLOCK_BYTES),
        (
            {"max_seqs": 64, "draft": DRAFT, "speculate": {"tokens": 2}},
            WEIGHTS + weight_bytes(DRAFT) + 500 * BLOCK_BYTES,
        ),
        (  # the draft's context is shorter than the request that the forecast assumes
            {"max_seqs": 64, "draft": SHORT_DRAFT, "speculate": {"tokens": 2}},
            WEIGHTS + weight_bytes(SHORT_DRAFT) + 500 * BLOCK_BYTES,
        ),
    ],
)
def test_the_forecast_states_the_blocks_of_the_engine(
    body: dict[str, Any], memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form promised 3,136 blocks of 2.15 GiB; the engine had 8,192 of 5.62 GiB.

    An int8 cache and a draft model were not counted. The process has the weights alone, because
    forecasts do not know what Python and its libraries take.
    """
    draft = body.get("draft")
    weights = WEIGHTS + (weight_bytes(draft) if draft else 0)
    monkeypatch.setenv("ORRERY_SLOT_BYTES", str(memory_bytes))
    monkeypatch.setattr(engine_builder, "process_memory", lambda device: (weights, weights))
    predicted = forecast(body, memory_bytes)
    serve = ServeBody.from_dict(body)
    loaded = LoadedModel(Decoder(ModelSpec.from_dict(SHAPE)), None, ())
    loaded = loaded.with_cache_dtype(serve.kv_cache_dtype)
    drafting = None
    if draft and serve.speculate:
        small = LoadedModel(Decoder(ModelSpec.from_dict(draft)), None, ())
        drafting = Drafting(serve.speculate, small)
    engine = build_serve_engine(loaded, serve, drafting=drafting)
    assert engine.scheduler.pool.blocks == predicted["kv_blocks"]
    assert predicted["memory"]["weights_bytes_per_device"] == weights
    block_bytes = predicted["kv_bytes_per_token"] * 16
    assert block_bytes == engine_builder.count_local_blocks(loaded, drafting)[1]


def test_the_forecast_states_the_bytes_of_the_cache() -> None:
    for body, itemsize, scale in (({}, 4, 0), ({"kv_cache_dtype": "int8"}, 1, 8)):
        predicted = forecast(body, 2**30)
        per_head = 2 * 16 * itemsize + scale
        assert predicted["kv_bytes_per_token"] == 2 * 2 * per_head, "layers and heads"


def test_a_draft_model_that_does_not_fit_next_to_the_model_is_refused() -> None:
    """Such a run was accepted with 0 blocks, because the draft counted in the cache's size only."""
    draft = {**DRAFT, "hidden": 2048, "heads": 16, "ffn": 2048}
    memory_bytes = 360 * 2**20  # of which the forecast reserves 0.3 GiB for the process
    speculative = {"max_seqs": 4, "draft": draft, "speculate": {"tokens": 2}}
    alone, both = (predict({"max_seqs": 4}, memory_bytes), predict(speculative, memory_bytes))
    assert alone.fits and not alone.problems(hardware(memory_bytes))
    [problem] = both.problems(hardware(memory_bytes))
    assert not both.fits and problem.hint == "Use a smaller draft model, or none."
    before, after = alone.document["memory"], both.document["memory"]
    added = after["weights_bytes_per_device"] - before["weights_bytes_per_device"]
    assert added == weight_bytes(draft)
    cache_bytes = 384 * 2 * 128 * 4  # keys and values of the assumed request
    assert after["total_bytes"] - before["total_bytes"] == added + cache_bytes
    assert before["kv_room_bytes"] > 0 == after["kv_room_bytes"]


def test_a_draft_model_of_unknown_shape_is_stated(tmp_path: Path) -> None:
    body = {"max_seqs": 4, "draft": {"path": str(tmp_path)}, "speculate": {"tokens": 2}}
    [note] = forecast(body, 2**30)["notes"]
    assert "draft model" in note and "not counted" in note
    assert describe({}, {"prediction": forecast(body, 2**30)})["notes"] == [note]
    assert "notes" not in forecast({"max_seqs": 4}, 2**30)


def test_both_sides_give_the_same_shares_to_the_cache() -> None:
    assert serving.BLOCK == engine_builder.BLOCK_SIZE
    assert {
        "cpu": serving._CACHE_SHARE["cpu"],
        "cuda": serving._CACHE_SHARE["gpu"],
    } == engine_builder.CACHE_SHARE
