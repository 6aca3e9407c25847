"""Mixture of experts: routing, experts, load balancing."""
