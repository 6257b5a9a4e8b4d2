"""Which requests may move: one code for each reason, decided from what the engine knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.book import MemberRecord, StreamRecord
from vllm_plugin.compat import SamplingParams
from vllm_plugin.eligibility import TRANSIENT, prompt_digest, refusal, sampling_digest


def request(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "request_id": "chatcmpl-abc-1-ff",
        "sampling_params": SamplingParams(max_tokens=10),
        "structured_output_request": None,
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "resumable": False,
        "spec_token_ids": [],
        "spec_decode_metrics": None,
        "status": SimpleNamespace(name="RUNNING"),
        "num_output_tokens": 5,
        "num_tokens": 8,
        "num_computed_tokens": 7,
        "num_in_flight_tokens": 0,
        "is_finished": lambda: False,
    }
    return SimpleNamespace(**{**values, **changes})


def structured(reasoner: Any = None, reasoning_ended: bool | None = None) -> SimpleNamespace:
    return SimpleNamespace(reasoner=reasoner, reasoning_ended=reasoning_ended)


def stream(*requests: Any, choices: int = 1) -> StreamRecord:
    members = {str(number): MemberRecord(one, (0, number)) for number, one in enumerate(requests)}
    return StreamRecord("w1/s1", "", choices, members)


def test_a_decoding_request_of_a_connected_proxy_may_move():
    for one in (request(), request(structured_output_request=structured(reasoning_ended=False))):
        assert refusal(stream(one), True, {}, True) is None


def test_several_choices_move_together_also_when_one_has_ended():
    ended = request(is_finished=lambda: True, status=SimpleNamespace(name="FINISHED_STOPPED"))
    assert refusal(stream(request(), ended, choices=2), True, {}, True) is None
    why = refusal(stream(request(), request(prompt_embeds=object()), choices=2), True, {}, True)
    assert why is not None and why[0] == "prompt_embeds"


@pytest.mark.parametrize("status", ["WAITING", "RUNNING", "PREEMPTED"])
def test_what_waits_or_is_half_prefilled_moves_unless_a_generator_is_in_the_way(status: str):
    changes = {
        "status": SimpleNamespace(name=status),
        "num_computed_tokens": 2,
        "num_output_tokens": 0,
        "num_tokens": 9,
    }
    seeded = SamplingParams(seed=1)
    assert refusal(stream(request(**changes)), True, {}, True) is None
    assert refusal(stream(request(**changes, sampling_params=seeded)), True, {}, False) is None
    why = refusal(stream(request(**changes, sampling_params=seeded)), True, {}, True)
    assert why is not None and why[0] == "seeded_prefill"
    changes["num_computed_tokens"] = 0
    assert refusal(stream(request(**changes, sampling_params=seeded)), True, {}, True) is None


def test_choices_that_have_not_arrived_yet_are_waited_for():
    why = refusal(stream(request(), choices=2), True, {}, True)
    assert why is not None and why[0] == "incomplete"


@pytest.mark.parametrize(
    ("changes", "connected", "code"),
    [
        (None, True, "no_proxy"),
        ({}, False, "proxy_unreachable"),
        ({"sampling_params": None}, True, "pooling"),
        ({"sampling_params": SamplingParams(prompt_logprobs=1)}, True, "prompt_logprobs"),
        ({"prompt_token_ids": None}, True, "prompt_embeds"),
        ({"mm_features": [object()]}, True, "multimodal"),
        ({"resumable": True}, True, "streaming_input"),
        ({"spec_token_ids": [1]}, True, "speculative_decoding"),
        ({"status": SimpleNamespace(name="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")}, True, "grammar_not_ready"),
    ],
)
def test_each_reason_has_a_code_and_a_sentence(changes: Any, connected: bool, code: str):
    record = None if changes is None else stream(request(), request(**changes), choices=2)
    why = refusal(record, connected, {}, True)
    assert why is not None
    assert why[0] == code
    assert why[1].endswith(".")


def test_passing_reasons_are_told_apart_from_lasting_ones():
    passing = {"grammar_not_ready", "incomplete", "preempted", "proxy_unreachable", "seeded_prefill", "staged"}
    assert passing == TRANSIENT


def test_digests_ignore_what_differs_per_leg_and_notice_everything_else():
    one = request(sampling_params=SamplingParams(seed=1, extra_args={"vllm_hi_stream": "w/1"}))
    two = request(sampling_params=SamplingParams(seed=1, extra_args={"vllm_hi_stream": "w/2", "vllm_hi_ticket": "t"}))
    assert sampling_digest(one) == sampling_digest(two)
    assert sampling_digest(one) != sampling_digest(request(sampling_params=SamplingParams(seed=2)))
    assert prompt_digest(one) == prompt_digest(two)
    assert prompt_digest(one) != prompt_digest(request(prompt_token_ids=[1, 2]))


def test_a_request_to_an_adapter_moves_as_long_as_the_adapter_is_served_here():
    adapted = stream(request(lora_request=SimpleNamespace(lora_name="fr", lora_int_id=1)))
    assert refusal(adapted, True, {"fr": "aa11"}, True) is None
    why = refusal(adapted, True, {"de": "aa11"}, True)
    assert why is not None and why[0] == "lora_unloaded"
