"""Rows about how tokens are chosen, when an answer ends, and what is told about it."""

from __future__ import annotations

from benchmarks.kinds import CHAT, TEXT, TOKENS, Kind

__all__ = ["SAMPLING"]

#: The answer may end from here on.
_FROM = 60

SAMPLING: list[Kind] = [
    Kind("greedy, chat", CHAT, {"temperature": 0}),
    Kind("greedy, text completion", TEXT, {"temperature": 0}),
    Kind("greedy, chat, client asks for no token ids", CHAT, {"temperature": 0, "return_token_ids": None}),
    Kind("greedy, text, client asks for no token ids", TEXT, {"temperature": 0, "return_token_ids": None}),
    Kind("greedy, chat, not streamed", CHAT, {"temperature": 0}, streamed=False),
    Kind("seeded, text completion, not streamed", TEXT, {"temperature": 1.0, "seed": 11}, streamed=False),
    Kind("seeded, temperature 1", TEXT, {"temperature": 1.0, "seed": 12}),
    Kind("seeded, temperature 0.3", CHAT, {"temperature": 0.3, "seed": 23}),
    Kind("seeded, top_p", TEXT, {"temperature": 1.0, "top_p": 0.8, "seed": 24}),
    Kind("seeded, top_k", CHAT, {"temperature": 1.0, "top_k": 30, "seed": 25}),
    Kind("seeded, temperature, top_p, top_k", CHAT, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 13}),
    Kind("seeded, min_p", TEXT, {"temperature": 1.2, "min_p": 0.05, "seed": 14}),
    Kind("unseeded, text completion", TEXT, {"temperature": 1.0, "logprobs": 0}, repeatable=False),
    Kind("unseeded, chat", CHAT, {"temperature": 0.9, "top_p": 0.95, "logprobs": True}, repeatable=False),
    Kind("presence_penalty", CHAT, {"temperature": 0, "presence_penalty": 0.9}),
    Kind("frequency_penalty", TEXT, {"temperature": 0, "frequency_penalty": 0.6}),
    Kind("repetition_penalty", TEXT, {"temperature": 0, "repetition_penalty": 1.3}),
    Kind(
        "all three penalties, seeded",
        CHAT,
        {
            "temperature": 0.7,
            "seed": 15,
            "presence_penalty": 0.8,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
        },
    ),
    Kind("logit_bias", CHAT, {"temperature": 0, "logit_bias": {"260": 3, "282": -100, "28": 2}}),
    Kind("bad_words", TEXT, {"temperature": 0, "bad_words": ["the", "and", "story", "a little"]}),
    Kind("allowed_token_ids", TEXT, {"temperature": 1.0, "seed": 16, "allowed_token_ids": list(range(200, 1200))}),
    Kind("min_tokens", TEXT, {"temperature": 1.0, "seed": 17, "min_tokens": TOKENS - 10, "ignore_eos": None}),
    Kind("ends by itself or at max_tokens", CHAT, {"temperature": 0, "ignore_eos": None}),
    Kind("max_completion_tokens", CHAT, {"temperature": 0, "max_tokens": None, "max_completion_tokens": 90}),
    # The front end holds back as many characters as the longest stop string has: they straddle every cut.
    Kind("stop strings that never come", CHAT, {"temperature": 0, "stop": ["end of all things", "\n\n\n\n"]}),
    Kind(
        "stop strings that end the answer",
        CHAT,
        {"temperature": 0, "stop": [" the ", ". "], "min_tokens": _FROM},
    ),
    Kind(
        "stop string, kept in the answer, seeded",
        TEXT,
        {
            "temperature": 0.9,
            "seed": 26,
            "stop": [", and", ". The", ".\n"],
            "min_tokens": _FROM,
            "include_stop_str_in_output": True,
        },
    ),
    Kind("stop string, not streamed", TEXT, {"temperature": 0, "stop": [" the "], "min_tokens": _FROM}, streamed=False),
    Kind("stop_token_ids that never come", TEXT, {"temperature": 0, "stop_token_ids": [11, 12]}),
    Kind(
        "stop_token_ids that end the answer",
        TEXT,
        {"temperature": 0, "stop_token_ids": [28, 30], "min_tokens": _FROM},
    ),
    Kind("logprobs, chat", CHAT, {"temperature": 0, "logprobs": True}),
    Kind("logprobs, chat, top_logprobs 4", CHAT, {"temperature": 0, "logprobs": True, "top_logprobs": 4}),
    Kind(
        "logprobs, chat, top_logprobs, not streamed",
        CHAT,
        {"temperature": 0.8, "seed": 28, "logprobs": True, "top_logprobs": 2},
        streamed=False,
    ),
    Kind("logprobs, text completion", TEXT, {"temperature": 0.9, "seed": 18, "logprobs": 2}),
    Kind("logprobs, text, stop strings", TEXT, {"temperature": 0, "logprobs": 1, "stop": ["end of all things"]}),
    Kind("usage after each event", CHAT, {"temperature": 0, "stream_options": {"continuous_usage_stats": True}}),
    Kind(
        "usage after each event and at the end",
        TEXT,
        {"temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    Kind("no usage", CHAT, {"temperature": 0, "stream_options": None}),
    Kind("cache_salt", CHAT, {"temperature": 0, "cache_salt": "tenant-7"}),
]
