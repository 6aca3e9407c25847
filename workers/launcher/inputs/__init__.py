"""Has the files that an attempt reads on this node before its ranks start."""
