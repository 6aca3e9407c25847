"""Run specs, their parts, and what makes them illegal or unsupported."""
