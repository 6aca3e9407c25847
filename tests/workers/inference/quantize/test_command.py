"""The quantization command: each method on a small model, its output, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.workers.inference.quantize.test_layers import InMemory
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.wire.serving_reports import Quantized
from workers.inference.model_loading import load_model
from workers.inference.quantize.calibrate import BlockWalk
from workers.inference.quantize.command import main
from workers.inference.quantize.gptq import gptq
from workers.inference.quantize.methods import compress, scale_block
from workers.inference.quantize.replace_linears import quantize_decoder
from workers.models.decoder import Decoder
from workers.models.hf.saving import save_hugging_face
from workers.models.qat import fake_quantize
from workers.models.weights.open import open_weights

SPEC = {
    "name": "bytes",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 128,
    "vocab": 256,
    "max_seq_len": 64,
}
TEXT = "".join(f"{number} times {number} makes {number * number}; " for number in range(160))


def batch(step: int, *, rows: int = 8, length: int = 48) -> torch.Tensor:
    ids = torch.tensor(list(TEXT.encode()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(ids) - length, (rows,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts])


def loss_of(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(decoder(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(decoder: Decoder, steps: int, *, lr: float = 3e-3, first: int = 0) -> None:
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=lr)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(decoder, batch(step)).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model that was trained for a moment, with inputs that stand out, as those of
    large models do.
    """
    torch.manual_seed(3)
    decoder = Decoder(ModelSpec.from_dict(SPEC))
    train(decoder, 90)
    with torch.no_grad():
        for block in decoder.blocks.values():
            scale = torch.ones(64)
            scale[[5, 40]] = 12.0
            block.attn_norm.weight.mul_(scale)
            for name in ("q", "k", "v"):
                block.get_submodule(f"attn.{name}").weight.div_(scale)
    folder = tmp_path_factory.mktemp("taught")
    save_hugging_face(InMemory(decoder), folder)
    (folder / "text.txt").write_text(TEXT)
    return Path(folder)


def go(taught: Path, to: Path, method: str, *more: str) -> int:
    text = str(taught / "text.txt")
    record = [
        "--model",
        str(taught),
        "--to",
        str(to),
        "--method",
        method,
        "--calibrate",
        text,
        "--evaluate",
        text,
    ]
    return main(
        [*record, "--samples", "6", "--window", "48", "--tokens", "480", "--group", "32", *more]
    )


@pytest.mark.parametrize(
    ("method", "share", "worse"),
    [
        ("int8", 0.5, 1.01),
        ("smoothquant", 0.5, 1.02),
        ("fp8", 0.5, 1.1),
        ("int4", 0.45, 1.5),
        ("awq", 0.45, 1.3),
        ("gptq", 0.45, 1.3),
        ("lowrank", 0.95, 3.0),
        ("prune", 0.95, 3.0),
    ],
)
def test_each_method_writes_a_loadable_folder_and_a_report(method, share, worse, taught, tmp_path):
    to = tmp_path / "small"
    assert go(taught, to, method, "--dir", str(tmp_path / "run"), "--keep", "0.8") == 0
    report = json.loads((to / "report.json").read_text())
    record = Quantized.from_dict({key: value for key, value in report.items() if key != "layers"})
    assert record.bytes_after < share * record.bytes_before
    assert record.perplexity_after < worse * record.perplexity_before < 8 * worse
    assert len(report["layers"]) == (2 if method == "prune" else 14)
    assert all(0 <= each["error"] < 0.5 for each in report["layers"])
    (event,) = (tmp_path / "run/rank-0/events.jsonl").read_text().splitlines()
    assert json.loads(event)["data"]["files"][0]["name"] == "report.json"
    if method == "awq":
        scaled = [each for each in report["layers"] if each["name"].endswith("attn.q")]
        assert all(
            each["error_with_scales"] < each["error_without"] and each["power"] > 0
            for each in scaled
        )
        assert {5, 40} <= set(scaled[0]["saliency"]["top"]) and scaled[0]["saliency"]["curve"]
    config = json.loads((to / "config.json").read_text()).get("quantization_config", {})
    assert config.get("quant_method") == {
        "int8": "compressed-tensors",
        "smoothquant": "compressed-tensors",
        "int4": "awq",
        "lowrank": "low-rank",
        "prune": None,
    }.get(method, method)
    plain = open_weights(to)
    assert all(
        plain.read(name).isfinite().all()
        for name in ("blocks.0.attn.q.weight", "blocks.1.mlp.down.weight")
    )
    if method == "prune":
        assert plain.spec.ffn == 96
    assert go(taught, to, method) == 64, "never over what is there"


def test_heads_are_pruned_with_their_keys(taught, tmp_path):
    assert go(taught, tmp_path / "small", "prune", "--neurons", "0", "--heads", "0.5") == 0
    spec = open_weights(tmp_path / "small").spec
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.ffn) == (2, 2, 16, 128)


def test_scales_change_no_output_and_gptq_loses_less_than_rounding(taught):
    source = ModelSource(path=str(taught))
    ids = [batch(step, rows=1) for step in range(6)]

    def fresh() -> Decoder:
        return load_model(source, precision="fp32", device=torch.device("cpu")).decoder

    plain, folded = fresh(), fresh()
    with torch.inference_mode():
        wanted = plain(ids[0])
    for method in ("awq", "smoothquant"):
        for _, block, inputs in BlockWalk(folded, ids).blocks():
            scale_block(block, method, inputs, 32)
    with torch.inference_mode():
        torch.testing.assert_close(folded(ids[0]), wanted, atol=2e-3, rtol=2e-3)
    errors: dict[str, float] = {}
    for method in ("int4", "gptq", "awq"):
        errors[method] = sum(
            each["error"] for each in compress(fresh(), method, ids, group=32).layers
        )
    assert errors["gptq"] < 0.8 * errors["int4"] and errors["awq"] < errors["int4"]
    weight, gram = torch.randn(8, 64), torch.eye(64)
    assert gptq(weight, gram, group=32).order is not None
    for act_order in (True, False):
        # independent inputs: nothing to make up for
        packed = gptq(weight, gram, group=32, act_order=act_order)
        assert (
            float((packed.weight() - weight).abs().max()) <= 0.51 * float(packed.scales.max()) * 1.1
        )


def test_training_that_knows_of_rounding_loses_less_by_it():
    losses: dict[bool, Any] = {}
    for aware in (False, True):
        torch.manual_seed(5)
        decoder = Decoder(ModelSpec.from_dict({**SPEC, "layers": 1, "hidden": 32, "ffn": 64}))
        train(decoder, 60)
        with torch.no_grad():  # inputs that stand out, so that rounding by groups costs something
            for name in ("q", "k", "v"):
                decoder.get_parameter(f"blocks.0.attn.{name}.weight")[:, 3] *= 20
            decoder.get_parameter("blocks.0.attn_norm.weight")[3] /= 20
        if aware:
            fake_quantize(decoder, "int4", group=32)
        train(decoder, 40, lr=1e-3, first=60)
        assert all(
            each.grad is not None and each.grad.abs().sum() > 0 for each in decoder.parameters()
        )
        for module in decoder.modules():
            module.__dict__.pop("forward", None)
        quantize_decoder(decoder, "int4")
        with torch.inference_mode():
            losses[aware] = float(
                sum(loss_of(decoder, batch(step)) for step in range(1000, 1004)) / 4
            )
    assert losses[True] < losses[False]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "nowhere/here"], "does not exist"),
        (["--method", "prune", "--neurons", "1.5"], "prune nothing or everything"),
        (["--evaluate", "none.txt"], "none.txt cannot be read"),
    ],
)
def test_errors_are_reported_and_leave_no_folder(more, message, taught, tmp_path, capsys):
    assert go(taught, tmp_path / "small", "awq", *more) == 64
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
