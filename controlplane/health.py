"""`/healthz`: the process answers. `/readyz`: its database and Redis answer too."""

from __future__ import annotations

import logging

import redis
from django.db import DatabaseError, connections
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe

from controlplane.redis import connection

__all__ = ["healthz", "readyz"]

logger = logging.getLogger(__name__)


@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """200 with `{"status": "ok", "database": true, "redis": true}`, 503 if one of them is false."""
    parts = {"database": _database_answers(), "redis": _redis_answers()}
    ready = all(parts.values())
    return JsonResponse({"status": "ok" if ready else "unavailable", **parts}, status=200 if ready else 503)


def _database_answers() -> bool:
    try:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1 FROM instances_instance LIMIT 1")
    except DatabaseError as error:
        logger.warning("The database does not answer: %s", error)
        return False
    return True


def _redis_answers() -> bool:
    try:
        return bool(connection().ping())
    except redis.RedisError as error:
        logger.warning("Redis does not answer: %s", error)
        return False
