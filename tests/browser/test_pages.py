"""What a person can do on the pages, in a real browser."""

from __future__ import annotations

import re

from playwright.sync_api import BrowserContext, Page, expect

from instances.templatetags import formats
from migrations_app.choices import MigrationState as S
from migrations_app.models import MigrationJob
from tests.browser import factories
from tests.browser.conftest import log_in
from tests.browser.stand_in_instance import StandInInstance

Pair = tuple[StandInInstance, StandInInstance]


def test_a_wrong_password_is_refused_in_words(page: Page) -> None:
    factories.user()
    page.goto("/login/")
    page.get_by_label("User name").fill("operator")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("correct username and password")


def test_pages_need_a_login(page: Page) -> None:
    page.goto("/playground/")
    expect(page).to_have_url(re.compile(r"/login/\?next=/playground/$"))


def test_the_dashboard_shows_instances_and_follows_changes(operator: Page, complaints: list[str]) -> None:
    operator.goto("/")
    expect(operator.get_by_text("No instance has registered.")).to_be_visible()
    expect(operator.locator("#connection")).to_have_text("Live")
    source = factories.instance("a-one")
    target = factories.instance("b-two", port=8101, status="standby")
    factories.job(source, target)
    table = operator.locator("#instances")
    expect(table.get_by_role("row", name=re.compile("a-one"))).to_contain_text("Active")
    expect(table.get_by_role("row", name=re.compile("b-two"))).to_contain_text("Ready")
    expect(operator.locator("#cards")).to_contain_text("2 of 2")
    expect(operator.locator("#jobs")).to_contain_text("Pending")
    assert complaints == []


def test_the_dialog_compares_before_it_lets_start(operator: Page, pair: Pair, complaints: list[str]) -> None:
    _, target = pair
    factories.instance("c-other", port=8199, status="standby", served_model_name="other-model")
    target.status["factors"]["dtype"] = "bfloat16"
    operator.goto("/instances/a-one/")
    operator.get_by_role("link", name="Migrate…").click()
    dialog = operator.get_by_role("dialog")
    expect(dialog.locator("option", has_text="c-other")).to_have_attribute("disabled", "")
    expect(dialog.locator("option", has_text="c-other")).to_contain_text("It serves other-model")
    start = dialog.get_by_role("button", name="Start migration")

    wrong = dialog.get_by_role("listitem").filter(has_text="dtype").filter(has_text="bfloat16")
    expect(wrong).to_contain_text("float32")
    expect(wrong).to_contain_text("Start the target with the same --dtype")
    expect(wrong.get_by_role("img", name="error")).to_be_visible()
    expect(start).to_be_disabled()

    target.status["factors"]["dtype"] = "float32"
    dialog.get_by_label("To", exact=True).select_option("")
    expect(start).to_be_disabled()
    dialog.get_by_label("To", exact=True).select_option("b-two")
    expect(dialog.get_by_text("Ready", exact=True)).to_be_visible()
    expect(start).to_be_enabled()
    assert not MigrationJob.objects.exists()

    start.click()
    operator.wait_for_url("**/migrations/**")
    job = MigrationJob.objects.get()
    assert (job.source_id, job.target_id, job.migration_type, job.tn) == ("a-one", "b-two", "preserve_source", 2)
    expect(operator.get_by_role("status").filter(has_text="Pending")).to_be_visible()
    assert complaints == []


def test_the_dialog_selects_requests_for_a_source_that_goes_on(
    operator: Page, pair: Pair, complaints: list[str]
) -> None:
    source, _ = pair
    source.requests = [
        {"request_id": f"r{number}", "stream_id": f"s{number}", "prompt_tokens": tokens, "output_tokens": 1,
         "kv_blocks": 4, "age_s": 3.0, "status": "RUNNING", "migratable": True, "reason": None}
        for number, tokens in enumerate((5, 90, 120))
    ]  # fmt: skip
    operator.goto("/instances/a-one/")
    operator.get_by_role("link", name="Migrate…").click()
    dialog = operator.get_by_role("dialog")
    expect(dialog.get_by_text("Ready", exact=True)).to_be_visible()
    least = dialog.get_by_label("Tokens, at least")
    expect(least).to_be_hidden()
    dialog.get_by_label("Keep it serving").check()
    least.fill("200")
    least.press("Tab")
    checked = dialog.get_by_role("listitem").filter(has_text="selection")
    expect(checked).to_contain_text("widen the selection")
    start = dialog.get_by_role("button", name="Start migration")
    expect(start).to_be_disabled()
    least.fill("80")
    least.press("Tab")
    expect(checked).to_contain_text("2 of 3 requests")
    expect(start).to_be_enabled()
    start.click()
    operator.wait_for_url("**/migrations/**")
    job = MigrationJob.objects.get()
    assert (job.migration_type, job.selection) == ("keep_source_active", {"min_tokens": 80})
    expect(operator.locator("#job-facts")).to_contain_text("at least 80 tokens")
    assert complaints == []


def test_a_migration_starts_without_a_script(operator: Page, context: BrowserContext, pair: Pair) -> None:
    browser = context.browser
    assert browser is not None
    plain = browser.new_context(
        base_url=operator.url.rstrip("/"), java_script_enabled=False, storage_state=context.storage_state()
    )
    page = plain.new_page()
    page.goto("/instances/a-one/")
    page.get_by_role("link", name="Migrate…").click()
    page.get_by_label("To", exact=True).select_option("b-two")
    page.get_by_label("Shut it down").check()
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_text("Ready", exact=True)).to_be_visible()
    page.get_by_role("button", name="Start migration").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("a-one")
    assert MigrationJob.objects.get().migration_type == "destroy_source"
    plain.close()


def test_rounds_and_requests_arrive_without_a_reload(operator: Page, complaints: list[str]) -> None:
    source = factories.instance("a-one")
    target = factories.instance("b-two", port=8101, status="standby")
    job = factories.job(source, target)
    operator.goto(f"/migrations/{job.id}/")
    expect(operator.locator("#connection")).to_have_text("Live")
    operator.evaluate("window.notReloaded = true")
    state = operator.locator("[data-part=state]")

    factories.move(job, S.PREFLIGHT, S.ATTACHING)
    rows = factories.attached(job, 4)
    expect(operator.locator("[data-chips=source] .chip")).to_have_count(4)
    factories.move(job, S.COPYING)
    expect(state).to_have_text("Copying")
    factories.copied(job, 0, 200, dirty=20)
    expect(operator.locator("#rounds tr")).to_have_count(1)
    factories.copied(job, 1, 20, dirty=2)
    expect(operator.locator("#rounds tr")).to_have_count(2)
    second = operator.locator("#rounds tr").nth(1)
    expect(second).to_contain_text("Increment")
    expect(second).to_contain_text("14.7 MB")
    expect(second.locator("rect.sent")).to_have_attribute("width", "10%")
    expect(operator.locator("#stepper [aria-current=step]")).to_have_text("Copying")

    factories.move(job, S.HANDING_OVER)
    for row, gap in zip(rows, (50, 60, 70, 80), strict=True):
        factories.moved(row, gap_ms=gap, itl_ms=40)
    expect(operator.locator("[data-chips=target] .chip")).to_have_count(4)
    expect(operator.locator("[data-tile=gap50]")).to_have_text("60 ms")
    expect(operator.locator("[data-tile=gap99]")).to_have_text("80 ms")
    expect(operator.locator("[data-tile=gap99x]")).to_contain_text("2.0\N{MULTIPLICATION SIGN}")
    factories.move(job, S.DRAINING, S.FINISHING)
    factories.move(job, S.DONE, new_active_instance=target)
    expect(state).to_have_text("Done")
    expect(operator.locator("#result")).to_contain_text("All 4 requests moved from a-one to b-two")
    assert operator.evaluate("window.notReloaded") is True

    job.refresh_from_db()
    keys = operator.locator("#events li").evaluate_all("rows => rows.map(row => Number(row.dataset.key))")
    assert keys == list(range(1, job.last_seq + 1))

    operator.reload()
    expect(operator.locator("#rounds tr")).to_have_count(2)
    expect(operator.locator("#requests tr")).to_have_count(4)
    expect(operator.locator("[data-tile=gap50]")).to_have_text("60 ms")
    assert complaints == []


def test_a_page_that_was_away_catches_up(operator: Page, context: BrowserContext) -> None:
    source = factories.instance("a-one")
    target = factories.instance("b-two", port=8101, status="standby")
    job = factories.job(source, target)
    operator.goto(f"/migrations/{job.id}/")
    expect(operator.locator("#connection")).to_have_text("Live")
    # Written past the publisher: as if its messages had been lost.
    factories.move(job, S.PREFLIGHT)
    lost = factories.MigrationRound.objects.create(job=job, round_index=0, kind="full", blocks=5, bytes=10)
    factories.record(job.id, "step", message="after the loss")
    expect(operator.locator("#events li").last).to_contain_text("after the loss")
    keys = operator.locator("#events li").evaluate_all("rows => rows.map(row => Number(row.dataset.key))")
    assert keys == sorted(set(keys))
    assert lost.pk


def test_abort_asks_first(operator: Page, complaints: list[str]) -> None:
    source = factories.instance("a-one", status="draining", resume_status="active")
    target = factories.instance("b-two", port=8101, status="migrating", resume_status="standby")
    job = factories.job(source, target)
    factories.move(job, S.PREFLIGHT, S.ATTACHING, S.COPYING)
    operator.goto(f"/migrations/{job.id}/")
    operator.get_by_role("button", name="Abort").click()
    dialog = operator.get_by_role("dialog")
    expect(dialog).to_contain_text("No stream is cut")
    dialog.get_by_role("button", name="Go on migrating").click()
    job.refresh_from_db()
    assert not job.abort_requested
    operator.get_by_role("button", name="Abort").click()
    dialog.get_by_role("button", name="Abort the migration").click()
    expect(operator.locator("#result")).to_contain_text("Abort was asked for")
    job.refresh_from_db()
    assert job.abort_requested
    assert complaints == []


def test_a_viewer_sees_all_and_may_start_nothing(page: Page, pair: Pair) -> None:
    factories.user("viewer", operator=False)
    log_in(page, "viewer")
    page.goto("/instances/a-one/")
    expect(page.get_by_role("heading", level=1)).to_have_text("a-one")
    expect(page.get_by_role("link", name="Migrate…")).to_have_count(0)
    answer = page.goto("/instances/a-one/migrate/")
    assert answer is not None and answer.status == 403
    expect(page.get_by_role("heading", level=1)).to_have_text("Not yours to do")


def test_history_filters_and_pages(operator: Page) -> None:
    source = factories.instance("a-one")
    target = factories.instance("b-two", port=8101, status="standby")
    for _ in range(26):
        factories.move(
            factories.job(source, target), S.FAILED, error_code="unreachable", error="b-two does not answer."
        )
    factories.finished_job(source, target, requests=2)
    operator.goto("/migrations/")
    rows = operator.locator("#jobs tbody tr")
    expect(rows).to_have_count(25)
    operator.get_by_role("link", name="Older").click()
    expect(rows).to_have_count(2)
    operator.get_by_label("State").select_option("done")
    operator.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("2 of 2")


def test_a_failed_migration_says_why_and_where_the_requests_are(operator: Page) -> None:
    source = factories.instance("a-one")
    target = factories.instance("b-two", port=8101, status="standby")
    job = factories.job(source, target)
    factories.move(job, S.PREFLIGHT, S.ATTACHING)
    factories.attached(job, 3)
    factories.move(job, S.COPYING)
    factories.move(job, S.FAILED, error_code="peer_lost", error="<b>b-two</b> stopped answering in round 1.")
    operator.goto(f"/migrations/{job.id}/")
    result = operator.locator("#result")
    expect(result).to_contain_text("Migration failed")
    expect(result).to_contain_text("<b>b-two</b> stopped answering in round 1.")
    expect(result).to_contain_text("requests go on running on a-one")
    expect(operator.locator("#stepper [data-status=failed]")).to_have_text("Copying")
    expect(operator.get_by_role("link", name="Try again…")).to_be_visible()


def test_the_playground_streams_and_marks_the_move(operator: Page, complaints: list[str]) -> None:
    operator.goto("/playground/")
    operator.get_by_label("Max tokens").fill("110")
    operator.get_by_role("button", name="Start 4 streams").click()
    cards = operator.locator(".stream")
    expect(cards).to_have_count(4)
    first = cards.last
    expect(first.locator("[data-part=text]")).to_contain_text("the keeper wrote")
    for card in cards.all():
        expect(card.locator("[data-part=moves]")).to_contain_text("a-one → b-two")
    expect(first.locator("[data-part=state]")).to_have_text("finished (length)")
    expect(first.locator("[data-part=tokens]")).to_have_text("110")
    assert complaints == []


def test_a_refused_chat_shows_the_reason(operator: Page) -> None:
    operator.goto("/playground/")
    model = operator.get_by_label("Model")
    expect(model).to_have_value("smollm2")
    model.evaluate("select => { select.add(new Option('gone', 'gone')); select.value = 'gone'; }")
    operator.get_by_role("button", name="Start", exact=True).click()
    expect(operator.locator(".stream [data-part=error]")).to_have_text("There is no model gone.")


def test_tokens_are_shown_once_and_can_be_revoked(operator: Page, complaints: list[str]) -> None:
    operator.goto("/account/")
    operator.get_by_role("button", name="Create a token").click()
    token = operator.locator("#new-token").inner_text()
    answer = operator.request.get("/api/v1/instances", headers={"Authorization": f"Bearer {token}", "Cookie": ""})
    assert answer.ok
    operator.goto("/account/")
    expect(operator.locator("#new-token")).to_have_count(0)
    operator.get_by_role("button", name="Revoke").click()
    expect(operator.get_by_text("The token is revoked")).to_be_visible()
    refused = operator.request.get("/api/v1/instances", headers={"Authorization": f"Bearer {token}", "Cookie": ""})
    assert refused.status == 401
    assert complaints == []


def test_an_unknown_page_offers_a_way_back(operator: Page) -> None:
    answer = operator.goto("/instances/never-seen/")
    assert answer is not None and answer.status == 404
    operator.get_by_role("main").get_by_role("link", name="Dashboard").click()
    expect(operator.get_by_role("heading", level=1)).to_have_text("Dashboard")


def test_numbers_look_alike_from_the_server_and_from_the_script(operator: Page) -> None:
    """Else a value would change its form when the first update arrives."""
    operator.goto("/")
    values = [0, 1, 9.96, 61.3, 999, 1000, 9999.5, 12_400_000, 123_456_789_012, 0.031, 59.94, 75, 3725, None]
    scripted = operator.evaluate(
        """async (values) => {
          const format = await import("/static/js/format.js");
          const names = ["size", "milliseconds", "seconds", "times"];
          return Object.fromEntries(names.map((name) => [name, values.map((value) => format[name](value))]));
        }""",
        values,
    )
    for name, shown in scripted.items():
        assert shown == [getattr(formats, name)(value) for value in values], name
