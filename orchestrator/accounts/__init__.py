"""Users, teams, API tokens, the audit log and idempotency keys."""
