"""HTTP plumbing of the API: authentication, problems, pagination, idempotency."""
