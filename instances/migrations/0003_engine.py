from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('instances', '0002_adapters'),
    ]

    operations = [
        migrations.AddField(
            model_name='instance',
            name='engine',
            field=models.JSONField(blank=True, default=dict),
        ),
    ]
