"""One module per command. They import libraries when they run, so that the command starts fast."""
