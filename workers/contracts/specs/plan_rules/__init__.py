"""The rules that make a plan illegal; `specs.legality` combines and applies them."""
