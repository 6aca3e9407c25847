"""The training loop: steps, metrics, validation, text samples."""
