"""What several processes do to the same rows, on SQLite and, where a server answers, on PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.integration.races import PROCESSES

ROOT = Path(__file__).resolve().parent.parent.parent
POSTGRES = os.environ.get("VLLM_HI_TEST_POSTGRES", "postgres://postgres@127.0.0.1:5432/postgres")


def databases() -> list[str]:
    try:
        psycopg.connect(POSTGRES, connect_timeout=2).close()
    except psycopg.OperationalError:
        return ["sqlite"]
    return ["sqlite", "postgres"]


def administrate(statement: str) -> None:
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=databases())
def races(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Runs all cases once against a database of their own."""
    name = f"vllm_hi_races_{uuid.uuid4().hex[:12]}"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('races') / name}.sqlite3"
    else:
        url = POSTGRES.rpartition("/")[0] + f"/{name}"
        administrate(f'CREATE DATABASE "{name}"')
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "controlplane.settings.test"}
    try:
        run = subprocess.run(
            [sys.executable, "-m", "tests.integration.races"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert run.returncode == 0, run.stderr
        yield json.loads(run.stdout)
    finally:
        if request.param == "postgres":
            administrate(f'DROP DATABASE "{name}" WITH (FORCE)')


def test_one_of_several_workers_gets_the_job(races: dict[str, Any]) -> None:
    assert sorted(races["claim"]["answers"]) == [0] * (PROCESSES - 1) + [1]
    # Claimed once, and one event for it after the one of the creation.
    assert races["claim"]["after"] == ["preflight", 1, 2]


def test_events_of_several_writers_are_numbered_without_a_hole(races: dict[str, Any]) -> None:
    assert races["events"]["answers"] == [50] * PROCESSES
    assert races["events"]["after"] == list(range(1, 50 * PROCESSES + 2))


def test_an_instance_is_granted_to_one_of_several_wishes(races: dict[str, Any]) -> None:
    codes = [code for answer in races["wishes"]["answers"] for code in answer]
    busy = races["wishes"]["after"]
    assert len(codes) == 20 * PROCESSES
    assert set(codes) == {"", "migration_in_progress"}
    assert len(busy) == len(set(busy)) == 2 * codes.count("")
    assert codes.count("") in (1, 2)


def test_versions_of_several_publishers_differ_and_the_last_one_stands(races: dict[str, Any]) -> None:
    versions = sorted(version for answer in races["versions"]["answers"] for version in answer)
    assert versions == list(range(1, 15 * PROCESSES + 1))
    assert races["versions"]["after"] == 15 * PROCESSES


def test_heartbeats_and_reservations_do_not_lose_each_others_writes(races: dict[str, Any]) -> None:
    assert races["heartbeats"]["answers"] == [0] * PROCESSES
    assert races["heartbeats"]["after"] == ["active", "standby"]
