"""Creates the operator, or brings its password and rights up to date, and can issue an API token."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction
from knox.models import get_token_model

from controlplane.permissions import OPERATOR_GROUP


class Command(BaseCommand):
    help = "Creates or updates an operator: superuser and member of the group operator."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--username", default=os.environ.get("VLLM_HI_OPERATOR_USERNAME", "operator"))
        parser.add_argument(
            "--password-env",
            default="VLLM_HI_OPERATOR_PASSWORD",
            help="name of the environment variable that holds the password",
        )
        parser.add_argument(
            "--token-out",
            metavar="FILE",
            help='write {"username", "api_token", "expiry"} as JSON to FILE (mode 0600), or to the output if "-"',
        )

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["password_env"]
        password = os.environ.get(name, "")
        if not password:
            raise CommandError(f"The environment variable {name} is empty: set it to the operator's password.")
        with transaction.atomic():
            user, created = get_user_model()._default_manager.get_or_create(username=options["username"])
            # Only if it differs: a new hash would end the sessions of who is logged in.
            if created or not user.check_password(password):
                user.set_password(password)
            user.is_active = user.is_staff = user.is_superuser = True
            user.save()
            user.groups.add(Group.objects.get_or_create(name=OPERATOR_GROUP)[0])
        if options["token_out"]:
            instance, token = get_token_model().objects.create(user=user)
            text = json.dumps(
                {"username": user.get_username(), "api_token": token, "expiry": instance.expiry.isoformat()}
            )
            if options["token_out"] == "-":
                self.stdout.write(text)
            else:
                _write_private(Path(options["token_out"]), text)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text + "\n")
