"""Usage reports: device-seconds by day, person, team and pool."""
