"""Device time of ended attempts: productive, or lost by cause. `README.md` defines each figure."""
