"""A training program that Orrery did not start, recorded with three lines.

Run: ORRERY_URL=http://127.0.0.1:8000 ORRERY_TOKEN=… python examples/recorder.py
"""

import math
import os

import orrery_recorder

run = orrery_recorder.init(
    url=os.environ.get("ORRERY_URL"), token=os.environ.get("ORRERY_TOKEN"), name="recorder example"
)
for step in range(1, int(os.environ.get("STEPS", "100")) + 1):
    loss = 2.0 + 2.0 * math.exp(-step / 20)
    run.log({"loss": loss, "lr": 1e-3}, step=step, tokens=step * 1024)
run.finish()
