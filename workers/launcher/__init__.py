"""Supervisor of one attempt on one node: torchrun, requests, limits, exit verdict."""
