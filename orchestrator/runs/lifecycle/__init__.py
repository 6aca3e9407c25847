"""User actions on runs, attempt reports, retries, forks and rewinds."""
