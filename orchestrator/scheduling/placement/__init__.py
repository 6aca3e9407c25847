"""Devices of one scheduling pass, wait reasons, and the snapshot that the policy reads."""
