"""Activation memory, term by term: what a training step keeps for its backward pass on one device.

Importing the package registers its terms: tensors of a block by part (`attention`, `mlp`,
`experts`), a layer under its
recomputation (`layer`), a pipeline rank (`stage`), the logits (`logits`). Knows no parameters,
gradients or buffers.
"""

import orchestrator.planner.activations.attention
import orchestrator.planner.activations.experts
import orchestrator.planner.activations.layer
import orchestrator.planner.activations.logits
import orchestrator.planner.activations.mlp
import orchestrator.planner.activations.stage
import orchestrator.planner.activations.tokens  # noqa: F401
