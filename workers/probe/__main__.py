"""`python -m workers.probe --ranks N`: probes this node and prints the report as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from workers.contracts.wire.maintenance.node_probe import FULL_S, MOST_S
from workers.probe.node import ProbeError, probe_node


def main() -> int:
    """0 with a report, 3 for a node that was not probed: `{"problem": text}`."""
    parser = argparse.ArgumentParser(prog="workers.probe", description="Probe this node.")
    parser.add_argument("--seconds", type=float, default=FULL_S, help="time to measure")
    parser.add_argument("--ranks", type=int, required=True, help="processes, one per device")
    parser.add_argument("--device", default="cpu", help="the devices' name in the catalogue")
    parser.add_argument("--short", action="store_true", help="leave out the larger shapes")
    parser.add_argument("--force", action="store_true", help="measure a busy node too")
    options = parser.parse_args()
    try:
        report = probe_node(
            seconds=min(options.seconds, MOST_S),
            ranks=options.ranks,
            device=options.device,
            gpu=options.device != "cpu",
            short=options.short,
            force=options.force,
        )
    except ProbeError as problem:
        print(json.dumps({"problem": str(problem)}))
        return 3
    print(json.dumps(report.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
