"""Predicted and measured time of whole training runs: ten runs of all kinds, after one probe.

`python -m tests.bench.bench_whole_run` starts an installation on this machine, probes it for a
minute, and then submits one run after the other, each sized so that its prediction takes
`--seconds` (150). Both times count from placement to end. `--runs 2 --seconds 10 --least 0
--probe 0` is a short check. Needs an idle machine with two cores: about 30 minutes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.record import record
from tests.flows.embedded import Orrery

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 2
LEAST_S = 120.0
SIZING_STEPS = 1_000_000  # of the spec whose check sizes the run; it is not submitted

REVERSER = {
    "name": "reverser",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "ffn": 256,
    "vocab": 256,
    "max_seq_len": 32,
}
REVERSE = {"path": "reverse.jsonl", "format": "prompt_completion"}
CHATS = {"path": "chats.jsonl", "format": "messages"}
PREFERENCES = {"path": "preferences.jsonl", "format": "preference"}


def main(arguments: Sequence[str]) -> int:
    def option(name: str, default: float) -> float:
        return float(arguments[arguments.index(name) + 1]) if name in arguments else default

    seconds, least = option("--seconds", 150), option("--least", LEAST_S)
    probe_s, count = option("--probe", 60), int(option("--runs", 10))
    home = Path(tempfile.mkdtemp(prefix="orrery-bench-"))
    orrery = Orrery(home / "home", devices=RANKS, environ={"ORRERY_FIRST_PROBE_S": "0"})
    try:
        data = orrery.home / "data"
        data.mkdir(parents=True)
        for name in ("reverse", "chats", "preferences"):
            shutil.copy(EXAMPLES / f"{name}.jsonl", data)
        orrery.start()
        if probe_s:
            probe(orrery, probe_s)
        bases = {
            "runs/base": trained(orrery, plain(steps=20, checkpoint={"every_steps": 20})),
            "runs/reverser": trained(orrery, reverser(steps=60, checkpoint={"every_steps": 60})),
        }
        specs = {
            name: sized(orrery, name, with_bases(body, bases), seconds)
            for name, body in kinds().items()
        }
        rows = []
        for name, spec in list(specs.items())[:count]:
            rows.append(measured(orrery, name, spec, seconds))
            print(rows[-1], flush=True)
    finally:
        orrery.close()
        shutil.rmtree(home, ignore_errors=True)
    short = [row["run"] for row in rows if row["measured_s"] < least]
    errors = sorted(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows)
    common: dict[str, Any] = {
        "runs": len(rows),
        "each": rows,
        "shorter_than_wanted": short,
        "probe_s": probe_s,
    }
    what = "error of a whole run's predicted time"
    for which, value, figure in (
        ("median", median(errors), "<= 10"),
        ("worst", errors[-1], "<= 25"),
    ):
        record(
            "whole_run",
            what=f"{what}, {which}",
            value=100 * value,
            unit="%",
            figure=figure,
            **common,
        )
    return 0


def probe(orrery: Orrery, seconds: float) -> None:
    """One probe of the idle node."""
    assert orrery.client is not None
    [node] = orrery.get("nodes")["items"]
    path = f"nodes/{node['id']}/probe"

    def accepted() -> bool:
        # refused while programs of the start use the cores
        assert orrery.client is not None
        answer = orrery.client.post(path, json={"seconds": seconds})
        assert answer.status_code in (202, 409), answer.text
        return answer.status_code == 202

    orrery.until(accepted, 120, "the node is idle", every_s=5.0)

    def state() -> str:
        newest = orrery.get(f"nodes/{node['id']}/probes")["items"][0]
        assert newest["state"] != "failed", newest["message"]
        return "" if newest["state"] == "requested" else str(newest["state"])

    orrery.until(state, seconds + 180, "the probe has a result", every_s=2.0)


def trained(orrery: Orrery, spec: dict[str, Any]) -> str:
    """A finished run from whose weights others start, as a path."""
    run = orrery.submit(spec, name="base")
    assert orrery.until_state(run, "finished", "failed", seconds=600) == "finished"
    return f"runs/{run}"


def sized(orrery: Orrery, name: str, spec: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The spec with as many steps as are predicted to take this time."""
    assert orrery.client is not None
    endless = spec | {"train": spec["train"] | {"steps": SIZING_STEPS}}
    answer = orrery.client.post("runs/check", json={"spec": endless})
    assert answer.status_code == 200, answer.text
    checked = answer.json()
    assert not checked["problems"], f"{name}: {checked['problems']}"
    steps = max(2, round(seconds / checked["prediction"]["step_time_s"]))
    return spec | {"train": spec["train"] | {"steps": steps}}


def measured(orrery: Orrery, name: str, spec: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Predicted and measured seconds of one run from its placement to its end."""
    run = orrery.submit(spec, name=name)
    state = orrery.until_state(run, "finished", "failed", seconds=20 * seconds + 300)
    assert state == "finished", f"{name} is {state}: {orrery.get(f'runs/{run}')['exit']}"

    def whole() -> dict[str, Any] | None:
        prediction: dict[str, Any] = orrery.get(f"runs/{run}")["prediction"]
        return prediction if "total_s" in (prediction.get("measured") or {}) else None

    prediction = orrery.until(whole, 60, f"{name} has a measured time", every_s=1.0)
    terms = prediction["whole_run"]["terms"]
    ended = prediction["measured"]
    return {
        "run": name,
        "steps": spec["train"]["steps"],
        "predicted_s": round(prediction["whole_run"]["total_s"] - terms["restarts_s"], 2),
        "measured_s": round(ended["total_s"], 2),
        "predicted_steps_s": round(terms["steps_s"] + terms.get("rollouts_s", 0.0), 2),
        "measured_steps_s": round(ended["steps_s"], 2),
        "ended": time.strftime("%H:%M:%S"),
    }


def with_bases(body: dict[str, Any], bases: dict[str, str]) -> dict[str, Any]:
    """The spec with the paths of the runs that were trained for it."""
    return {
        key: with_bases(value, bases)
        if isinstance(value, dict)
        else bases.get(value, value)
        if isinstance(value, str)
        else value
        for key, value in body.items()
    }


def plain(plan: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Pretraining of a tiny Llama."""
    return {
        "kind": "train",
        "model": train.pop("model", "llama-tiny"),
        "data": train.pop("data", {"preset": "shakespeare"}),
        "plan": {"micro_batch_size": 4, "global_batch_size": 8, **(plan or {})},
        "train": {"seq_len": 128, **train},
    }


def reverser(plan: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Fine-tuning of a model that reverses words."""
    options = {"objective": "sft", "sft": {"train_on": "completion", "packing": False}}
    size = {"micro_batch_size": 64, "global_batch_size": 64, **(plan or {})}
    wanted = {"model": REVERSER, "data": REVERSE, "seq_len": 10, **options, **train}
    return plain(size, **{key: value for key, value in wanted.items() if value is not None})


def kinds() -> dict[str, dict[str, Any]]:
    """Ten different runs: layouts, checkpoints and evaluation, and every kind of objective."""
    saved = {"every_steps": 200, "keep": 2, "async": False}
    rollouts = {
        "algorithm": "grpo",
        "group_size": 8,
        "prompts_per_step": 16,
        "rewards": [{"kind": "exact"}],
        "rollout": {"max_new_tokens": 4},
    }
    large = {"micro_batch_size": 1, "global_batch_size": 2}
    weights = {"path": "runs/base"}
    small = {"micro_batch_size": 2, "global_batch_size": 4}
    return {
        "one rank": plain({"dp": 1}),
        "data parallel, evaluation, checkpoints": plain(
            {"dp": 2, "zero": 1}, eval={"every_steps": 100, "batches": 4}, checkpoint=saved
        ),
        "ZeRO 3, full recomputation": plain({"dp": 2, "zero": 3, "recompute": "full"}),
        "pipeline": plain({"pp": 2, "dp": 1, "micro_batch_size": 2}),
        "tensor parallel": plain({"tp": 2, "dp": 1}),
        "15M, asynchronous checkpoints": plain(
            large | {"dp": 2, "zero": 1}, model="llama-15m", checkpoint=saved | {"async": True}
        ),
        "supervised fine-tuning": plain(
            small, data=CHATS, objective="sft", sft={"train_on": "assistant", "packing": True}
        ),
        "direct preference optimization": plain(
            small, data=PREFERENCES, objective="dpo", dpo={"loss": "dpo", "reference": "initial"}
        ),
        "LoRA": plain({"dp": 2}, init_from=weights, adapter={"method": "lora", "rank": 8}),
        "GRPO": reverser(
            {"micro_batch_size": 128, "global_batch_size": 128},
            objective="grpo",
            sft=None,
            grpo=rollouts,
            init_from={"path": "runs/reverser"},
        ),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
