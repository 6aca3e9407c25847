"""Textbook examples, worked: each a question, a table of numbers, what the simple formula leaves
out, and a link.

The numbers are computed when asked for; the parameters of each example can be changed on the page
the link opens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.planner.scaling import scaling
from workers.contracts.catalog.devices import device

_ZERO_PAPER = "Rajbhandari et al. 2019, arXiv 1910.02054, table 1"


@dataclass(frozen=True)
class Worked:
    """`rows` are shown under `columns`; `leaves_out` says in sentences what the formula gets wrong."""

    columns: list[str]
    rows: list[list[str | float]]
    message: str
    leaves_out: str
    source: str


@dataclass(frozen=True)
class Example:
    """`page` is planner, scaling or serving, `query` its state; `work` makes the table."""

    id: str
    title: str
    question: str
    work: Callable[[], Worked]
    page: str = "scaling"
    query: dict[str, Any] = field(default_factory=dict)


def zero_state_bytes(parameters: float, devices: int, stage: int) -> float:
    """Model states per device under mixed-precision Adam: 16 Ψ; 4 Ψ + 12 Ψ/n; 2 Ψ + 14 Ψ/n; 16 Ψ/n
    for ZeRO 0–3.

    2 bytes of weights, 2 of gradients and 12 of optimizer states a parameter (arXiv 1910.02054,
    section 3.1).
    """
    weights, grads, states = (each * parameters for each in (2.0, 2.0, 12.0))
    return (
        weights / (devices if stage >= 3 else 1)
        + grads / (devices if stage >= 2 else 1)
        + states / (devices if stage >= 1 else 1)
    )


def _zero_stages() -> Worked:
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
    return Worked(
        ["stage", "sharded", "GB per device", "communication"],
        rows,
        "120 GB of states fit no device; sharded over 64 they shrink to 1.9 GB.",
        "Activations, buffers and the layers ZeRO 3 gathers are not in it: open the example in "
        "the planner for those.",
        _ZERO_PAPER,
    )


def _hyperclova() -> Worked:
    measured_days, rows = 13.4, []
    for label, utilization, recompute in (
        ("at the peak, nothing recomputed", 1.0, False),
        ("at half the peak, all recomputed", 0.5, True),
        ("at 30 % of the peak, all recomputed", 0.3, True),
    ):
        peak = device("a100-80g").peak("bf16") * 1e12
        found = scaling(
            parameters=82e9,
            tokens=150e9,
            devices=1024,
            flops_per_device=utilization * peak,
            recompute=recompute,
            usd_per_hour=device("a100-80g").usd_per_hour,
        )
        rows.append([label, round(found["days"], 1), round(found["usd"])])
    reached = 8 * 82e9 * 150e9 / (1024 * measured_days * 86400) / 1e12
    return Worked(
        ["assumed", "days", "USD"],
        [[*row] for row in rows],
        f"The paper reports {measured_days} days, which is {reached:.0f} TFLOP/s a device if all "
        "was recomputed.",
        "The formula knows one rate for everything: no pipeline bubble, no exposed communication, "
        "no restarts.",
        "Kim et al. 2021, arXiv 2109.04650, section 3.2; Narayanan et al. 2021, arXiv 2104.04473, "
        "eq. 4",
    )


# parameters, tokens seen, where the tokens are from
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
        "an assumption: 40 GB of text, about 10 B tokens, 20 epochs; never published",
    ),
    ("GPT-3", 175e9, 300e9, "arXiv 2005.14165, table D.1"),
)


def _v100_days() -> Worked:
    rows: list[list[str | float]] = []
    for name, parameters, tokens, source in _CLASSICS:
        found = scaling(parameters=parameters, tokens=tokens, devices=1, flops_per_device=28e12)
        rows.append(
            [
                name,
                parameters,
                tokens,
                round(found["petaflop_days"], 2),
                round(found["days"], 1),
                source,
            ]
        )
    return Worked(
        [
            "model",
            "parameters",
            "tokens",
            "PFLOP/s-days",
            "days of one V100 at 28 TFLOP/s",
            "tokens from",
        ],
        rows,
        "One V100 would learn GPT in a month and GPT-3 in three and a half centuries.",
        "None of the larger ones fits the memory of one V100; 28 TFLOP/s is 22 % of its fp16 peak.",
        "6 N D, Kaplan et al. 2020, arXiv 2001.08361; Brown et al. 2020, appendix D",
    )


def _larger_batch() -> Worked:
    """1.5 B parameters on 32 GB V100s: what a device can hold beside the states, and what that
    changes.
    """
    capacity, parameters, layers, hidden, seq_len = 32 * 2**30, 1.5e9, 48, 1600, 1024
    # Korthikanti et al. 2022, table 2, the attention core recomputed: 34 bytes per token, layer and
    # hidden
    per_sequence = seq_len * hidden * layers * 34
    rows: list[list[str | float]] = []
    for stage in range(4):
        states = zero_state_bytes(parameters, 64, stage)
        batch = max(0, int((0.9 * capacity - states) // per_sequence))
        rows.append([f"ZeRO {stage}", round(states / 1e9, 1), batch])
    without, sharded = float(rows[0][2]), float(rows[3][2])
    message = (
        f"Sharding over 64 devices frees room for {int(sharded)} sequences a device instead of "
        f"{int(without)}; "
        f"the simple formula then promises {sharded / without:.1f} times the speed."
    )
    return Worked(
        ["stage", "states, GB per device", "sequences that fit"],
        rows,
        message,
        "Time per sequence does not fall with the batch once the matrix products are large: FLOPs "
        "per token stay the "
        "same. What a larger batch really saves is launches, small-matrix inefficiency and one "
        "gradient exchange over "
        "more tokens; the planner's step time at each micro-batch says how much.",
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
        "Time saved when ZeRO allows a larger batch",
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


def example(name: str) -> Example:
    """By id; raises KeyError."""
    return next(each for each in EXAMPLES if each.id == name)
