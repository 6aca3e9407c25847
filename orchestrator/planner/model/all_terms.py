"""Imports every module that registers terms or parameters of training.

Import it wherever terms are computed by name. Does not depend on search, calibration or storage.
"""

from orchestrator.planner.model import (
    activations,
    flops,
    kriging,
    optimizers,
)
from orchestrator.planner.model.communication import (
    collective_bytes,
    communication_time,
    data_parallel_bytes,
    model_parallel_bytes,
)
from orchestrator.planner.model.compute import adapters, kernels, layer_time, offloading
from orchestrator.planner.model.finetuning import rollouts, second_module, trained_weights
from orchestrator.planner.model.memory import (
    buffers,
    host_memory,
    model_states,
    moments,
    parameters,
    peak,
    uneven_shards,
)
from orchestrator.planner.model.terms import TERMS
from orchestrator.planner.model.time import cost, pipeline, step_time

MODULES = (
    activations,
    adapters,
    buffers,
    cost,
    collective_bytes,
    communication_time,
    flops,
    host_memory,
    kernels,
    kriging,
    layer_time,
    model_states,
    moments,
    offloading,
    optimizers,
    parameters,
    peak,
    pipeline,
    rollouts,
    second_module,
    step_time,
    trained_weights,
    uneven_shards,
    data_parallel_bytes,
    model_parallel_bytes,
)

__all__ = ["MODULES", "TERMS"]
