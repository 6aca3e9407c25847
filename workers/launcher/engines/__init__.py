"""Where the program of jobs of engines was until 0.2; waiting jobs still start it here."""
