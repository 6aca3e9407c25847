"""Live sockets: consumers, fan-out hub, topic feeds."""
