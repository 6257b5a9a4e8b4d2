"""Which requests may move: one code for each reason, decided from what the engine knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.book import StreamRecord
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
    }
    return SimpleNamespace(**{**values, **changes})


def structured(reasoner: Any = None, reasoning_ended: bool | None = None) -> SimpleNamespace:
    return SimpleNamespace(reasoner=reasoner, reasoning_ended=reasoning_ended)


RECORD = StreamRecord("w1/s1", siblings=1)


def test_a_decoding_request_of_a_connected_proxy_may_move():
    assert refusal(request(), RECORD, True) is None
    assert refusal(request(structured_output_request=structured()), RECORD, True) is None
    assert refusal(request(structured_output_request=structured(reasoning_ended=True)), RECORD, True) is None


@pytest.mark.parametrize(
    ("changes", "record", "connected", "code"),
    [
        ({}, None, True, "no_proxy"),
        ({}, RECORD, False, "proxy_unreachable"),
        ({"sampling_params": None}, RECORD, True, "pooling"),
        ({}, StreamRecord("w1/s1", siblings=2), True, "several_choices"),
        ({"request_id": "0_chatcmpl-abc"}, RECORD, True, "several_choices"),
        ({"structured_output_request": structured(reasoner=object())}, RECORD, True, "structured_reasoning"),
        ({"structured_output_request": structured(reasoning_ended=False)}, RECORD, True, "structured_reasoning"),
        ({"sampling_params": SamplingParams(prompt_logprobs=1)}, RECORD, True, "prompt_logprobs"),
        ({"prompt_token_ids": None}, RECORD, True, "prompt_embeds"),
        ({"mm_features": [object()]}, RECORD, True, "multimodal"),
        ({"lora_request": object()}, RECORD, True, "lora"),
        ({"resumable": True}, RECORD, True, "streaming_input"),
        ({"spec_token_ids": [1]}, RECORD, True, "speculative_decoding"),
        ({"status": SimpleNamespace(name="PREEMPTED")}, RECORD, True, "preempted"),
        ({"status": SimpleNamespace(name="WAITING")}, RECORD, True, "not_decoding_yet"),
        ({"num_output_tokens": 0}, RECORD, True, "not_decoding_yet"),
    ],
)
def test_each_reason_has_a_code_and_a_sentence(changes: Any, record: Any, connected: bool, code: str):
    why = refusal(request(**changes), record, connected)
    assert why is not None
    assert why[0] == code
    assert why[1].endswith(".")


def test_passing_reasons_are_told_apart_from_lasting_ones():
    assert {"not_decoding_yet", "preempted", "proxy_unreachable"} == TRANSIENT


def test_digests_ignore_what_differs_per_leg_and_notice_everything_else():
    one = request(sampling_params=SamplingParams(seed=1, extra_args={"vllm_hi_stream": "w/1"}))
    two = request(sampling_params=SamplingParams(seed=1, extra_args={"vllm_hi_stream": "w/2", "vllm_hi_ticket": "t"}))
    assert sampling_digest(one) == sampling_digest(two)
    assert sampling_digest(one) != sampling_digest(request(sampling_params=SamplingParams(seed=2)))
    assert prompt_digest(one) == prompt_digest(two)
    assert prompt_digest(one) != prompt_digest(request(prompt_token_ids=[1, 2]))
