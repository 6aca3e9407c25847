"""Other inference servers behind the same run, endpoint, points and events."""
