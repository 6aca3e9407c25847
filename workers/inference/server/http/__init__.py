"""The HTTP side: routes, request parsing, admission, response schemas, the listener."""
