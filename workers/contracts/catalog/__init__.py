"""Catalogues: devices, presets, parameter counts, metric names and units."""
