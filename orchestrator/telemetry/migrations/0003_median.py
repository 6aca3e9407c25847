from django.db import migrations, models


def mark_runs(apps, schema_editor):
    """Let ingest compute the metric summaries of all runs that have points."""
    stale, cursor = (apps.get_model("telemetry", name) for name in ("StaleSummary", "Cursor"))
    ids = cursor.objects.filter(stream="points").order_by().values_list("run_id", flat=True)
    stale.objects.bulk_create(
        [stale(run_id=id) for id in sorted(set(ids))], ignore_conflicts=True, batch_size=2000
    )


class Migration(migrations.Migration):

    dependencies = [("telemetry", "0002_run_table")]

    operations = [
        migrations.AddField(
            model_name="metricsummary", name="median", field=models.FloatField(null=True)
        ),
        migrations.RunPython(mark_runs, migrations.RunPython.noop),
    ]
