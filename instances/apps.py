from django.apps import AppConfig

__all__ = ["InstancesConfig"]


class InstancesConfig(AppConfig):
    name = "instances"
    verbose_name = "Instances"
