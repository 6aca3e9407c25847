"""Pages for operators: alerts, notifications, exports, jobs, dead letters, storage."""
