"""`python -m orrery_cli` is the command `orrery`."""

from orrery_cli.main import main

main()
