"""Random and malformed input for every reader of messages, sockets and REST."""
