"""Speculative decoding compared with the same engine without drafts: tokens/s, fp32, in turns.

One case is a deep model whose later layers change little, with its first layers as the draft, for
one request and for four. The other is prompt lookup with a real model, if its weights are
available. Decoding is greedy, and the answers are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does

import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch

from tests.bench.record import record
from workers.contracts.specs.inference import SpeculateSpec
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.inference.engine import Engine
from workers.inference.engine_builder import build_engine, count_available_blocks
from workers.inference.model_loading import LoadedModel, load_model
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.speculate.setup import Drafting
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.weights.locations import models_home

THREADS = int(os.environ.get("OMP_NUM_THREADS") or 2)
ROUNDS, NEW = 3, 96
FOLDER = "smollm2-135m-instruct"
DEEP = ModelSpec.from_dict(
    {
        "name": "deep",
        "layers": 24,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 4,
        "ffn": 2048,
        "vocab": 8192,
        "max_seq_len": 1024,
        "tie_embeddings": False,
    }
)
NAMES = ("d", "deep", "size", "far")
TEXT = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""
EARLY, FAINT = 2, 0.012
"""Layers of the draft, and the factor of the later layers' part in the residual stream."""


def main(selected: list[str]) -> int:
    torch.set_num_threads(THREADS)
    parts: dict[str, Callable[[], None]] = {"layers": layers, "lookup": lookup}
    for name in selected or parts:
        parts[name]()
    return 0


def layers() -> None:
    target = deep()
    draft = Decoder(replace_layers(DEEP, EARLY))
    target_parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(target_parameters[name])
    drafting = Drafting(SpeculateSpec(tokens=6), LoadedModel(draft.requires_grad_(False), None, ()))
    plain = engine(LoadedModel(copy.deepcopy(target), None, ()), None)
    speculating = engine(LoadedModel(target, None, ()), drafting)
    for count in (1, 4):
        prompts = [
            [
                [(7 + turn * 131 + number * 31 + place * 17) % 8192 for place in range(24)]
                for number in range(count)
            ]
            for turn in range(ROUNDS + 1)
        ]
        what = f"of {count} at a time with a draft of {EARLY} of {DEEP.layers} layers"
        compare(plain, speculating, prompts, what=what)


def lookup() -> None:
    path = models_home() / FOLDER
    if not path.exists():
        print(f"{path} is missing; fetch it: python -m workers.models.fetch")
        return
    pair = [
        load_model(ModelSource(path=str(path)), precision="fp32", device=torch.device("cpu"))
        for _ in range(2)
    ]
    tokenizer = pair[0].tokenizer
    assert tokenizer is not None
    tasks = [
        f"Repeat this code, with the name {name} in place of depth.\n\n{TEXT}" for name in NAMES
    ]
    prompts = [
        [tokenizer.encode(tokenizer.chat([{"role": "user", "content": task}]), special=False)]
        for task in tasks
    ]
    drafting = Drafting(SpeculateSpec(ngram=3, tokens=8), None)
    what = "of one request that repeats its prompt, looked up"
    compare(engine(pair[0], None), engine(pair[1], drafting), prompts, what=what)


def compare(
    plain: Engine, speculating: Engine, prompts: list[list[list[int]]], *, what: str
) -> None:
    """Compares both engines in turns. The first turn warms up and does not count."""
    ratios, speeds, equal, counted = [], [], 0, []
    for turn, batch in enumerate(prompts):
        before = copy.copy(speculating.counts)
        plain_s, expected = answer(plain, batch)
        speculating_s, answers = answer(speculating, batch)
        equal += sum(a == b for a, b in zip(expected, answers, strict=True))
        counts = speculating.counts
        if turn:
            ratios.append(plain_s / speculating_s)
            speeds.append(sum(map(len, answers)) / speculating_s)
            names = ("accepted", "drafted", "decodes")
            counted.append([getattr(counts, name) - getattr(before, name) for name in names])
    accepted, drafted, decodes = (sum(each) for each in zip(*counted, strict=True))
    record(
        "inference",
        # row name since version 0.1
        what=f"tokens/s {what}, beside no draft",
        value=statistics.median(ratios),
        unit="times",
        figure=">= 1.4",
        ratios=[round(each, 2) for each in ratios],
        tokens_per_s=round(statistics.median(speeds), 1),
        acceptance=round(accepted / max(1, drafted), 3),
        accepted_per_step=round(accepted / max(1, decodes), 2),
        answers_equal=f"{equal} of {sum(map(len, prompts))}",
        threads=THREADS,
    )


def answer(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds from the first token of the last request to the end, and the answers."""
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=NEW, temperature=0)) for prompt in prompts
    ]
    while not all(len(each.tokens) > len(each.prompt) for each in requests):
        engine.step()
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - began, [list(each.output_tokens) for each in requests]


def engine(loaded: LoadedModel, drafting: Drafting | None) -> Engine:
    count_available_blocks(loaded, drafting)  # rearranges the weights
    return build_engine(loaded, blocks=256, limits=Limits(), drafting=drafting)


def deep() -> Decoder:
    decoder = Decoder(DEEP).requires_grad_(False)
    initialize(decoder, layers=DEEP.layers, seed=1)
    for layer, block in decoder.blocks.items():
        if int(layer) >= EARLY:
            for name, parameter in block.named_parameters():
                if name in ("attn.o.weight", "mlp.down.weight"):
                    parameter.mul_(FAINT)
    return decoder


def replace_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    return ModelSpec.from_dict(
        {**spec.to_dict(), "layers": layers, "name": f"{spec.name}-{layers}"}
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
