"""Layers of the decoder: attention, MLP, norms, rotary positions, head."""
