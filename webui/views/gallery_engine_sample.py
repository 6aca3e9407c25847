"""What the engine tells of a run, made up: heat maps, pipeline timelines and collectives for the
gallery.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, Final

from orchestrator.planner.schedules.simulate import simulate
from orchestrator.planner.schedules.timeline import timeline
from webui.charts import measured_communication, measured_pipeline
from webui.charts.heat import Heat, Mark, Strip, heat
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
from webui.tabs.heats import Shown
from webui.tabs.samples import Lane, Samples, Text

STEPS: Final = range(1, 601)


def gallery_context() -> dict[str, Any]:
    wild = Random(7)  # the same picture every day
    return {
        "heats": [
            _skew(wild),
            _many_ranks(wild),
            _underflow(wild),
            _loads(wild),
            _experts(wild),
            _gradients(wild),
            _weights(wild),
            _odd(),
            _nothing(),
        ],
        "samples": [
            _written(),
            _written_in_ids(),
            Samples([], "The first texts come after step 200."),
        ],
        "timelines": [_timeline(1.08), _timeline(9.0), _unforeseen()],
        "calls": [_calls(1.02), _calls(1.6), _uncounted()],
    }


def _skew(wild: Random) -> Shown:
    strips = [
        Strip(
            f"rank {rank}",
            STEPS,
            [
                abs(wild.gauss(0.004, 0.002)) + (0.06 if rank == 5 and 280 < step < 460 else 0.0)
                for step in STEPS
            ],
            f"node n{1 + rank // 4}, stage {rank // 4}",
        )
        for rank in range(8)
    ]
    marks = [
        Mark(300, "Slow rank 5 (n2, stage 1) at step 300: 87% of the time the others wait for it"),
        Mark(470, "No progress for 31 s on rank 2", "bad"),
    ]
    drawn = heat(
        strips, says=formatting.seconds, summary=skew_summary(strips[:6], 0.4), marks=marks
    )
    return Shown(
        "skew", "Who comes late", "how long after the first rank of its stage each came", drawn, ""
    )


def _many_ranks(wild: Random) -> Shown:
    strips = [
        Strip(
            f"rank {rank}",
            STEPS,
            [abs(wild.gauss(0.01 + 0.03 * (rank // 8 == 3), 0.004)) for _ in STEPS],
            f"node n{rank // 8}, stage {rank // 32}",
        )
        for rank in range(64)
    ]
    drawn = heat(strips, says=formatting.seconds, summary=skew_summary(strips, 0.4), left_out=192)
    return Shown("skew-64", "Who comes late, of 256", "one node's network is slow", drawn, "")


def _underflow(wild: Random) -> Shown:
    strips = [
        Strip(
            f"layer {layer:02}",
            STEPS,
            [
                max(0.0, 0.02 * layer + 0.1 * math.exp(-step / 90) + wild.gauss(0, 0.01))
                for step in STEPS
            ],
        )
        for layer in range(12)
    ]
    drawn = heat(strips, says=formatting.percent, summary=underflow_summary(strips))
    return Shown(
        "underflow",
        "Gradients lost to underflow",
        "share of each layer's gradient entries",
        drawn,
        "",
    )


def _loads(wild: Random) -> Shown:
    by_layer = {layer: {e: wild.gammavariate(6, 1 / 6) for e in range(32)} for layer in range(6)}
    by_layer[2] |= {7: 4.2, 8: 0.0}
    strips = [
        Strip(f"layer {layer}", list(row), list(row.values())) for layer, row in by_layer.items()
    ]
    drawn = heat(
        strips, says=_times, summary=loads_summary(by_layer), scale="even", across="expert"
    )
    return Shown(
        "loads", "Expert loads, now", "each expert's share of its layer's tokens", drawn, ""
    )


def _experts(wild: Random) -> Shown:
    strips = []
    for expert in range(8):
        away = wild.uniform(-1.6, 1.6)
        curve = [2 ** (away * math.exp(-step / 150) + wild.gauss(0, 0.1)) for step in STEPS]
        strips.append(Strip(f"expert {expert}", STEPS, curve))
    now = {0: {expert: strip.y[-1] for expert, strip in enumerate(strips)}}
    drawn = heat(strips, says=_times, summary=loads_summary(now, of_steps=True), scale="even")
    return Shown(
        "experts", "Experts of layer 0", "step by step; 1 is even", drawn, "", [0, 1, 2, 3], 0
    )


def _layers() -> list[str]:
    return ["embedding", *(f"layer {layer:02}" for layer in range(12)), "head"]


def _gradients(wild: Random) -> Shown:
    strips = [
        Strip(
            name,
            STEPS,
            [
                10 ** (-0.25 * (13 - depth)) * math.exp(wild.gauss(0, 0.3) + 2 / step)
                for step in STEPS
            ],
        )
        for depth, name in enumerate(_layers())
    ]
    drawn = heat(strips, says=norm, summary=gradients_summary(strips), scale="orders")
    return Shown("gradients", "Gradient norm by layer", "fading towards the embedding", drawn, "")


def _weights(wild: Random) -> Shown:
    strips = [
        Strip(
            name,
            STEPS[::10],
            [20 * (1 + wild.uniform(0.2, 2.5) * depth / 13 * step / 600) for step in STEPS[::10]],
        )
        for depth, name in enumerate(_layers())
    ]
    drawn = heat(
        [since_first(each) for each in strips],
        says=_times,
        summary=weights_summary(strips),
        scale="even",
    )
    return Shown("weights", "Weight norm by layer", "over its first; 1 is unchanged", drawn, "")


def _written() -> Samples:
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
    steps, older = ("2,400", "1,200", "200"), [Text("800", "an older one", False)]
    lanes = [
        Lane(
            prompt,
            [Text(step, text, step == "2,400") for step, text in zip(steps, some, strict=True)],
            older[:place],
        )
        for place, (prompt, some) in enumerate(texts.items())
    ]
    says = (
        "What the model writes after the same words, 40 tokens long, drawn at temperature 0.8: "
        "4 checkpoints"
    )
    return Samples(lanes, f"{says}, the newest of step 2,400.")


def _written_in_ids() -> Samples:
    return Samples(
        [Lane("15 2044 9 71", [Text("200", "11 9 2044 2044 8", False)], [])],
        "Of step 200.",
        in_ids=True,
    )


def _odd() -> Shown:
    curve = [0.01] * 40 + [math.nan] * 3 + [0.02] * 20
    drawn = heat(
        [Strip("layer 0", range(len(curve)), curve)],
        says=formatting.percent,
        summary="Three steps are no numbers.",
    )
    return Shown("odd", "Not finite", "what is not a number has a colour of its own", drawn, "")


def _nothing() -> Shown:
    drawn: Heat | None = heat([], says=formatting.seconds, summary="")
    return Shown(
        "empty",
        "Nothing yet",
        "an empty place",
        drawn,
        "A run of several ranks tells this with its first step.",
    )


def _foreseen() -> dict[str, Any]:
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


def _told(factor: float) -> list[dict[str, Any]]:
    """Ranks' own words for a step that went as foreseen, only `factor` times as long and less even."""
    foreseen, wild = _foreseen(), Random(3)
    kinds = {"F": "F", "B": "I", "W": "W"}
    found = []
    for rank in range(foreseen["devices"]):
        actions: list[list[Any]] = []
        for row in (row for row in foreseen["rows"] if row["device"] == rank):
            start, end = row["start_s"] * factor, row["end_s"] * factor
            late = (end - start) * wild.uniform(0, 0.25)
            where = [row["stage"], row["micro_batch"]]
            actions += [
                ["recv", *where, start, start + late],
                [kinds[row["kind"]], *where, start + late, end],
            ]
        found.append(
            {
                "step": 40,
                "stages": 8,
                "pp_rank": rank,
                "began_s": 1.7e9,
                "actions": actions,
                "bubble_fraction": 0.14 + 0.01 * rank,
            }
        )
    return found


def _timeline(factor: float) -> measured_pipeline.Beside | None:
    return measured_pipeline.beside(_told(factor), _foreseen())


def _unforeseen() -> measured_pipeline.Beside | None:
    return measured_pipeline.beside(_told(1.0)[:3], None)


def _calls(factor: float) -> measured_communication.Calls | None:
    foreseen = {
        "all_reduce_bytes": 3.1e9,
        "all_gather_bytes": 0.9e9,
        "reduce_scatter_bytes": 0.9e9,
        "send_bytes": 4e7,
    }
    latest = {
        f"comm/{name}": value * (factor if "gather" in name else 1.0)
        for name, value in foreseen.items()
    }
    more = {"comm/bytes": sum(latest.values()), "comm/exposed_s": 0.021, "step_time_s": 0.31}
    return measured_communication.calls(latest | more, foreseen)


def _uncounted() -> measured_communication.Calls | None:
    return measured_communication.calls({"comm/bytes": 2e8, "comm/all_to_all_bytes": 2e8}, None)


def _times(value: float) -> str:
    return f"{formatting.quantity(value, 2)}×"
