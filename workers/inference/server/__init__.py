"""The OpenAI-compatible server over an inference engine: requests to tickets, tickets to text."""
