#!/usr/bin/env python
"""Orrery's command line for the control plane; `python manage.py help` lists the commands."""

import gc
import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "orchestrator.config.settings")
    # its options are settings, so they must be known before settings are read
    if sys.argv[1:2] == ["up"]:
        from orchestrator.config.embedded import options

        options.apply(sys.argv[2:])
    if sys.argv[1:2] in (["plan"], ["calibrate"], ["planner_accuracy"]):
        # they sign nothing and keep nothing: no key is made for them, so they leave no data
        # directory behind
        os.environ.setdefault("ORRERY_SECRET_KEY", "none")
    # what Django and a command load stays: searching it for garbage took a quarter of a start
    gc.disable()
    from django.core.management import BaseCommand, ManagementUtility

    class Utility(ManagementUtility):
        def fetch_command(self, subcommand: str) -> BaseCommand:
            command = super().fetch_command(subcommand)
            gc.freeze()
            gc.enable()
            return command

    Utility(sys.argv).execute()


if __name__ == "__main__":
    main()
