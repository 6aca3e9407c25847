"""Response schemas, by subject. Times are ISO 8601 in UTC, sizes bytes, durations seconds."""
