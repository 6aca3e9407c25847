"""Code that runs on the nodes: contracts, agent, launcher, recorder, models, training, inference.

Does not depend on the control plane or pages; both sides import `workers.contracts`.
"""
