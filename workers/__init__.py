"""What lives on the nodes: contracts, agent, launcher, recorder, models, training and inference.

Knows nothing of the control plane or of pages; `workers.contracts` is the one room both sides
import.
"""
