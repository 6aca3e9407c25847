"""Imports every module that registers terms or parameters of training.

Import it wherever terms are computed by name. Does not depend on search, calibration or storage.
"""

from orchestrator.planner.model import activations, flops, kriging, optimizers
from orchestrator.planner.model.communication import engine_traffic, exposed, volumes
from orchestrator.planner.model.compute import kernels, layer_time, offloading
from orchestrator.planner.model.memory import (
    buffers,
    host_memory,
    model_states,
    parameters,
    peak,
    uneven_shards,
)
from orchestrator.planner.model.terms import TERMS
from orchestrator.planner.model.time import cost, pipeline, step_time

MODULES = (
    activations,
    buffers,
    cost,
    engine_traffic,
    exposed,
    flops,
    host_memory,
    kernels,
    kriging,
    layer_time,
    model_states,
    offloading,
    optimizers,
    parameters,
    peak,
    pipeline,
    step_time,
    uneven_shards,
    volumes,
)

__all__ = ["MODULES", "TERMS"]
