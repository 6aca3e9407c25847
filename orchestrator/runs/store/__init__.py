"""The store of copies of checkpoints and artifacts, as the control plane sees it."""
