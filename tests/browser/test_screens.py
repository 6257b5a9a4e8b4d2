"""Every page at two widths, light and dark: nothing overflows, everything has a name, and a picture is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from controlplane.redis import STREAMS_PREFIX, with_database
from migrations_app.choices import MigrationState as S
from tests.browser import factories
from tests.browser.conftest import ARTIFACTS, PATIENCE_MS, REDIS_DATABASE, log_in
from tests.browser.stand_in_instance import StandInInstance

Pair = tuple[StandInInstance, StandInInstance]
SCREENS = ARTIFACTS / "screens"

#: Basics that a screen reader depends on; returns what is wrong, in words.
AUDIT = """() => {
  const wrong = [];
  const name = (element) => (element.getAttribute("aria-label") || element.textContent || element.title || "").trim();
  if (document.querySelectorAll("h1").length !== 1) wrong.push("not exactly one h1");
  if (!document.documentElement.lang) wrong.push("no language");
  for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    if (!field.labels?.length && !field.getAttribute("aria-label")) wrong.push(`no label: ${field.name || field.id}`);
  }
  for (const control of document.querySelectorAll("button, a[href]")) {
    if (!name(control)) wrong.push(`no name: ${control.outerHTML.slice(0, 80)}`);
  }
  for (const table of document.querySelectorAll("table")) {
    if (!table.querySelector("thead th[scope=col]")) wrong.push("table without column headers");
  }
  let level = 0;
  for (const heading of document.querySelectorAll("main h1, main h2, main h3")) {
    const now = Number(heading.tagName[1]);
    if (now > level + 1) wrong.push(`heading level jumps to ${now}: ${name(heading)}`);
    level = now;
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of new Set(ids.filter((id, index) => ids.indexOf(id) !== index))) wrong.push(`id twice: ${id}`);
  for (const element of document.querySelectorAll("[style], [onclick], [onload]")) {
    if (element.tagName !== "HTML") wrong.push(`inline style or handler: ${element.outerHTML.slice(0, 80)}`);
  }
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > room) wrong.push(`${document.documentElement.scrollWidth} px in ${room}`);
  return wrong;
}"""


@pytest.fixture(params=[(1440, 900), (390, 844)], ids=["wide", "phone"])
def width(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["light", "dark"])
def screen(
    request: pytest.FixtureRequest, chromium: Browser, site_url: str, width: tuple[int, int], complaints: list[str]
) -> Iterator[Page]:
    context = chromium.new_context(
        base_url=site_url, viewport={"width": width[0], "height": width[1]}, color_scheme=request.param
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()


def keep(page: Page, name: str, complaints: list[str]) -> None:
    """Takes a picture, and adds what the audit finds to the complaints."""
    # Before the picture: taking it leaves styles behind that hide the text cursor.
    complaints += [f"{name}: {problem}" for problem in page.evaluate(AUDIT)]
    SCREENS.mkdir(parents=True, exist_ok=True)
    scheme = "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
    width = page.viewport_size["width"] if page.viewport_size else 0
    page.screenshot(path=SCREENS / f"{name}-{width}-{scheme}.png", full_page=True)


@pytest.fixture
def streams() -> Iterator[None]:
    """Three streams that a proxy claims to relay."""
    import redis
    from django.conf import settings

    client = redis.Redis.from_url(with_database(settings.REDIS_URL, REDIS_DATABASE))
    rows = [
        {
            "stream_id": f"s-{number}", "model": "smollm2", "instance": "a-one", "tokens": 40 * number,
            "age_s": 1.7 * number, "last_token_age_s": 0.03, "legs": 1,
        }
        for number in (1, 2, 3)
    ]  # fmt: skip
    client.set(f"{STREAMS_PREFIX}screens", json.dumps(rows), ex=60)
    yield
    client.delete(f"{STREAMS_PREFIX}screens")
    client.close()


def test_pages_hold_together(screen: Page, pair: Pair, streams: None, complaints: list[str]) -> None:
    source_server, target_server = pair
    source_server.requests = [
        {
            "request_id": f"chatcmpl-{number}f3a9c1d7e", "stream_id": f"s-{number}", "status": "running",
            "prompt_tokens": 210 + number, "output_tokens": 31 * number, "kv_blocks": 17 + number,
            "age_s": 2.5 * number, "migratable": number != 3,
            "reason": None if number != 3 else {"code": "no_proxy", "message": "It did not come through a proxy."},
        }
        for number in (1, 2, 3)
    ]  # fmt: skip
    target_server.status["factors"]["attention_backend"] = "FLASH_ATTN"
    target_server.status["kv"]["free_blocks"] = 20
    factories.user()
    source = factories.Instance.objects.get(pk="a-one")
    target = factories.Instance.objects.get(pk="b-two")
    factories.instance("c-silent", port=8190, status="unreachable", served_model_name="other-model")
    done = factories.finished_job(target, source)
    failed = factories.job(source, target)
    factories.move(failed, S.PREFLIGHT, S.ATTACHING)
    factories.attached(failed, 3, seed=3)
    factories.move(failed, S.FAILED, error_code="peer_lost", error="b-two stopped answering while blocks were sent.")

    screen.goto("/login/")
    keep(screen, "login", complaints)
    log_in(screen, "operator")
    expect(screen.locator("#connection")).to_have_text("Live")
    keep(screen, "dashboard", complaints)
    screen.goto("/instances/")
    keep(screen, "instances", complaints)
    screen.goto("/instances/a-one/")
    expect(screen.locator("#requests tr")).to_have_count(3)
    keep(screen, "instance", complaints)
    screen.reload()
    screen.get_by_role("link", name="Migrate…").click()
    expect(screen.get_by_role("dialog")).to_be_visible()
    keep(screen, "migrate-dialog", complaints)
    screen.goto("/instances/a-one/migrate/")
    keep(screen, "migrate-page", complaints)
    screen.goto("/migrations/")
    keep(screen, "history", complaints)
    screen.goto(f"/migrations/{done.id}/")
    keep(screen, "migration-done", complaints)
    screen.goto(f"/migrations/{failed.id}/")
    keep(screen, "migration-failed", complaints)
    screen.goto("/account/")
    screen.get_by_role("button", name="Create a token").click()
    keep(screen, "account", complaints)
    assert complaints == []


def test_empty_pages_say_what_to_do_next(screen: Page, complaints: list[str]) -> None:
    factories.user()
    log_in(screen, "operator")
    expect(screen.get_by_text("vllm serve MODEL")).to_be_visible()
    expect(screen.get_by_text("Nobody is streaming.")).to_be_visible()
    keep(screen, "dashboard-empty", complaints)
    screen.goto("/migrations/")
    expect(screen.get_by_text("No migration yet.")).to_be_visible()
    keep(screen, "history-empty", complaints)
    screen.goto("/no-such-page/")
    keep(screen, "not-found", complaints)
    assert [text for text in complaints if "404" not in text] == []


def test_the_live_page_holds_together(screen: Page, complaints: list[str]) -> None:
    factories.user()
    log_in(screen, "operator")
    source = factories.instance("vllm-a-7f3c", status="draining", resume_status="active")
    target = factories.instance("vllm-b-91de", port=8101, status="migrating", resume_status="standby")
    job = factories.job(source, target)
    screen.goto(f"/migrations/{job.id}/")
    expect(screen.locator("#connection")).to_have_text("Live")
    checks = [
        {"name": name, "source_value": str(value), "target_value": str(value), "level": "ok", "remedy": ""}
        for name, value in factories.FACTORS.items()
    ]
    factories.move(job, S.PREFLIGHT)
    factories.move(job, S.ATTACHING, preflight={"level": "ok", "checks": checks})
    rows = factories.attached(job, 8)
    factories.move(job, S.COPYING)
    for index, (blocks, dirty) in enumerate([(212, 31), (31, 9), (9, 3), (3, 1)]):
        factories.copied(job, index, blocks, dirty=dirty, hit=40 if index == 0 else 0, ms=20 + blocks * 1.6)
    factories.move(job, S.HANDING_OVER)
    for row, gap in zip(rows[:5], (54.2, 58.9, 61.3, 57.0, 66.8), strict=True):
        factories.moved(row, gap_ms=gap)
    expect(screen.locator("[data-chips=target] .chip")).to_have_count(5)
    expect(screen.locator("#rounds tr")).to_have_count(4)
    expect(screen.locator("#preflight .check")).to_have_count(len(checks))
    screen.wait_for_timeout(700)
    keep(screen, "migration-live", complaints)
    assert complaints == []


def test_the_playground_holds_together(screen: Page, complaints: list[str]) -> None:
    factories.user()
    log_in(screen, "operator")
    screen.goto("/playground/")
    screen.get_by_label("Max tokens").fill("160")
    screen.get_by_role("button", name="Start 4 streams").click()
    expect(screen.locator(".stream").first.locator("[data-part=moves]")).to_contain_text("a-one → b-two")
    keep(screen, "playground", complaints)
    assert complaints == []
