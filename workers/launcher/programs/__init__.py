"""What a script run needs before its ranks start: its program and its environment."""
