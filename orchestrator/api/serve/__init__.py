"""`/serve/{run}/v1/…`: a serve run's OpenAI-compatible API, from outside.

`application` is the ASGI application.
"""

from orchestrator.api.serve.proxy import application

__all__ = ["application"]
