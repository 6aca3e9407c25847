"""Memory parameters that measured runs can calibrate, each with bounds and a default.

The terms of `buffers` and `peak` use them by name.
"""

from __future__ import annotations

from orchestrator.planner.model.parameters import Parameter, declare

MEMORY_PARAMETERS = (
    Parameter(
        "workspace_bytes",
        0.2e9,
        0.05e9,
        2e9,
        0.5,
        "B",
        "matrix-product workspaces of a GPU process",
    ),
    Parameter("working_tensors", 1.0, 0.3, 40.0, 0.7, "", "temporary hidden states of a layer"),
    Parameter(
        "unattributed_fraction",
        0.005,
        0.001,
        0.2,
        1.0,
        "",
        "unexplained bytes over explained bytes",
    ),
    Parameter(
        "allocator_overhead",
        0.08,
        0.002,
        0.6,
        0.5,
        "",
        "reserved but unallocated bytes over allocated ones, at the peak",
    ),
    Parameter(
        "context_bytes",
        1.5e9,
        0.5e9,
        4e9,
        0.3,
        "B",
        "device context and communicators outside the allocator",
    ),
    Parameter(
        "fragmentation",
        0.03,
        0.005,
        0.15,
        0.5,
        "",
        "share of capacity that the allocator cannot use",
    ),
    # a rank of two on torch 2.13: 380 MiB before its model, 425 MiB beyond its tensors while it
    # trains
    Parameter(
        "process_bytes",
        4.3e8,
        0.5e8,
        8e9,
        0.1,
        "B",
        "resident memory of a CPU process beyond its tensors: Python, libraries, communicator",
    ),
)

declare(*MEMORY_PARAMETERS)
