"""Maintains a node's home: deletes what ended runs left, sends what dead supervisors left."""
