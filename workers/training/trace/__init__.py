"""Traces of training steps: time breakdown, bytes sent, pipeline timeline and profiles on
demand.
"""
