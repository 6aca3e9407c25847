"""The model of reviewed files gets their name; its table stays."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("reviews", "0002_answer_votes")]

    operations = [
        migrations.AlterModelTable(name="dataset", table="reviews_dataset"),
        migrations.RenameModel(old_name="DataSet", new_name="ReviewedFile"),
        migrations.AlterField(
            model_name="reviewedfile",
            name="comparison",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="reviewed_files",
                to="reviews.modelcomparison",
            ),
        ),
        migrations.AlterField(
            model_name="reviewedfile",
            name="review",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="reviewed_files",
                to="reviews.review",
            ),
        ),
    ]
