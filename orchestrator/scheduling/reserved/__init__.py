"""Devices set apart: guarantees of teams in pools; windows of maintenance and reservations."""
