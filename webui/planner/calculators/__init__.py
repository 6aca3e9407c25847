"""Small calculators next to the planner: serving, scaling laws and textbook examples."""
