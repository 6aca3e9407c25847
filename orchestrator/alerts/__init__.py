"""Rules on metrics, states and health of runs, and the alerts that they open and close."""
