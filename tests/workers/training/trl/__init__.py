"""Training curves of TRL, and the runs that must have them."""
