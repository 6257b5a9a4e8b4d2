"""The project around the apps: schema, admin, commands, checks, settings."""

from __future__ import annotations

import json
import stat
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.test import Client
from rest_framework.test import APIClient

from controlplane.checks import join_token_is_set
from controlplane.redis import with_database
from instances.models import Instance
from instances.selectors import live_streams, migration_targets
from migrations_app.models import MigrationJob
from migrations_app.publisher import RateGate
from tests.unit.panel.factories import make_instance, make_job

pytestmark = pytest.mark.django_db


def test_the_schema_describes_every_call(viewer_api: APIClient) -> None:
    schema = viewer_api.get("/api/schema?format=json").json()
    paths = set(schema["paths"])
    assert {
        "/api/v1/instances",
        "/api/v1/migrations",
        "/api/v1/migrations/preflight",
        "/api/v1/migrations/{id}/events",
        "/api/v1/migrations/{id}/abort",
        "/api/v1/tokens",
        "/vllm_hi/register",
        "/vllm_hi/migrate",
    } <= paths
    assert schema["paths"]["/vllm_hi/register"]["post"]["security"] == [{"joinToken": []}]


def test_the_schema_has_no_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    call_command("spectacular", "--validate", "--fail-on-warn", stdout=StringIO())
    assert "Warning" not in capfd.readouterr().err


def test_models_and_migrations_agree() -> None:
    call_command("makemigrations", "--check", "--dry-run", stdout=StringIO())


def test_the_audit_trail_is_read_only_even_for_administrators() -> None:
    job = make_job()
    User.objects.create_superuser("root", password="a-long-password")
    client = Client()
    client.force_login(User.objects.get(username="root"), backend="django.contrib.auth.backends.ModelBackend")
    for model in ("migrationjob", "migrationevent", "migrationround", "migrationrequest"):
        assert client.get(f"/admin/migrations_app/{model}/").status_code == 200
        assert client.get(f"/admin/migrations_app/{model}/add/").status_code == 403
    page = f"/admin/migrations_app/migrationjob/{job.id}"
    assert client.get(f"{page}/change/").status_code == 200
    assert client.post(f"{page}/change/", {"state": "done"}).status_code == 403
    assert client.post(f"{page}/delete/", {"post": "yes"}).status_code == 403
    assert client.post("/admin/instances/instance/hi-a/delete/", {"post": "yes"}).status_code == 403
    assert MigrationJob.objects.get(id=job.id).state == "pending"
    assert Instance.objects.filter(pk="hi-a").exists()


def ensure_operator(*options: str) -> str:
    out = StringIO()
    call_command("ensure_operator", *options, stdout=out)
    return out.getvalue()


def test_ensure_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPERATOR_PASSWORD", "first-password")
    options = ["--username", "olga", "--password-env", "OPERATOR_PASSWORD"]
    assert ensure_operator(*options) == ""
    monkeypatch.setenv("OPERATOR_PASSWORD", "second-password")
    account = json.loads(ensure_operator(*options, "--token-out", "-"))
    user = User.objects.get(username="olga")
    assert user.check_password("second-password")
    assert user.is_superuser
    assert list(user.groups.all()) == [Group.objects.get(name="operator")]
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {account['api_token']}")
    assert client.get("/api/v1/instances").status_code == 200
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    assert ensure_operator(*options, "--token-out", str(path)) == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(json.loads(path.read_text())) == {"username", "api_token", "expiry"}


def test_ensure_operator_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HI_OPERATOR_PASSWORD", raising=False)
    with pytest.raises(CommandError, match="VLLM_HI_OPERATOR_PASSWORD"):
        ensure_operator()
    assert not User.objects.exists()


def test_a_weak_join_token_is_reported(settings: Any) -> None:
    assert join_token_is_set() == []
    settings.VLLM_HI_TOKEN = "short"
    assert [message.id for message in join_token_is_set()] == ["controlplane.W002"]
    settings.VLLM_HI_TOKEN = ""
    assert [message.id for message in join_token_is_set()] == ["controlplane.W001"]


def test_pages_carry_a_content_security_policy(anonymous_api: APIClient) -> None:
    policy = anonymous_api.get("/healthz")["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/1"),
        ("redis://:pass@host:1", "redis://:pass@host:1/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_database_of_a_redis_url(url: str, expected: str) -> None:
    assert with_database(url, 1) == expected


def test_targets_come_with_reasons() -> None:
    source = make_instance("hi-a")
    make_instance("hi-other", instance_type="B", served_model_name="other")
    make_instance("hi-b", instance_type="B")
    make_instance("hi-c")
    make_instance("hi-gone", status="destroyed")
    reasons = {target.pk: reason for target, reason in migration_targets(source)}
    assert next(iter(reasons)) == "hi-b"
    assert reasons["hi-b"] is None
    assert set(reasons) == {"hi-b", "hi-c", "hi-other"}
    assert "smollm2" in str(reasons["hi-other"])


def test_live_streams_are_read_from_all_workers(settings: Any) -> None:
    from controlplane.redis import connection

    client = connection()
    client.set("vllm_hi:streams:w1", json.dumps([{"stream_id": "s1"}, {"stream_id": "s2"}]))
    client.set("vllm_hi:streams:w2", json.dumps([{"stream_id": "s3"}]))
    client.set("vllm_hi:streams:w3", "not json")
    assert [(row["stream_id"], row["worker"]) for row in live_streams()] == [("s1", "w1"), ("s2", "w1"), ("s3", "w2")]
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert live_streams() == []


def test_progress_is_limited_per_job() -> None:
    gate = RateGate(per_second=10)
    assert [round(gate.delay("one", 5.0), 3) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    assert gate.delay("two", 5.0) == 0.0
    assert gate.delay("one", 9.0) == 0.0
