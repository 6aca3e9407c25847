"""Terms of activation memory: what a training step saves for its backward pass on one device.

Importing the package registers its terms: tensors of a block (`attention`, `mlp`, `experts`), of a
layer with its recomputation (`layer`), of a pipeline rank (`stage`) and the logits (`logits`). Does
not depend on parameters, gradients or buffers.
"""

import orchestrator.planner.model.activations.attention
import orchestrator.planner.model.activations.experts
import orchestrator.planner.model.activations.layer
import orchestrator.planner.model.activations.logits
import orchestrator.planner.model.activations.mlp
import orchestrator.planner.model.activations.stage
import orchestrator.planner.model.activations.tokens  # noqa: F401
