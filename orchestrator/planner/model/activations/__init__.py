"""Activation memory, term by term: what a training step keeps for its backward pass on one device.

Importing the package registers its terms: tensors of a block by part (`attention`, `mlp`,
`experts`), a layer under its
recomputation (`layer`), a pipeline rank (`stage`), the logits (`logits`). Knows no parameters,
gradients or buffers.
"""

import orchestrator.planner.model.activations.attention
import orchestrator.planner.model.activations.experts
import orchestrator.planner.model.activations.layer
import orchestrator.planner.model.activations.logits
import orchestrator.planner.model.activations.mlp
import orchestrator.planner.model.activations.stage
import orchestrator.planner.model.activations.tokens  # noqa: F401
