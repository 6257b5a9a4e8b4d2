"""The Django project: settings, entry points, and what belongs to no single app."""

from controlplane.celery import app as celery_app

__all__ = ["celery_app"]
