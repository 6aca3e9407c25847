"""What a run minimizes: one module per objective, from a model's outputs to losses and metrics."""
