"""Terms of communication: volumes, links, exposed time and the engine's own traffic."""
