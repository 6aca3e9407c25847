"""Messages of supervisors that other engines start."""
