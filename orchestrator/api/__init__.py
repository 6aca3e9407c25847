"""REST API v1: routers, HTTP plumbing and the OpenAPI document."""
