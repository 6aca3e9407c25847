"""`/serve/{run}/v1/…`: the public OpenAI-compatible API of serve runs, an ASGI application."""

from orchestrator.api.serve.proxy import application

__all__ = ["application"]
