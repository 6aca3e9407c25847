"""Textbook examples: a question, a table of numbers, the formula's limits, and a link to a page.

The numbers are computed on request; the linked page lets users change the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.planner.scaling import scaling
from workers.contracts.catalog.devices import device

_ZERO_PAPER = "Rajbhandari et al. 2019, arXiv 1910.02054, table 1"


@dataclass(frozen=True)
class ExampleResult:
    """A table, a conclusion, what the formula omits, and the source."""

    columns: list[str]
    rows: list[list[str | float]]
    message: str
    limits: str
    source: str


@dataclass(frozen=True)
class Example:
    """`page` is planner, scaling or serving, `query` its state; `compute` makes the table."""

    id: str
    title: str
    question: str
    compute: Callable[[], ExampleResult]
    page: str = "scaling"
    query: dict[str, Any] = field(default_factory=dict)


def zero_state_bytes(parameters: float, devices: int, stage: int) -> float:
    """Model state bytes per device under mixed-precision Adam.

    16 Ψ; 4 Ψ + 12 Ψ/n; 2 Ψ + 14 Ψ/n; 16 Ψ/n for ZeRO 0–3: 2 bytes of weights, 2 of gradients and 12
    of optimizer states per parameter (arXiv 1910.02054, section 3.1).
    """
    weights, grads, states = (size * parameters for size in (2.0, 2.0, 12.0))
    return (
        weights / (devices if stage >= 3 else 1)
        + grads / (devices if stage >= 2 else 1)
        + states / (devices if stage >= 1 else 1)
    )


def _zero_stages() -> ExampleResult:
    volumes = ("2 Ψ", "2 Ψ", "2 Ψ", "3 Ψ")
    sharded = ("nothing", "optimizer states", "and gradients", "and parameters")
    rows: list[list[str | float]] = [
        [
            f"ZeRO {stage}",
            sharded[stage],
            round(zero_state_bytes(7.5e9, 64, stage) / 1e9, 1),
            volumes[stage],
        ]
        for stage in range(4)
    ]
    return ExampleResult(
        ["stage", "sharded", "GB per device", "communication"],
        rows,
        "120 GB of states do not fit on a device; sharded over 64 they take 1.9 GB.",
        "It omits activations, buffers and the layers that ZeRO 3 gathers: open the example in the "
        "planner for those.",
        _ZERO_PAPER,
    )


def _hyperclova() -> ExampleResult:
    measured_days, rows = 13.4, []
    for label, utilization, recompute in (
        ("at peak, no recomputation", 1.0, False),
        ("at 50 % of peak, full recomputation", 0.5, True),
        ("at 30 % of peak, full recomputation", 0.3, True),
    ):
        peak = device("a100-80g").peak("bf16") * 1e12
        result = scaling(
            parameters=82e9,
            tokens=150e9,
            devices=1024,
            flops_per_device=utilization * peak,
            recompute=recompute,
            usd_per_hour=device("a100-80g").usd_per_hour,
        )
        rows.append([label, round(result["days"], 1), round(result["usd"])])
    reached = 8 * 82e9 * 150e9 / (1024 * measured_days * 86400) / 1e12
    return ExampleResult(
        ["assumed", "days", "USD"],
        [[*row] for row in rows],
        f"The paper reports {measured_days} days, which is {reached:.0f} TFLOP/s per device with "
        "full recomputation.",
        "The formula has a single rate: no pipeline bubble, exposed communication or restarts.",
        "Kim et al. 2021, arXiv 2109.04650, section 3.2; Narayanan et al. 2021, arXiv 2104.04473, "
        "eq. 4",
    )


# name, parameters, training tokens, source of the token count
_CLASSICS: tuple[tuple[str, float, float, str], ...] = (
    (
        "GPT",
        117e6,
        100e9,
        "100 epochs of about 1 B tokens of BooksCorpus; OpenAI counted 0.96 PFLOP/s-days",
    ),
    ("BERT large", 355e6, 250e9, "arXiv 2005.14165, table D.1"),
    (
        "GPT-2",
        1.5e9,
        200e9,
        "assumed, not published: 40 GB of text, about 10 B tokens, 20 epochs",
    ),
    ("GPT-3", 175e9, 300e9, "arXiv 2005.14165, table D.1"),
)


def _v100_days() -> ExampleResult:
    rows: list[list[str | float]] = []
    for name, parameters, tokens, source in _CLASSICS:
        result = scaling(parameters=parameters, tokens=tokens, devices=1, flops_per_device=28e12)
        rows.append(
            [
                name,
                parameters,
                tokens,
                round(result["petaflop_days"], 2),
                round(result["days"], 1),
                source,
            ]
        )
    return ExampleResult(
        [
            "model",
            "parameters",
            "tokens",
            "PFLOP/s-days",
            "days of one V100 at 28 TFLOP/s",
            "source of tokens",
        ],
        rows,
        "One V100 would train GPT in a month and GPT-3 in three and a half centuries.",
        "The larger models do not fit on one V100; 28 TFLOP/s is 22 % of its fp16 peak.",
        "6 N D, Kaplan et al. 2020, arXiv 2001.08361; Brown et al. 2020, appendix D",
    )


def _larger_batch() -> ExampleResult:
    """1.5 B parameters on 32 GB V100s: the sequences that fit next to the states."""
    capacity, parameters, layers, hidden, seq_len = 32 * 2**30, 1.5e9, 48, 1600, 1024
    # Korthikanti et al. 2022, table 2, selective recomputation: 34 bytes per token, layer, hidden
    per_sequence = seq_len * hidden * layers * 34
    rows: list[list[str | float]] = []
    for stage in range(4):
        states = zero_state_bytes(parameters, 64, stage)
        batch = max(0, int((0.9 * capacity - states) // per_sequence))
        rows.append([f"ZeRO {stage}", round(states / 1e9, 1), batch])
    without, sharded = float(rows[0][2]), float(rows[3][2])
    message = (
        f"Sharding over 64 devices makes room for {int(sharded)} sequences per device instead of "
        f"{int(without)}; the simple formula then predicts {sharded / without:.1f} times the speed."
    )
    return ExampleResult(
        ["stage", "states, GB per device", "sequences that fit"],
        rows,
        message,
        "Time per sequence does not fall with the batch once matrix products are large: FLOPs per "
        "token stay the same. A larger batch saves launches, small-matrix inefficiency and "
        "gradient exchanges per token; compare the planner's step times of each micro-batch.",
        f"{_ZERO_PAPER}; activations: Korthikanti et al. 2022, arXiv 2205.05198, table 2, "
        "selective recomputation",
    )


EXAMPLES: tuple[Example, ...] = (
    Example(
        "zero-stages",
        "ZeRO stages of 7.5 B parameters on 64 devices",
        "How much memory do the states of a 7.5 B model take on each of 64 devices?",
        _zero_stages,
        "planner",
        {
            "model": "llama2-7b",
            "device": "a100-40g",
            "nodes": 8,
            "devices_per_node": 8,
            "global_batch_size": 64,
            "seq_len": 2048,
            "fix": "tp=1,pp=1,cp=1",
        },
    ),
    Example(
        "hyperclova",
        "82 B parameters, 150 B tokens, 1,024 A100",
        "How long does an 82 B model take on 1,024 A100?",
        _hyperclova,
        "scaling",
        {
            "parameters": 82e9,
            "tokens": 150e9,
            "device": "a100-80g",
            "devices": 1024,
            "mfu": 0.5,
            "recompute": 1,
        },
    ),
    Example(
        "v100-days",
        "V100 days of GPT, BERT, GPT-2 and GPT-3",
        "How many days would one V100 need?",
        _v100_days,
        "scaling",
        {"parameters": 175e9, "tokens": 300e9, "device": "v100-32g", "devices": 1, "mfu": 0.224},
    ),
    Example(
        "larger-batch",
        "Time saved by the larger batch that ZeRO allows",
        "ZeRO frees memory: does the larger batch make training faster?",
        _larger_batch,
        "planner",
        {
            "model": "gpt2-xl-1.5b",
            "device": "v100-32g",
            "nodes": 8,
            "devices_per_node": 8,
            "global_batch_size": 512,
            "seq_len": 1024,
            "fix": "tp=1,pp=1,cp=1,recompute=selective",
        },
    ),
)
