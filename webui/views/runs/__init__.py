"""Pages of runs: list, new run, run page, fork, comparison."""
