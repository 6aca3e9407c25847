"""SFT and DPO runs have TRL's losses, gradient norms and margins at every step."""

from __future__ import annotations

import json

import pytest

from tests.matrix import FULL
from tests.workers.training.row_ranks import run_rows
from tests.workers.training.trl import curves

GOLDEN = json.loads(curves.GOLDEN.read_text())
STEPS = curves.STEPS if FULL else 6


@pytest.mark.parametrize("case", curves.CASES)
def test_the_curve_is_trls(case, pools, tmp_path):
    result = run_rows(pools, curves.spec(case, STEPS), tmp_path, curves.rows(case))
    assert {each["class"] for each in result.outcomes} == {"ok"}, result.outcomes
    for name, expected in GOLDEN[case].items():
        ours = result.values(name)
        assert ours == pytest.approx(expected[:STEPS], rel=1e-5, abs=1e-5), name
