"""The OpenAI-compatible server over an inference engine."""
