"""Web pages of the control plane."""
