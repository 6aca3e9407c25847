"""The inference engine compared with transformers: SmolLM2-135M, fp32, two threads, in turns.

Throughput of 32 mixed requests compared with one padded batch, decoding of one request, unused
cache memory, and a shared prefix. Both run in one process and compute the same number of tokens
from the same weights. Decoding is greedy, and the answers are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "THP_MEM_ALLOC_ENABLE", "1"
)  # as the command does; applies to transformers too

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.record import record
from workers.contracts.specs.model import ModelSource
from workers.inference.engine import Engine
from workers.inference.engine_builder import build_engine
from workers.inference.model_loading import LoadedModel, load_model
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.models.hf.saving import save_hugging_face
from workers.models.weights.locations import models_home
from workers.models.weights.open import open_weights

FOLDER = "smollm2-135m-instruct"
REQUESTS, THREADS, ROUNDS = 32, 2, 3
Requests = list[tuple[list[int], int]]


def main(selected: list[str]) -> int:
    path = models_home() / FOLDER
    if not path.exists():
        print(f"{path} is missing; fetch it: python -m workers.models.fetch")
        return 2
    torch.set_num_threads(THREADS)
    loaded = load_model(ModelSource(path=str(path)), precision="fp32", device=torch.device("cpu"))
    parts: dict[str, Callable[[LoadedModel, Any], None]] = {
        "answers": answers,
        "single": single,
        "throughput": throughput,
        "prefix": prefix,
    }
    reference = (
        _load_reference(path)
        if set(selected or parts) & {"answers", "single", "throughput"}
        else None
    )
    for name in selected or parts:
        parts[name](loaded, reference)
    return 0


def answers(loaded: LoadedModel, reference: Any) -> None:
    """Compares the answers to 20 prompts, five of each length, so that nothing is padded."""
    count, lengths = 64, (8, 24, 48, 96)
    batches = [
        [
            [(number * 37 + place * 101 + length) % 40_000 for place in range(length)]
            for number in range(5)
        ]
        for length in lengths
    ]
    prompts = [(prompt, count) for batch in batches for prompt in batch]
    engine = make_engine(loaded, prompts)
    added = [engine.add(prompt, greedy(count)) for prompt, _ in prompts]
    while engine.busy:
        engine.step()
    expected = []
    for batch in batches:
        ids = torch.tensor(batch)
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        expected += out[:, ids.shape[1] :].tolist()
    equal = sum(
        list(each.output_tokens) == answer for each, answer in zip(added, expected, strict=True)
    )
    record(
        "inference",
        what=(
            f"greedy answers of {count} tokens that are transformers', token for token, of "
            f"{len(prompts)}"
        ),
        value=equal,
        unit="answers",
        figure=f"== {len(prompts)}",
    )


def throughput(loaded: LoadedModel, reference: Any) -> None:
    batch = requests()
    total = sum(count for _, count in batch)
    orrery_s, reference_s, waste, equal = [], [], [], 0
    for _ in range(ROUNDS):
        engine = make_engine(loaded, batch)
        began = time.perf_counter()
        added = [engine.add(prompt, greedy(count)) for prompt, count in batch]
        while engine.busy:
            engine.step()
            if len(engine.scheduler.running) >= REQUESTS // 2:
                waste.append(unused_share(engine))
        orrery_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        answers = padded(reference, batch)
        reference_s.append(time.perf_counter() - began)
        equal = sum(
            list(each.output_tokens) == answer for each, answer in zip(added, answers, strict=True)
        )
    ratios = [b / a for a, b in zip(orrery_s, reference_s, strict=True)]
    record(
        "inference",
        # row name since version 0.1
        what="tokens/s of 32 mixed requests beside transformers in one padded batch",
        value=statistics.median(ratios),
        unit="times",
        figure=">= 2.5",
        ratios=[round(each, 2) for each in ratios],
        tokens_per_s=round(total / statistics.median(orrery_s), 1),
        transformers_tokens_per_s=round(total / statistics.median(reference_s), 1),
        answers_equal=f"{equal} of {REQUESTS}",
    )
    record(
        "inference",
        what="cache slots without a token, of the blocks in use, 16 requests and more running",
        value=100 * statistics.mean(waste),
        unit="%",
        figure="<= 4",
        worst=round(100 * max(waste), 2),
    )


def single(loaded: LoadedModel, reference: Any) -> None:
    prompt, count = requests()[0][0][:32], 48
    orrery_s, reference_s, same = [], [], True
    for turn in range(6):
        engine = make_engine(loaded, [(prompt, count)])
        request = engine.add(prompt, greedy(count))
        engine.step()
        began = time.perf_counter()
        while engine.busy:
            engine.step()
        step_s = (time.perf_counter() - began) / (count - 1)
        ids = torch.tensor([prompt])
        generated, stamps = _generate_stamped(reference, ids, count)
        if turn:
            orrery_s.append(step_s)
            reference_s.append((stamps[-1] - stamps[0]) / (count - 1))
        same = same and list(request.output_tokens) == generated[0, len(prompt) :].tolist()
    ratios = [b / a for a, b in zip(orrery_s, reference_s, strict=True)]
    record(
        "inference",
        # row name since version 0.1
        what="decode of one request alone beside transformers",
        value=statistics.median(ratios),
        unit="times",
        figure=">= 1.3",
        ratios=[round(each, 2) for each in ratios],
        ms_per_token=round(1e3 * statistics.median(orrery_s), 2),
        transformers_ms_per_token=round(1e3 * statistics.median(reference_s), 2),
        answers_equal=same,
    )


def prefix(loaded: LoadedModel, reference: Any) -> None:
    """16 requests that share their first 1,000 tokens and have 16 further tokens of their own.

    First each one starts while the earlier ones decode; then all start at once.
    """
    common = [place * 31 % 40_000 for place in range(1000)]
    batch = [
        ([*common, *(number * 97 + place * 13 for place in range(16))], 24) for number in range(16)
    ]
    shares, computed = [], 0
    for _ in range(ROUNDS):
        engine = make_engine(loaded, batch)
        ttft_s = []
        for prompt, count in batch:
            request = engine.add(prompt, greedy(count))
            while not request.output_tokens:
                engine.step()
            ttft_s.append(request.first_token_s - request.added_s)
        while engine.busy:
            engine.step()
        shares.append(statistics.median(ttft_s[1:]) / ttft_s[0])
        computed = engine.counts.prompt_tokens
    record(
        "inference",
        what=(
            "TTFT of 15 requests that share a prefix of 1,000 tokens, of the first's, one after "
            "another"
        ),
        value=100 * statistics.median(shares),
        unit="%",
        figure="<= 15",
        prompt_tokens_computed=computed,
        rounds=[round(100 * each, 1) for each in shares],
    )
    engine = make_engine(loaded, batch)
    added = [engine.add(prompt, greedy(count)) for prompt, count in batch]
    while engine.busy:
        engine.step()
    ttft = [each.first_token_s - each.added_s for each in added]
    record(
        "inference",
        what="prompt tokens computed for 16 requests that share 1,000 and arrive together",
        # once, plus the tokens outside full blocks of 16
        value=engine.counts.prompt_tokens,
        unit="tokens",
        figure="<= 1376",
        last_ttft_of_first=round(max(ttft) / min(ttft), 2),
    )


def requests() -> Requests:
    """Prompts of 10 to 300 tokens with answers of 8 to 160, evenly spread and mixed."""
    return [
        (
            [
                (number * 37 + place * 101) % 40_000
                for place in range(10 + number * 13 % 32 * 290 // 31)
            ],
            8 + number * 21 % 32 * 152 // 31,
        )
        for number in range(REQUESTS)
    ]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0, ignore_eos=True)


def make_engine(loaded: LoadedModel, batch: Requests) -> Engine:
    blocks = sum(-(-(len(prompt) + count) // 8) for prompt, count in batch) + 64
    return build_engine(loaded, blocks=blocks, limits=Limits(sequences=REQUESTS))


def unused_share(engine: Engine) -> float:
    """Share of slots in allocated blocks without a token."""
    pool = engine.scheduler.pool
    used: dict[int, int] = {}
    for each in engine.scheduler.running:
        for place, block in enumerate(each.blocks):
            used[block] = min(pool.block_size, each.computed - place * pool.block_size)
    return 1 - sum(used.values()) / (pool.used * pool.block_size)


def padded(reference: Any, batch: Requests) -> list[list[int]]:
    """Generates one left-padded batch as long as its longest answer; truncates each answer."""
    width, most = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
    out = reference.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
    return [row[width : width + count].tolist() for row, (_, count) in zip(out, batch, strict=True)]


def _generate_stamped(
    reference: Any, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, list[float]]:
    """Generates with a timestamp for each token."""
    stamps: list[float] = []

    def stamp(_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(1, dtype=torch.bool)

    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        stopping_criteria=[stamp],
    )
    return out, stamps


def _load_reference(path: Path) -> Any:
    """The same weights as a Hugging Face model."""
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        save_hugging_face(open_weights(path), Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
