"""A running panel with a database of its own, and Chromium to look at it.

The site runs as a process of its own, as in production, over the database that pytest-django made for the tests. What a
test writes with the ORM is therefore on the page, and what it publishes reaches the page's websocket through Redis.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from django.conf import settings
from django.db import connection
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from controlplane.redis import with_database
from tests.browser import factories
from tests.browser.stand_in_instance import StandInInstance

ROOT = Path(__file__).resolve().parent.parent.parent
ARTIFACTS = ROOT / "test-artifacts"
REDIS_DATABASE = 7
START_S = 30
#: For what never happens; on a busy machine five seconds, the default, are not enough for what does.
PATIENCE_MS = 30_000
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


expect.set_options(timeout=PATIENCE_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.django_db(transaction=True))


def _database_url() -> str:
    database = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{Path(str(database['NAME'])).absolute()}"
    host, port = database["HOST"] or "127.0.0.1", database["PORT"] or 5432
    return f"postgres://{database['USER']}:{database['PASSWORD']}@{host}:{port}/{database['NAME']}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _forget_jobs() -> None:
    """Takes the migrations that pages started out of the queue, where no worker waits for them."""
    client = redis.Redis.from_url(with_database(settings.REDIS_URL, REDIS_DATABASE))
    leftovers = list(client.scan_iter("vllm_hi*"))
    if leftovers:
        client.delete(*leftovers)
    client.close()


@pytest.fixture(scope="package")
def site_url(django_db_setup: None) -> Iterator[str]:
    """Base URL of a panel that Daphne serves."""
    port = _free_port()
    ARTIFACTS.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.test",
        "DATABASE_URL": _database_url(),
        "REDIS_URL": with_database(settings.REDIS_URL, REDIS_DATABASE),
        "VLLM_HI_PUBLIC_URL": f"http://127.0.0.1:{port}",
    }
    command = [sys.executable, "-m", "daphne", "-b", "127.0.0.1", "-p", str(port), "tests.browser.site:application"]
    with (ARTIFACTS / "site.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/login/", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, "the site ended at once; see test-artifacts/site.log"
                assert time.monotonic() < deadline, "the site did not come up; see test-artifacts/site.log"
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            # Daphne waits for connections that a failed test left open.
            process.kill()
            process.wait()
        _forget_jobs()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "Chromium is missing: install it, or name its executable in CHROMIUM"
    # Playwright's synchronous API keeps an event loop in this thread. Django takes that for asynchronous code.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
            yield browser
            browser.close()
    finally:
        if before is None:
            del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        else:
            os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


@pytest.fixture
def context(chromium: Browser, site_url: str) -> Iterator[BrowserContext]:
    context = chromium.new_context(base_url=site_url, viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser complained about: script errors, refused resources, violations of the content policy."""
    return []


@pytest.fixture
def page(context: BrowserContext, complaints: list[str]) -> Page:
    page = context.new_page()

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    page.on("console", listen)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return page


@pytest.fixture
def operator(page: Page) -> Page:
    """A page on which the operator has logged in through the form."""
    factories.user()
    return log_in(page, "operator")


def log_in(page: Page, username: str) -> Page:
    page.goto("/login/")
    page.get_by_label("User name").fill(username)
    page.get_by_label("Password").fill(factories.PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/")
    return page


@pytest.fixture
def pair() -> Iterator[tuple[StandInInstance, StandInInstance]]:
    """Two answering instances: a-one is active, b-two on standby."""
    source, target = StandInInstance("a-one"), StandInInstance("b-two")
    factories.instance("a-one", port=source.port)
    factories.instance("b-two", port=target.port, status="standby", requests={"running": 0, "waiting": 0})
    yield source, target
    source.close()
    target.close()
