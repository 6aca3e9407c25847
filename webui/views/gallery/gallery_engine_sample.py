"""Generated engine data for the gallery: heat maps, samples, pipeline timelines, collectives."""

from __future__ import annotations

import math
from random import Random
from typing import Any, Final

from orchestrator.planner.schedules.simulate import simulate
from orchestrator.planner.schedules.timeline import timeline
from webui.charts import measured_communication, measured_pipeline
from webui.charts.heat import EventMark, Heat, Strip, heat
from webui.charts.heat_summary import (
    gradients_summary,
    loads_summary,
    norm,
    since_first,
    skew_summary,
    underflow_summary,
    weights_summary,
)
from webui.presentation import formatting
from webui.tabs.heats import HeatCard
from webui.tabs.samples import PromptTexts, Samples, Text

STEPS: Final = range(1, 601)


def gallery_context() -> dict[str, Any]:
    """Return the engine part of the gallery's context."""
    random = Random(7)  # reproducible
    return {
        "heats": [
            _skew(random),
            _many_ranks(random),
            _underflow(random),
            _loads(random),
            _experts(random),
            _gradients(random),
            _weights(random),
            _non_finite(),
            _empty(),
        ],
        "samples": [
            _samples(),
            _samples_in_ids(),
            Samples([], "The first samples follow after step 200."),
        ],
        "timelines": [_timeline(1.08), _timeline(9.0), _without_prediction()],
        "calls": [_calls(1.02), _calls(1.6), _calls_without_prediction()],
    }


def _skew(random: Random) -> HeatCard:
    strips = [
        Strip(
            f"rank {rank}",
            STEPS,
            [
                abs(random.gauss(0.004, 0.002)) + (0.06 if rank == 5 and 280 < step < 460 else 0.0)
                for step in STEPS
            ],
            f"node n{1 + rank // 4}, stage {rank // 4}",
        )
        for rank in range(8)
    ]
    marks = [
        EventMark(
            300, "Slow rank 5 (n2, stage 1) at step 300: other ranks wait for it 87% of the time"
        ),
        EventMark(470, "No progress for 31 s on rank 2", "bad"),
    ]
    chart = heat(
        strips, format=formatting.seconds, summary=skew_summary(strips[:6], 0.4), marks=marks
    )
    return HeatCard(
        "skew", "Arrival skew by rank", "delay of each rank within its stage", chart, ""
    )


def _many_ranks(random: Random) -> HeatCard:
    strips = [
        Strip(
            f"rank {rank}",
            STEPS,
            [abs(random.gauss(0.01 + 0.03 * (rank // 8 == 3), 0.004)) for _ in STEPS],
            f"node n{rank // 8}, stage {rank // 32}",
        )
        for rank in range(64)
    ]
    chart = heat(strips, format=formatting.seconds, summary=skew_summary(strips, 0.4), left_out=192)
    return HeatCard("skew-64", "Arrival skew of 256 ranks", "one node's network is slow", chart, "")


def _underflow(random: Random) -> HeatCard:
    strips = [
        Strip(
            f"layer {layer:02}",
            STEPS,
            [
                max(0.0, 0.02 * layer + 0.1 * math.exp(-step / 90) + random.gauss(0, 0.01))
                for step in STEPS
            ],
        )
        for layer in range(12)
    ]
    chart = heat(strips, format=formatting.percent, summary=underflow_summary(strips))
    return HeatCard(
        "underflow",
        "Gradient underflow",
        "share of each layer's gradient entries",
        chart,
        "",
    )


def _loads(random: Random) -> HeatCard:
    by_layer = {layer: {e: random.gammavariate(6, 1 / 6) for e in range(32)} for layer in range(6)}
    by_layer[2] |= {7: 4.2, 8: 0.0}
    strips = [
        Strip(f"layer {layer}", list(row), list(row.values())) for layer, row in by_layer.items()
    ]
    chart = heat(
        strips, format=_times, summary=loads_summary(by_layer), scale="even", across="expert"
    )
    return HeatCard(
        "loads", "Current expert loads", "each expert's share of its layer's tokens", chart, ""
    )


def _experts(random: Random) -> HeatCard:
    strips = []
    for expert in range(8):
        away = random.uniform(-1.6, 1.6)
        curve = [2 ** (away * math.exp(-step / 150) + random.gauss(0, 0.1)) for step in STEPS]
        strips.append(Strip(f"expert {expert}", STEPS, curve))
    now = {0: {expert: strip.y[-1] for expert, strip in enumerate(strips)}}
    chart = heat(strips, format=_times, summary=loads_summary(now), scale="even")
    return HeatCard(
        "experts", "Experts of layer 0", "step by step; 1 is even", chart, "", [0, 1, 2, 3], 0
    )


def _layers() -> list[str]:
    return ["embedding", *(f"layer {layer:02}" for layer in range(12)), "head"]


def _gradients(random: Random) -> HeatCard:
    strips = [
        Strip(
            name,
            STEPS,
            [
                10 ** (-0.25 * (13 - depth)) * math.exp(random.gauss(0, 0.3) + 2 / step)
                for step in STEPS
            ],
        )
        for depth, name in enumerate(_layers())
    ]
    chart = heat(strips, format=norm, summary=gradients_summary(strips), scale="orders")
    return HeatCard(
        "gradients", "Gradient norm by layer", "vanishing toward the embedding", chart, ""
    )


def _weights(random: Random) -> HeatCard:
    strips = [
        Strip(
            name,
            STEPS[::10],
            [20 * (1 + random.uniform(0.2, 2.5) * depth / 13 * step / 600) for step in STEPS[::10]],
        )
        for depth, name in enumerate(_layers())
    ]
    chart = heat(
        [since_first(strip) for strip in strips],
        format=_times,
        summary=weights_summary(strips),
        scale="even",
    )
    return HeatCard("weights", "Weight norm by layer", "over its first; 1 is unchanged", chart, "")


def _samples() -> Samples:
    texts = {
        "First Citizen:\nBefore we": [
            " proceed any further, hear me speak.\n\nAll:",
            " the thor me sher",
            "eeaotr n",
        ],
        "Apt to be render'd, for": [
            " some slight loss of honour, to the",
            " the my lord the king",
            "\ufffd oae",
        ],
        "Nor nothing in": [" your letters but the truth.", " the the the the the the", ""],
    }
    steps, older = ("2,400", "1,200", "200"), [Text("800", "an older text", False)]
    lanes = [
        PromptTexts(
            prompt,
            [Text(step, text, step == "2,400") for step, text in zip(steps, some, strict=True)],
            older[:place],
        )
        for place, (prompt, some) in enumerate(texts.items())
    ]
    return Samples(lanes, "Up to 40 tokens, temperature 0.8; 4 checkpoints, newest at step 2,400.")


def _samples_in_ids() -> Samples:
    return Samples(
        [PromptTexts("15 2044 9 71", [Text("200", "11 9 2044 2044 8", False)], [])],
        "Step 200.",
        in_ids=True,
    )


def _non_finite() -> HeatCard:
    curve = [0.01] * 40 + [math.nan] * 3 + [0.02] * 20
    chart = heat(
        [Strip("layer 0", range(len(curve)), curve)],
        format=formatting.percent,
        summary="Three steps are not finite.",
    )
    return HeatCard("odd", "Not finite", "non-finite values have their own color", chart, "")


def _empty() -> HeatCard:
    chart: Heat | None = heat([], format=formatting.seconds, summary="")
    return HeatCard(
        "empty",
        "No data yet",
        "an empty card",
        chart,
        "Runs with several ranks report this with their first logged step.",
    )


def _predicted() -> dict[str, Any]:
    ran = simulate(
        "zbv",
        4,
        8,
        forward_s=0.01,
        backward_s=0.012,
        weight_s=0.009,
        virtual_stages=2,
        hop_s=0.0004,
    )
    return timeline(ran, 8)


def _reports(factor: float) -> list[dict[str, Any]]:
    """Reports of a step `factor` times as long as predicted, with some jitter."""
    predicted, random = _predicted(), Random(3)
    kinds = {"F": "F", "B": "I", "W": "W"}
    reports = []
    for rank in range(predicted["devices"]):
        actions: list[list[Any]] = []
        for row in (row for row in predicted["rows"] if row["device"] == rank):
            start, end = row["start_s"] * factor, row["end_s"] * factor
            late = (end - start) * random.uniform(0, 0.25)
            where = [row["stage"], row["micro_batch"]]
            actions += [
                ["recv", *where, start, start + late],
                [kinds[row["kind"]], *where, start + late, end],
            ]
        reports.append(
            {
                "step": 40,
                "stages": 8,
                "pp_rank": rank,
                "began_s": 1.7e9,
                "actions": actions,
                "bubble_fraction": 0.14 + 0.01 * rank,
            }
        )
    return reports


def _timeline(factor: float) -> measured_pipeline.TimelineComparison | None:
    return measured_pipeline.compare(_reports(factor), _predicted())


def _without_prediction() -> measured_pipeline.TimelineComparison | None:
    return measured_pipeline.compare(_reports(1.0)[:3], None)


def _calls(factor: float) -> measured_communication.Calls | None:
    predicted = {
        "all_reduce_bytes": 3.1e9,
        "all_gather_bytes": 0.9e9,
        "reduce_scatter_bytes": 0.9e9,
        "send_bytes": 4e7,
    }
    latest = {
        f"comm/{name}": value * (factor if "gather" in name else 1.0)
        for name, value in predicted.items()
    }
    more = {"comm/bytes": sum(latest.values()), "comm/exposed_s": 0.021, "step_time_s": 0.31}
    return measured_communication.calls(latest | more, predicted)


def _calls_without_prediction() -> measured_communication.Calls | None:
    return measured_communication.calls({"comm/bytes": 2e8, "comm/all_to_all_bytes": 2e8}, None)


def _times(value: float) -> str:
    return f"{formatting.quantity(value, 2)}×"
