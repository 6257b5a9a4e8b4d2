"""Which requests a migration is about: the conditions, and what is wrong with a wish for them."""

from __future__ import annotations

from typing import Any

import pytest
from rest_framework.test import APIClient

from instances.client import InstanceClient
from instances.models import Instance
from migrations_app.forms import MigrateForm
from migrations_app.models import MigrationJob
from migrations_app.selection import Selection
from migrations_app.selection_checks import filter_check, selection_check
from tests.unit.panel.factories import make_pair

ROW = {
    "request_id": "cmpl-1",
    "stream_id": "s1",
    "prompt_tokens": 100,
    "output_tokens": 20,
    "age_s": 7.5,
    "kv_blocks": 3,
    "model": "tiny",
    "api_key": "k1",
}
WISH = {"source": "hi-a", "target": "hi-b", "migration_type": "keep_source_active"}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, True),
        ({"request_ids": ["x", "cmpl-1"]}, True),
        ({"request_ids": ["s1"]}, True),
        ({"request_ids": ["x"]}, False),
        ({"min_tokens": 120, "max_tokens": 120}, True),
        ({"min_tokens": 121}, False),
        ({"max_tokens": 119}, False),
        ({"min_age_s": 7.5}, True),
        ({"max_age_s": 7.4}, False),
        ({"min_kv_blocks": 3, "max_kv_blocks": 3}, True),
        ({"min_kv_blocks": 4}, False),
        ({"model": "tiny"}, True),
        ({"model": "tiny-fr"}, False),
        ({"api_key": "k1"}, True),
        ({"api_key": "k2"}, False),
        ({"min_tokens": 100, "model": "tiny-fr"}, False),
    ],
)
def test_all_conditions_must_hold(conditions: dict[str, Any], expected: bool) -> None:
    selection = Selection.of(conditions)
    assert selection.matches(ROW) is expected
    assert Selection.of(selection.as_json()) == selection
    assert bool(selection) is bool(conditions)


def test_it_reads_like_a_sentence() -> None:
    selection = Selection.of({"request_ids": ["a", "b"], "min_tokens": 8000, "min_age_s": 1.5, "max_age_s": 60})
    assert selection.describe() == "2 requests by their ids, at least 8000 tokens, 1.5 to 60 s old"
    assert Selection().describe() == ""


def test_a_selection_that_matches_nothing_is_an_error_of_the_preflight() -> None:
    assert selection_check([ROW], Selection()) == []
    (good,) = selection_check([ROW], Selection(min_tokens=1))
    assert (good.level, good.source_value) == ("ok", "1 of 1 requests")
    (bad,) = selection_check([ROW], Selection(min_tokens=500))
    assert (bad.level, bad.remedy) == ("error", "No request is selected (at least 500 tokens): widen the selection.")
    (keyless,) = selection_check([{"request_id": "r"}], Selection(api_key="k1"))
    assert "leave api_key out" in keyless.remedy


def test_the_request_filter_is_part_of_the_preflight() -> None:
    kept = ROW | {"reason": {"code": "filtered", "message": "The request filter m.C keeps the request here."}}
    assert filter_check({}, [ROW]) == []
    (good,) = filter_check({"request_filter": "m.C", "request_filter_problem": None}, [ROW, kept])
    assert (good.level, good.source_value) == ("ok", "m.C keeps 1 of 2 requests")
    (missing,) = filter_check({"request_filter": "m.C", "request_filter_problem": "No module m. Correct it."}, [])
    assert (missing.level, missing.remedy) == ("error", "No module m. Correct it.")
    raising = ROW | {"reason": {"code": "request_filter_failed", "message": "m.C failed. Correct it."}}
    (broken,) = filter_check({"request_filter": "m.C", "request_filter_problem": None}, [ROW, raising])
    assert (broken.level, broken.remedy) == ("error", "m.C failed. Correct it.")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("selection", "param"),
    [
        ({"min_token": 1}, "selection.min_token"),
        ({"request_ids": []}, "selection.request_ids"),
        ({"request_ids": "r1"}, "selection.request_ids"),
        ({"min_tokens": -1}, "selection.min_tokens"),
        ({"min_tokens": "many"}, "selection.min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "selection.min_tokens"),
        ({"min_age_s": 2, "max_age_s": 1}, "selection.min_age_s"),
        ({"model": ""}, "selection.model"),
        ("all", "selection"),
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/migrations", "/api/v1/migrations/preflight"])
def test_what_is_wrong_with_a_selection_is_named(
    operator_api: APIClient, path: str, selection: Any, param: str
) -> None:
    make_pair()
    answer = operator_api.post(path, {**WISH, "selection": selection}, format="json")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param), error
    assert not MigrationJob.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("policy", ["destroy_source", "preserve_source"])
def test_a_selection_needs_a_source_that_goes_on(operator_api: APIClient, policy: str) -> None:
    make_pair()
    body = {**WISH, "migration_type": policy, "selection": {"min_tokens": 1}}
    answer = operator_api.post("/api/v1/migrations", body, format="json")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        422, "selection_needs_keep_source_active", "selection",
    )  # fmt: skip
    assert "use keep_source_active, or leave the selection out" in error["message"]
    assert set(Instance.objects.values_list("status", flat=True)) == {"active", "standby"}


@pytest.mark.django_db
def test_keys_can_be_selected_only_where_the_source_knows_them(
    operator_api: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair()
    rows: list[dict[str, Any]] = [{"request_id": "r1"}]
    monkeypatch.setattr(InstanceClient, "requests", lambda self: rows)
    body = {**WISH, "selection": {"api_key": "k1"}}
    answer = operator_api.post("/api/v1/migrations", body, format="json")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "api_keys_off", "selection.api_key")
    assert not MigrationJob.objects.exists()
    rows[0]["api_key"] = "k1"
    assert operator_api.post("/api/v1/migrations", body, format="json").status_code == 201
    assert MigrationJob.objects.get().selection == {"api_key": "k1"}


@pytest.mark.django_db
def test_the_seeds_call_knows_both(operator_api: APIClient) -> None:
    make_pair()
    body = {"src_vllm_hi_id": "hi-a", "dst_vllm_hi_id": "hi-b", "migration_type": "keep_source_active"}
    refused = operator_api.post("/vllm_hi/migrate", {**body, "selection": {"min_tok": 1}}, format="json")
    assert (refused.status_code, refused.json()["param"]) == (400, "selection.min_tok")
    answer = operator_api.post("/vllm_hi/migrate", {**body, "selection": {"min_tokens": 8000}}, format="json")
    assert answer.status_code == 200
    job = MigrationJob.objects.get()
    assert (job.migration_type, job.selection) == ("keep_source_active", {"min_tokens": 8000})


def test_the_form_makes_a_selection_of_what_is_filled_in() -> None:
    post = {"target": "b", "migration_type": "keep_source_active", "tn": "2"}
    form = MigrateForm({**post, "request_ids": "r1, r2\nr3", "min_tokens": "0", "model": ""})
    assert form.is_valid(), form.errors
    assert form.selection().as_json() == {"request_ids": ["r1", "r2", "r3"], "min_tokens": 0}
    assert not MigrateForm(post).is_valid() or not MigrateForm(post).errors
    wrong = MigrateForm({**post, "min_kv_blocks": "5", "max_kv_blocks": "4"})
    assert not wrong.is_valid()
    assert "must not be larger" in str(wrong.errors["min_kv_blocks"])
