"""States a run's predicted MFU by the peak that its measured MFU divides by.

A device that is not in the catalogue measures its peak when an attempt starts, and load changes
the result: two peaks would make equal throughputs different MFUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.runs.models import Run
from orchestrator.runs.submission.prediction.training import peak_shares
from workers.contracts.wire.event_bodies import PeakMeasured


def peak_apply(*, run: Run, attempt: int, data: Mapping[str, Any]) -> bool:
    """Restate `mfu` and `hfu` of the prediction by the measured peak; False if nothing changes.

    Call it with the run locked. `data` is the valid body of the event `peak_measured`.
    """
    peak = PeakMeasured.from_dict(data)
    row = Run.objects.values_list("prediction", "plan", "attempt_number").get(pk=run.pk)
    prediction, plan, newest = row
    if not prediction or attempt < newest:
        return False
    if peak.precision != (plan or {}).get("precision"):
        return False
    restated = {**prediction, **peak_shares(prediction, peak.tflops)}
    if restated == prediction:
        return False
    run.prediction = restated
    Run.objects.filter(pk=run.pk).update(prediction=restated)
    return True
