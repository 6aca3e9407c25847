"""Writes decoded telemetry as rows and live frames, inside the transaction of `services`."""
