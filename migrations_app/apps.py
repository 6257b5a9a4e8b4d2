from django.apps import AppConfig

__all__ = ["MigrationsConfig"]


class MigrationsConfig(AppConfig):
    name = "migrations_app"
    verbose_name = "Live migrations"
