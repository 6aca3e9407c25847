"""Node agent: a Celery worker that launches attempts and sends heartbeats."""
