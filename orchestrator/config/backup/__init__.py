"""Backup and restore of the database, the secret key and, on request, what runs stored."""
