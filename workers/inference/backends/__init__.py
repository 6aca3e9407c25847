"""Other people's servers in place of this engine, behind the same run, endpoint, points and events."""
