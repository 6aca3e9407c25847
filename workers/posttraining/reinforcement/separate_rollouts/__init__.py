"""Rollouts on ranks of their own: messages, weights in flight, and the loop of such a rank."""
