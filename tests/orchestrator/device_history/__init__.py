"""Tests of the history of devices."""
