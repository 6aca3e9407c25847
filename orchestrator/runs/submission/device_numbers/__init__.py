"""Numbers of devices that a spec leaves open: splits with rollouts, sizes of elastic runs."""
