"""What the long-running processes of the control plane share. Does not depend on their work."""
