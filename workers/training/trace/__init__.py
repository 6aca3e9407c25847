"""What the engine tells of its own steps: where time goes, bytes sent, the pipeline in time,
profiles on demand.
"""
