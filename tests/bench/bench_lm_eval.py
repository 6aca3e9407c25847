"""lm-evaluation-harness against a served model: log-likelihoods compared with its `hf` backend.

Not part of the tests, since the package needs pyarrow, pandas and more (0.7 GB). Install it to a
folder of its own and name that:

    pip install --target FOLDER "lm-eval[api]==0.4.13"
    pip install --target FOLDER --no-deps accelerate peft
    LM_EVAL=FOLDER python -m tests.bench.bench_lm_eval

The task is a local file; nothing is downloaded. Weights: those of `python -m workers.models.fetch`,
else untrained ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.record import record
from tests.workers.inference.server.recorded_clients.weights import byte_weights
from workers.models.weights.locations import models_home

FOLDER = "smollm2-135m-instruct"
QUESTIONS = [
    ("The capital of France is", [" Paris", " a small village in the mountains", " blue"]),
    ("Water freezes at zero degrees", [" Celsius", " Fahrenheit of course", " of happiness"]),
    ("def add(a, b):\n    return", [" a + b", " a - b", " None, since nothing is added"]),
    ("She poured the tea into a", [" cup", " book", " very long sentence without end"]),
    ("Two plus two is", [" four", " five", " twenty-two, if they are written down"]),
    ("The opposite of hot is", [" cold", " warm", " spicy"]),
]
CONFIG = """\
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


def main() -> int:
    packages = os.environ.get("LM_EVAL")
    if packages:
        sys.path.append(packages)  # after the environment's own packages
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        print(f"lm-eval is not installed ({error}); see the first lines of this file")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = models_home() / FOLDER
        if not weights.exists():
            weights = byte_weights(folder / "weights", template=None, context=512)
        lines = [
            {"question": question, "choices": choices, "answer": 0}
            for question, choices in QUESTIONS
        ]
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "local_choice.yaml").write_text(CONFIG.format(data=data))
        tasks = TaskManager(include_path=str(folder), include_defaults=False)

        def likelihoods(kind: str, **args: Any) -> list[float]:
            results = lm_eval.simple_evaluate(
                model=kind, model_args=args, tasks=["local_choice"], task_manager=tasks
            )
            samples = sorted(results["samples"]["local_choice"], key=lambda each: each["doc_id"])
            return [float(each[0]) for sample in samples for each in sample["filtered_resps"]]

        with _Served(folder, weights) as (url, served):
            began = time.perf_counter()
            ours = likelihoods(
                "local-completions",
                base_url=f"{url}/v1/completions",
                model=served,
                tokenizer=str(weights),
                tokenizer_backend="huggingface",
                num_concurrent=2,
                max_length=512,
            )
            seconds = time.perf_counter() - began
        theirs = likelihoods("hf", pretrained=str(weights), dtype="float32", device="cpu")
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    record(
        "evaluate",
        what="log-likelihoods of lm-evaluation-harness by a server, largest difference to its hf "
        "backend",
        value=difference,
        unit="nats",
        figure="<= 0.001",
        choices=len(ours),
        weights=weights.name,
        seconds=round(seconds, 1),
        lm_eval=lm_eval.__version__,
    )
    return 0


class _Served:
    """A serve run of `weights` on a free loopback port; its URL and model id."""

    def __init__(self, folder: Path, weights: Path) -> None:
        spec = {
            "kind": "serve",
            "model": {"path": str(weights)},
            "plan": {"precision": "fp32"},
            "serve": {"max_seqs": 4, "kv_blocks": 256},
        }
        self.folder = folder / "run"
        (folder / "spec.json").write_text(json.dumps(spec))
        command = ["-m", "workers.inference.main", "--spec", str(folder / "spec.json")]
        self.process = subprocess.Popen([sys.executable, *command, "--dir", str(self.folder)])

    def __enter__(self) -> tuple[str, str]:
        events = self.folder / "rank-0" / "events.jsonl"
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            lines = events.read_text().splitlines() if events.exists() else []
            for event in map(json.loads, lines):
                if event["type"] == "serving":
                    data = event["data"]
                    return f"http://{data['host']}:{data['port']}", data["model"]
            time.sleep(0.2)
        raise RuntimeError("the server did not start")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
