"""Pages of experiments and sweeps, and guided series of runs."""
