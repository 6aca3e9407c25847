"""The command `orrery`: a client of Orrery's REST API. Does not depend on the rest of Orrery."""

__version__ = "0.2.0"
