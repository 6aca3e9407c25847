"""Tokens/s of one CPU process compared with plain PyTorch and Hugging Face's Trainer; 15M, fp32.

Same initial weights, samples in the same order, AdamW with the same settings, clipping; the mean
loss of the last steps must agree, or the training is not the same. All take turns in one run.
`--threads 2` uses two cores. `--compiled` compares with torch.compile in both instead.

Each peer is set up as its users run it on a CPU: Trainer with its defaults; plain PyTorch in
nanoGPT's style with the fused AdamW (nanoGPT itself takes torch's default, which is slower on a
CPU). Part of the difference is how the engine configures torch (`cpu_matmul`, huge pages): a
fourth contender is plain PyTorch with this configuration, which shows the remaining difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor

from tests.bench.picture import save
from tests.bench.record import record
from tests.bench.turns import Contender, run_in_turns
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.hf.saving import save_hugging_face
from workers.models.initialize import initialize
from workers.training.data.run_samples import open_samples
from workers.training.setup.spec_loading import accept

BATCH, SEQ_LEN = 4, 256
ROUNDS, STEPS, WARMUP = 5, 5, 5
# allowed relative difference of losses: weight decay of norms and biases differs between peers
TOLERANCE = 2e-3
MODELS: dict[str, Any] = {
    "llama": "llama-15m",
    "gpt-2": {
        "name": "gpt2-15m",
        "layers": 6,
        "hidden": 288,
        "heads": 6,
        "ffn": 1152,
        "vocab": 32000,
        "max_seq_len": 1024,
        "gated_mlp": False,
        "activation": "gelu_tanh",
        "norm": "layernorm",
        "position": "learned",
        "tie_embeddings": True,
        "bias": "all",
    },
}
CONFIGURED = "plain PyTorch given the engine's products and huge pages"
PEERS = {
    "plain PyTorch": ("speed_plain", ">= 1.0"),
    "Hugging Face Trainer": ("speed_hf", ">= 1.15"),
    CONFIGURED: ("speed_plain", ">= 1.0"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    if options.compiled:
        with tempfile.TemporaryDirectory() as folder:
            compare_compiled(Path(folder), threads=options.threads)
        return
    speeds = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            speeds[name] = compare(name, Path(folder), threads=options.threads)
    if options.models == list(MODELS) and options.threads == 1:
        save(build_figure(speeds), "speed")


def compare_compiled(folder: Path, *, threads: int) -> None:
    """The engine and Trainer, each without and with torch.compile; the Llama model.

    Compilation is not part of the measured turns.
    """
    job = write_job(MODELS["llama"], folder)
    eager, compiled, theirs, theirs_compiled = contenders = [
        Contender("Orrery", "speed_engine"),
        Contender("Orrery with compile", "speed_engine", arguments=("compiled",)),
        Contender("Hugging Face Trainer", "speed_hf"),
        Contender("Hugging Face Trainer with torch_compile", "speed_hf", arguments=("compiled",)),
    ]
    try:
        for number, each in enumerate(contenders):
            each.start(job, folder / str(number), threads=threads, helped=False)
        run_in_turns(contenders, rounds=ROUNDS, steps=STEPS, warmup=WARMUP)
    finally:
        for each in contenders:
            each.kill()
    pairs = [
        (eager, theirs, ">= 2"),
        (eager, theirs_compiled, ">= 1.25"),
        (compiled, eager, ">= 1"),
    ]
    for ours, other, figure in pairs:
        ratios = [slow / fast for slow, fast in zip(other.turns, ours.turns, strict=True)]
        record(
            "speed",
            what=f"tokens/s of {ours.name} over {other.name}, llama 15M, {threads} threads",
            value=statistics.median(ratios),
            unit="times",
            figure=figure,
            spread=[round(min(ratios), 4), round(max(ratios), 4)],
            by_cpu_time=round(
                statistics.median(t / o for t, o in zip(other.cpu, ours.cpu, strict=True)), 4
            ),
            tokens_per_s=round(BATCH * SEQ_LEN / statistics.median(ours.steps), 1),
            theirs=round(BATCH * SEQ_LEN / statistics.median(other.steps), 1),
            load=round(os.getloadavg()[0], 1),
        )


def compare(name: str, folder: Path, *, threads: int) -> dict[str, float]:
    """Tokens/s by contender; records a row for each peer."""
    job = write_job(MODELS[name], folder)
    contenders = [Contender("Orrery", "speed_engine")]
    contenders += [Contender(peer, module) for peer, (module, _) in PEERS.items()]
    try:
        for number, each in enumerate(contenders):
            each.start(job, folder / str(number), threads=threads, helped=each.name == CONFIGURED)
        run_in_turns(contenders, rounds=ROUNDS, steps=STEPS, warmup=WARMUP)
    finally:
        for each in contenders:
            each.kill()
    losses = {each.name: each.summary["loss"] for each in contenders}
    orrery = contenders[0]
    for each in contenders[1:]:
        difference = abs(losses[each.name] / losses[orrery.name] - 1.0)
        assert difference < TOLERANCE, f"{each.name} did not train equally: {losses}"
        ratios = [theirs / own for theirs, own in zip(each.turns, orrery.turns, strict=True)]
        record(
            "speed",
            what=(
                f"tokens/s of Orrery over {each.name}, {name} 15M, {threads} "
                f"thread{'s' if threads > 1 else ''}"
            ),
            value=statistics.median(ratios),
            unit="times",
            figure=PEERS[each.name][1],
            spread=[round(min(ratios), 4), round(max(ratios), 4)],
            by_cpu_time=round(
                statistics.median(t / o for t, o in zip(each.cpu, orrery.cpu, strict=True)), 4
            ),
            tokens_per_s=round(BATCH * SEQ_LEN / statistics.median(orrery.steps), 1),
            theirs=round(BATCH * SEQ_LEN / statistics.median(each.steps), 1),
            batch=BATCH,
            seq_len=SEQ_LEN,
            turns=f"{ROUNDS} of {STEPS} steps",
            losses={peer: round(loss, 5) for peer, loss in losses.items()},
            told=each.summary,  # key since version 0.1
        )
    return {each.name: BATCH * SEQ_LEN / statistics.median(each.steps) for each in contenders}


def build_figure(speeds: dict[str, dict[str, float]]) -> go.Figure:
    """A bar for each contender, by model."""
    figure = go.Figure()
    for peer in next(iter(speeds.values())):
        heights = [by_peer[peer] for by_peer in speeds.values()]
        label = peer.replace(" given ", "<br>given ")
        figure.add_bar(
            x=list(speeds), y=heights, name=label, text=[f"{height:,.0f}" for height in heights]
        )
    figure.update_yaxes(title_text=f"tokens/s, median of {ROUNDS * STEPS} steps")
    size = {"width": 800, "height": 360}
    figure.update_layout(
        template="plotly_white", margin={"l": 60, "r": 20, "t": 20, "b": 40}, **size
    )
    return figure


def write_job(model: Any, folder: Path) -> Path:
    """Writes the job file: spec, weights in Hugging Face format, samples in the engine's order."""
    torch.set_num_threads(1)
    steps = WARMUP + ROUNDS * STEPS
    optimizer = {"name": "adamw", "lr": 2e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    spec: dict[str, Any] = {
        "kind": "train",
        "model": model,
        "plan": {"micro_batch_size": BATCH, "global_batch_size": BATCH},
        "data": {"preset": "shakespeare", "tokenizer": {"vocab": 32000}},
        "train": {
            "steps": steps,
            "seq_len": SEQ_LEN,
            "seed": 1,
            "optimizer": optimizer,
            "clip_norm": 1.0,
        },
    }
    run = accept(spec)
    samples, _ = open_samples(run, cache=folder / "cache", checkpoints=folder)
    rows = np.stack([samples.window(index) for index in range(steps * BATCH)])
    (folder / "windows.bin").write_bytes(rows.astype(np.uint16).tobytes())
    spec["data"]["tokenizer"] = str(folder / "tokenizer.json")
    (folder / "hugging_face").mkdir()
    save_hugging_face(InitialWeights(run.model, seed=run.train.seed), folder / "hugging_face")
    shape = run.model
    config = {
        "llama": shape.position == "rope",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "max_seq_len": shape.max_seq_len,
        "norm_eps": shape.norm_eps,
        "bias": shape.bias == "all",
        "rope_theta": shape.rope.theta,
    }
    job = {
        "spec": spec,
        "config": config,
        "hugging_face": str(folder / "hugging_face"),
        "steps": steps,
        "batch": BATCH,
        "windows": str(folder / "windows.bin"),
        "seq_len": SEQ_LEN,
        "lr": optimizer["lr"],
        "clip_norm": 1.0,
        "weight_decay": optimizer["weight_decay"],
        "fused": True,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


class InitialWeights:
    """The initial weights of a run of `spec`."""

    where = "drawn"

    def __init__(self, spec: ModelSpec, *, seed: int) -> None:
        self.spec = spec
        decoder = Decoder(spec)
        initialize(decoder, layers=spec.layers, seed=seed)
        self._parameters = {name: value.detach() for name, value in decoder.named_parameters()}

    def read(self, name: str) -> Tensor:
        """The tensor with this name."""
        return self._parameters[name]


if __name__ == "__main__":
    main()
