"""Reports of serve runs, also as version 0.1 wrote them."""

from __future__ import annotations

from workers.contracts.wire.serving_reports import EngineSnapshot, EngineState, Summary

STATE = EngineState(now_s=1.0, running=1, waiting=0, blocks=4, block_size=16, used=1, map="1...")


def test_a_summary_of_version_0_1_has_its_snapshot() -> None:
    snapshot = EngineSnapshot(time=2.0, state=STATE)
    summary = Summary(requests=1, snapshot=snapshot)
    written = summary.to_dict()
    # version 0.1 wrote `stood`
    assert "stood" not in written
    # version 0.1 wrote `stood`
    old = {("stood" if name == "snapshot" else name): value for name, value in written.items()}
    assert Summary.from_dict(old) == Summary.from_dict(written) == summary
