"""The control plane. Never imports torch."""
