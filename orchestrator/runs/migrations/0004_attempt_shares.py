from django.db import migrations, models
import django.db.models.deletion


STATES = [(name, name) for name in ("assigned", "launching", "running", "exited")]


def copy_shares(apps, schema_editor):
    """One row per attempt and node, from the JSON columns."""
    Attempt = apps.get_model("runs", "Attempt")
    AttemptShare = apps.get_model("runs", "AttemptShare")
    rows = []
    for attempt in Attempt.objects.order_by("pk").iterator(chunk_size=500):
        exited = attempt.nodes_exited or {}
        for share in attempt.placement:
            node = share["node"]
            ended = node in exited or attempt.state == "exited"
            rows.append(
                AttemptShare(
                    attempt=attempt,
                    node=node,
                    state="exited" if ended else attempt.state,
                    exit=exited.get(node),
                )
            )
        if len(rows) >= 1000:
            AttemptShare.objects.bulk_create(rows)
            rows = []
    AttemptShare.objects.bulk_create(rows)


def restore_json(apps, schema_editor):
    """Back to one JSON column per attempt."""
    Attempt = apps.get_model("runs", "Attempt")
    for attempt in Attempt.objects.order_by("pk").iterator(chunk_size=500):
        shares = attempt.shares.filter(state="exited").exclude(exit=None)
        attempt.nodes_exited = {share.node: share.exit for share in shares}
        attempt.save(update_fields=["nodes_exited"])


class Migration(migrations.Migration):
    dependencies = [("runs", "0003_hidden_keys")]

    operations = [
        migrations.CreateModel(
            name="AttemptShare",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("node", models.CharField(max_length=80)),
                ("state", models.CharField(choices=STATES, default="assigned", max_length=12)),
                ("exit", models.JSONField(blank=True, null=True)),
                (
                    "attempt",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="shares", to="runs.attempt"
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["node", "state"], name="share_node_state")],
                "constraints": [models.UniqueConstraint(fields=("attempt", "node"), name="share_once")],
            },
        ),
        migrations.RunPython(copy_shares, restore_json),
        migrations.RemoveField(model_name="attempt", name="nodes_exited"),
    ]
