"""Model compression: quantized linears, calibration, pruning, low rank, and reports."""
