from django.db import migrations, models


def start_from_last_seen(apps, schema_editor):
    """Alive runs count as silent from their newest report on."""
    runs = apps.get_model("runs", "Run").objects.filter(ended=None, last_seen__isnull=False)
    runs.update(last_progress=models.F("last_seen"))


class Migration(migrations.Migration):

    dependencies = [("runs", "0015_no_model_of_programs")]

    operations = [
        migrations.AddField(
            model_name="run",
            name="last_progress",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.RunPython(start_from_last_seen, migrations.RunPython.noop),
    ]
