"""Simulates a server under load: arrivals, continuous batching, queues and latencies."""
