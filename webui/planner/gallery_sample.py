"""Sample planner answers for the component gallery."""

from __future__ import annotations

from typing import Any, Final

from django.http import QueryDict

from orchestrator.planner.schedules.simulate import simulate
from orchestrator.planner.schedules.timeline import timeline
from webui.charts import predicted_vs_measured
from webui.planner import result_layout
from webui.planner.charts import memory as plan_memory
from webui.planner.charts.pipeline import pipeline
from webui.planner.form import parse_form
from webui.planner.plan_link import plan_key
from workers.contracts.catalog.units import GIB

_AXES: Final = (
    # dp, tp, pp, zero, micro-batch, recompute, schedule, step time, memory in GiB, bubble
    (8, 1, 1, 3, 2, "selective", "1f1b", 2.31, 61.2, 0.0),
    (4, 2, 1, 2, 2, "none", "1f1b", 2.42, 71.9, 0.0),
    (4, 1, 2, 1, 1, "none", "zbv", 2.55, 66.3, 0.021),
    (2, 2, 2, 1, 2, "selective", "interleaved_1f1b", 2.78, 48.4, 0.06),
    (4, 2, 1, 3, 1, "full", "1f1b", 3.05, 29.7, 0.0),
    (8, 1, 1, 3, 1, "full", "1f1b", 3.11, 27.2, 0.0),
    (1, 4, 2, 1, 2, "none", "1f1b", 3.3, 74.8, 0.11),
    (2, 4, 1, 1, 1, "selective", "1f1b", 3.52, 39.1, 0.0),
    (1, 8, 1, 0, 1, "full", "1f1b", 4.4, 26.1, 0.0),
)


def plan_answer(index: int, *, scale: float = 1.0) -> dict[str, Any]:
    """Returns a sample answer line."""
    dp, tp, pp, zero, micro, recompute, schedule, step, held, bubble = _AXES[index]
    plan = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": 1,
        "ep": 1,
        "zero": zero,
        "sequence_parallel": tp > 1,
        "offload": "none",
        "recompute": recompute,
        "precision": "bf16",
        "schedule": schedule if pp > 1 else "1f1b",
        "virtual_stages": 2 if schedule in ("zbv", "interleaved_1f1b") else 1,
        "micro_batch_size": micro,
        "global_batch_size": 128,
    }
    step, total = step * scale, int(held * scale * GIB)
    parts = {
        "params_bytes": 0.06,
        "grads_bytes": 0.06,
        "optimizer_bytes": 0.31,
        "activations_bytes": 0.37,
        "logits_bytes": 0.08,
        "buffers_bytes": 0.07,
        "unattributed_bytes": 0.05,
    }
    memory: dict[str, Any] = {name: int(total * share) for name, share in parts.items()}
    memory |= {
        "total_bytes": total,
        "reserved_bytes": int(1.08 * total),
        "capacity_bytes": 80 * GIB,
        "stage": 0,
        "per_stage_total_bytes": [int(total * (1 - 0.12 * stage)) for stage in range(pp)],
    }
    return {
        "plan": plan,
        "id": None,
        "ok": True,
        "problems": [],
        "fits": total <= 80 * GIB,
        "memory": memory,
        "step_time_s": step,
        "step_time_low_s": 0.93 * step,
        "step_time_high_s": 1.08 * step,
        "time": {
            "compute_s": (0.83 - bubble) * step,
            "exposed_comm_s": 0.09 * step,
            "bubble_s": bubble * step,
            "optimizer_s": 0.05 * step,
            "other_s": 0.03 * step,
        },
        "tokens_per_s_per_device": 128 * 8192 / step / 8,
        "tflops_per_device": 1150 / step,
        "mfu": 1.16 / step,
        "hfu": 1.3 / step,
        "bubble_fraction": bubble,
        "comm": {
            "dp_bytes": int(48e9 / tp / pp),
            "tp_bytes": 21 * 10**9 * (tp > 1),
            "pp_bytes": 4 * 10**9 * (pp > 1),
            "cp_bytes": 0,
            "ep_bytes": 0,
        },
        "usd_per_billion_tokens": 6.4 * step,
        "kwh_per_billion_tokens": 1.5 * step,
        "days": 11.1 * step,
    }


def search_answer(*, scale: float = 1.0) -> dict[str, Any]:
    """Returns an answer like `orchestrator.planner.api.search`; no plan fits for `scale` > 3."""
    plans = [plan_answer(index, scale=scale) for index in range(len(_AXES))]
    fitting = [plan for plan in plans if plan["fits"]]
    advice = [
        {
            "message": "recompute full would make dp8·z3 fit: 71.4 GiB",
            "changes": {"recompute": "full"},
        },
        {"message": "2 nodes would make dp16·z3 fit: 61.0 GiB", "changes": {"nodes": 2}},
    ]
    return {
        "enumerated": 21_384,
        "legal": 21_384,
        "fit": 8_112 if fitting else 0,
        "seconds": 0.041,
        "plans": fitting,
        "pareto": [index for index in (0, 2, 3, 4, 5, 8) if index < len(fitting)],
        "rejected": {
            "does not fit": 13_272,
            "tp: heads do not divide": 412,
            "ep: the model has no experts": 96,
        },
        "advice": [] if fitting else advice,
    }


def gallery_context() -> dict[str, Any]:
    """Returns the context of all planner components for the gallery."""
    result, state = search_answer(), parse_form(QueryDict())
    plans, tokens = result["plans"], 1e12
    wanted = plans[2]
    key = plan_key(wanted["plan"])
    drawn = simulate(
        "zbv",
        2,
        8,
        forward_s=0.01,
        backward_s=0.012,
        weight_s=0.009,
        virtual_stages=2,
        hop_s=0.0004,
    )
    none = search_answer(scale=3.6)
    measured = [
        {**each, "measured": each["predicted"] * factor}
        for each, factor in zip(
            predicted_vs_measured.predicted_metrics(wanted),
            (1.06, 1.02, 0.97, 1.31, 1.0, 0.99, 1.2),
            strict=False,
        )
    ]
    return {
        "form_state": state,
        "search_result": result,
        "rows": [
            result_layout.row(rank, each, 0, state, key) for rank, each in enumerate(plans, 1)
        ],
        "plan": result_layout.chosen(wanted, state, tokens),
        "scatter": result_layout.drawn(plans, result["pareto"], key),
        "pipeline": pipeline(timeline(drawn, 8)),
        "comparison": {
            "first": plans[0]["plan"],
            "second": plans[1]["plan"],
            "clear": "",
            "rows": result_layout.compared(plans[0], plans[1], tokens),
        },
        "advice": [
            {
                "text": each["message"],
                "query": state.query(**{k: str(v) for k, v in each["changes"].items()}),
            }
            for each in none["advice"]
        ],
        "memory_categories": plan_memory.CATEGORIES,
        "predicted": {
            "rows": predicted_vs_measured.rows(measured),
            "verdict": "fits",
            "mood": "good",
            "device": "h100-80g",
            "summary": predicted_vs_measured.summary(predicted_vs_measured.rows(measured)),
        },
    }
