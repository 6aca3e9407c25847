"""Gives members of teams a role: the table of members becomes a model, then has a column more."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

ROLES = [
    ("viewer", "viewer"),
    ("submitter", "submitter"),
    ("operator", "operator"),
    ("admin", "admin"),
]


class Migration(migrations.Migration):
    dependencies = [("accounts", "0001_initial")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="TeamMembership",
                    fields=[
                        (
                            "id",
                            models.BigAutoField(
                                auto_created=True,
                                primary_key=True,
                                serialize=False,
                                verbose_name="ID",
                            ),
                        ),
                        (
                            "team",
                            models.ForeignKey(
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="memberships",
                                to="accounts.team",
                            ),
                        ),
                        (
                            "user",
                            models.ForeignKey(
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="memberships",
                                to=settings.AUTH_USER_MODEL,
                            ),
                        ),
                    ],
                    options={
                        "db_table": "accounts_team_members",
                        "unique_together": {("team", "user")},
                    },
                ),
                migrations.AlterField(
                    model_name="team",
                    name="members",
                    field=models.ManyToManyField(
                        blank=True,
                        related_name="teams",
                        through="accounts.TeamMembership",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="teammembership",
            name="role",
            field=models.CharField(
                choices=ROLES, db_default="submitter", default="submitter", max_length=16
            ),
        ),
        migrations.AddField(
            model_name="team",
            name="budget_device_hours",
            field=models.FloatField(blank=True, null=True),
        ),
    ]
