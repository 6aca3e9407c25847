"""Readings of devices and nodes over time, idle devices, and the energy of attempts."""
