"""Charts of the planner pages: numbers in, drawable data out."""
