"""Prepares the database at a start: migrations, first login, join token, demo run."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from django.core.management import call_command

DEMO_SPEC: dict[str, Any] = {
    "kind": "train",
    "model": "llama-tiny",
    "plan": {
        "dp": 2,
        "zero": 1,
        "precision": "fp32",
        "micro_batch_size": 4,
        "global_batch_size": 8,
    },
    "data": {"preset": "shakespeare"},
    "train": {
        "steps": 3000,
        "seq_len": 128,
        "seed": 1,
        "eval": {"every_steps": 100, "batches": 8},
        "optimizer": {"name": "adamw", "lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "lr_schedule": {"name": "cosine", "warmup_steps": 50, "min_lr": 0.0003},
        "clip_norm": 1.0,
        "checkpoint": {"every_steps": 200, "keep": 3, "async": True},
    },
    "resources": {"devices": 2},
    "tags": ["demo"],
    "notes": "A small Llama reads Shakespeare on two processes of this machine.",
}


EXAMPLE_PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write two lines about autumn.",
    "What is 12 times 12?",
    "Name three planets.",
    "Explain gravity to a child.",
    "Translate 'good morning' into French.",
    "What does a telescope do?",
    "Give me a rhyme for 'star'.",
    "How many days has a leap year?",
    "Who wrote Hamlet?",
    "What is an orrery?",
)


def migrate() -> None:
    """Apply all migrations."""
    call_command("migrate", verbosity=0, interactive=False)


def first_login(home: Path) -> tuple[str, str] | None:
    """Create the first admin: `(username, password)`; None if there are users."""
    from orchestrator.accounts import services
    from orchestrator.accounts.models import User
    from orchestrator.accounts.roles import Role

    if User.objects.exists():
        return None
    password = secrets.token_urlsafe(9)
    services.user_create(
        username="admin", password=password, role=Role.ADMIN, must_change_password=True
    )
    path = first_login_path(home)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"admin {password}\n")
    return "admin", password


def first_login_path(home: Path) -> Path:
    """The file with the first login."""
    return home / "first-login"


def join_token(home: Path, node: str) -> str | None:
    """A new single-use token for this machine's agent; None if the node has joined."""
    from orchestrator.fleet import services
    from orchestrator.fleet.models import Node

    try:
        known = json.loads((home / "agent" / node / "node.json").read_text())["token"]
    except (OSError, ValueError, KeyError):
        known = None
    if known and Node.objects.filter(name=node, join_token_id=known).exists():
        return None
    return services.join_token_create(by=None)


def reported_isolation(node: str, *, patience_s: float) -> dict[str, str] | None:
    """How this machine's agent isolates runs, from the inventory of this start; None if it sends
    none in time.
    """
    from orchestrator.fleet.models import Node

    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        inventory = Node.objects.filter(name=node).values_list("inventory", flat=True).first()
        if inventory and inventory.get("isolation"):
            return dict(inventory["isolation"])
        time.sleep(0.2)
    return None


def forget_isolation(node: str) -> None:
    """Remove what an earlier start reported."""
    from orchestrator.fleet.models import Node

    for row in Node.objects.filter(name=node):
        row.inventory.pop("isolation", None)
        row.save(update_fields=["inventory"])


def example_prompts(root: Path) -> None:
    """Write the example prompts of the new-run form to the data root, unless the file exists."""
    path = root / "examples" / "prompts.jsonl"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {"id": number, "messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False
        )
        for number, prompt in enumerate(EXAMPLE_PROMPTS, 1)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# what forms, pages and the specs in examples/ read
_EXAMPLE_FILES = ("chats.jsonl", "preferences.jsonl", "reverse.jsonl", "reverse_pairs.jsonl")


def example_data(root: Path) -> None:
    """Copy the example files of fine-tuning data to the data root, unless they exist."""
    source = Path(__file__).resolve().parents[3] / "examples"
    for name in _EXAMPLE_FILES:
        path = root / "examples" / name
        if not path.exists() and (source / name).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((source / name).read_bytes())


def submit_demo() -> None:
    """Submit the demo run, owned by the first admin, if there are no runs."""
    from orchestrator.accounts.models import User
    from orchestrator.runs import services
    from orchestrator.runs.models import Run

    owner = (
        User.objects.filter(is_superuser=True).order_by("id").first()
        or User.objects.order_by("id").first()
    )
    if owner is not None and not Run.objects.exists():
        services.run_submit(owner=owner, name="first flight", spec=DEMO_SPEC)
