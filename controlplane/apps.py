from django.apps import AppConfig

__all__ = ["ControlPlaneConfig"]


class ControlPlaneConfig(AppConfig):
    name = "controlplane"
    verbose_name = "Control plane"

    def ready(self) -> None:
        # Imported for what they register: system checks and a scheme of the API description.
        from controlplane import checks  # noqa: F401
        from controlplane.api import schema  # noqa: F401
