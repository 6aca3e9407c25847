"""`manage.py token USERNAME`: creates an API token and prints it once."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.accounts import selectors, services
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal


class Command(BaseCommand):
    """The command `token`."""

    help = "Creates an API token for a user and prints it; it cannot be shown again."
    requires_system_checks: list[str] = []  # for a fast start; `manage.py check` runs them

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("username")
        parser.add_argument("--role", choices=Role.values, help="give the user this role")
        parser.add_argument(
            "--create", action="store_true", help="create the user if it does not exist"
        )
        parser.add_argument("--json", action="store_true", help="print {token, username, role}")
        parser.add_argument("--name", default="command line", help="the token's name in lists")

    def handle(self, *args: Any, **options: Any) -> None:
        """Create the token; with --create the user, with --role set the role."""
        username, role = options["username"], options["role"]
        try:
            user = selectors.user_get(username)
            if user is None and not options["create"]:
                raise CommandError(f"There is no user {username}. Add --create to create it.")
            if user is None:
                user = services.user_create(username=username, role=role or Role.SUBMITTER)
            elif role and role != user.role:
                services.user_role_set(user=user, role=role, by=None)
            _, text = services.token_create(user=user, name=options["name"], by=None)
        except Refusal as refusal:
            raise CommandError(refusal.detail) from None
        if options["json"]:
            self.stdout.write(
                json.dumps({"token": text, "username": user.username, "role": user.role})
            )
        else:
            self.stdout.write(text)
