"""An operator in a real browser: logs in, watches text stream, presses Migrate, and sees the migration arrive live."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from benchmarks.streams import mixed_requests
from controlplane.supervisor import ROOT
from tests.browser.conftest import CHROMIUM_ARGS
from tests.engine.conftest import RunningStack

ARTIFACTS = ROOT / "test-artifacts"


@pytest.fixture
def page(stack: RunningStack) -> Iterator[Page]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "Chromium is missing: install it, or name its executable in CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        context = browser.new_context(base_url=stack.url, viewport={"width": 1440, "height": 1000})
        context.set_default_timeout(20_000)
        yield context.new_page()
        browser.close()


def test_an_operator_moves_live_streams_in_the_browser(stack: RunningStack, page: Page) -> None:
    source, target = stack.remember_roles()
    page.goto("/")
    page.get_by_label("User name").fill(stack.stack.username)
    page.get_by_label("Password").fill(stack.stack.password)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("row", name=re.compile(f"^{source.id} 127"))).to_contain_text("Active")
    page.screenshot(path=_artifact("engine-dashboard.png"), full_page=True)

    load = stack.load(mixed_requests(6, tokens=240, salt=81))
    page.goto(f"/instances/{source.id}/")
    page.get_by_role("link", name="Migrate…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("To", exact=True).select_option(target.id)
    expect(dialog.get_by_text("Ready", exact=True)).to_be_visible()
    page.screenshot(path=_artifact("engine-dialog.png"))
    dialog.get_by_role("button", name="Start migration").click()
    page.wait_for_url("**/migrations/**")
    page.evaluate("window.notReloaded = true")

    expect(page.locator("#rounds tr").nth(1)).to_be_visible(timeout=60_000)
    page.screenshot(path=_artifact("engine-migration-running.png"), full_page=True)
    expect(page.locator("[data-part=state]")).to_have_text("Done", timeout=60_000)
    assert page.evaluate("window.notReloaded") is True
    expect(page.locator("#result")).to_contain_text("All 6 requests moved")
    page.screenshot(path=_artifact("engine-migration-done.png"), full_page=True)
    answers = load.result(120)
    assert all(not answer.error for answer in answers)
    assert (stack.active().id, stack.standby().id) == (target.id, source.id)


def _artifact(name: str) -> Path:
    ARTIFACTS.mkdir(exist_ok=True)
    return ARTIFACTS / name
