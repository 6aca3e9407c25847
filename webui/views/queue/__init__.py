"""Pages of the queue: waiting runs, what-if, simulator, windows."""
