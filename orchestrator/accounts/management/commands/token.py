"""`manage.py token USERNAME`: makes an API token and prints it once."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.accounts import selectors, services
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal


class Command(BaseCommand):
    help = "Makes an API token for a user and prints it; it cannot be shown again."
    requires_system_checks: list[str] = []  # `manage.py check` is for that; a start loads no pages

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("--role", choices=Role.values, help="give the user this role")
        parser.add_argument(
            "--create", action="store_true", help="create the user where there is none"
        )
        parser.add_argument("--json", action="store_true", help="print {token, username, role}")
        parser.add_argument(
            "--name", default="command line", help="what the token is called in lists"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        username, role = options["username"], options["role"]
        try:
            user = selectors.user_get(username)
            if user is None and not options["create"]:
                raise CommandError(f"There is no user {username}. Add --create to make one.")
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
