"""Does a streaming parser say the same however the tokens are grouped into deltas?

    python -m benchmarks.parsers [--only NAME ...] [--write docs/parsers.md]

Drives vLLM's own parsers, as its chat serving does (`ParserManager.get_parser`, `adjust_request`, the incremental
detokenizer, `parse_delta`), with written answers (`parser_corpus.py`): token by token, then all at once, with the
first k tokens at once for every k, and in random groups. A parser is chunk invariant for a tool choice when what a
client puts together is the same every time. The last line of output is JSON; it fails when `vllm_plugin/parsers.py`
says more than was proved.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from benchmarks.parser_bench import KINDS, SEED, Bench, Verdict
from benchmarks.parser_corpus import PAIRS
from vllm_plugin.parsers import INVARIANT, Kind

#: The first is used with a tokenizer of its own kind, which is not tried here; the second differed for `none` in a
#: longer search (60 scrambled answers, markers as tokens).
LEFT_OUT = frozenset({"mistral", "gemma4"})

__all__ = ["cases", "proved", "table"]


def cases() -> Iterator[tuple[str, str, Kind]]:
    """All that is tried: each reasoning parser, the pairs that are used together, and each tool parser."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for reasoning in sorted(ReasoningParserManager.list_registered()):
        yield "", reasoning, "none"
    for tool, reasoning in sorted(set(PAIRS)):
        for kind in KINDS:
            yield tool, reasoning, kind
    for tool in sorted(ToolParserManager.list_registered()):
        for kind in KINDS:
            yield tool, "", kind


def table(verdicts: list[Verdict]) -> str:
    """One row for each pair; the tool choices with the same outcome together."""
    rows = ["| tool parser | reasoning parser | tool choice | texts | runs | outcome |", "|---|---|---|---|---|---|"]
    merged: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        merged.setdefault((verdict.tool, verdict.reasoning, verdict.outcome), []).append(verdict)
    for (tool, reasoning, outcome), same in merged.items():
        kinds = "any" if not tool else ", ".join(verdict.kind for verdict in same)
        texts, tried = sum(len(verdict.texts) for verdict in same), sum(verdict.tried for verdict in same)
        shown = outcome.replace("|", "\\|").replace("\n", "\\n")
        rows.append(f"| {tool or '-'} | {reasoning or '-'} | {kinds} | {texts} | {tried} | {shown} |")
    return "\n".join(rows)


def proved(verdicts: list[Verdict]) -> dict[tuple[str, str], list[Kind]]:
    """What `vllm_plugin.parsers.INVARIANT` may say."""
    # That a parser lets plain text through is no proof where no text was in its syntax.
    known = {(verdict.tool, verdict.reasoning) for verdict in verdicts if verdict.exercised and verdict.kind != "none"}
    # A pair is tried with fewer texts than its parsers alone.
    alone = {(verdict.tool, verdict.kind) for verdict in verdicts if verdict.movable and not verdict.reasoning}
    reasons = {verdict.reasoning for verdict in verdicts if verdict.movable and not verdict.tool}
    pairs: dict[tuple[str, str], list[Kind]] = {}
    for verdict in verdicts:
        pair = (verdict.tool, verdict.reasoning)
        fits = not verdict.tool or (pair in known and (verdict.tool, verdict.kind) in alone)
        fits = fits and (not verdict.reasoning or verdict.reasoning in reasons)
        if verdict.movable and fits and verdict.tool not in LEFT_OUT:
            pairs.setdefault(pair, []).extend([verdict.kind] if verdict.tool else list(KINDS))
    return pairs


@cache
def _bench() -> Bench:
    return Bench()


def _verdict(case: tuple[str, str, Kind]) -> Verdict:
    return _bench().verdict(*case)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of parsers; all others are left out")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    parser.add_argument("--processes", type=int, default=2, help="the cases are shared out among these")
    parser.add_argument("--python", action="store_true", help="print what was proved as Python")
    options = parser.parse_args()
    chosen = [case for case in cases() if not options.only or {*case[:2]} & {*options.only}]
    verdicts = []
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for verdict in pool.map(_verdict, chosen):
            verdicts.append(verdict)
            who = f"{verdict.tool or '-':16} {verdict.reasoning or '-':24} {verdict.kind:9}"
            print(f"{who} {verdict.tried:6} {verdict.outcome}", flush=True)
    pairs = proved(verdicts)
    tried = {(verdict.tool, verdict.reasoning) for verdict in verdicts}
    too_much = [
        f"{tool}/{reasoning}/{kind}"
        for (tool, reasoning), kinds in INVARIANT.items()
        if (tool, reasoning) in tried
        for kind in kinds
        if kind not in pairs.get((tool, reasoning), [])
    ]
    if options.python:
        for (tool, reasoning), kinds in pairs.items():
            print(f'    ("{tool}", "{reasoning}"): {" ".join(kinds)}')
    if options.write:
        options.write.write_text(_page(verdicts))
    summary = {
        "seed": SEED,
        "runs": sum(verdict.tried for verdict in verdicts),
        "invariant": sum(verdict.invariant for verdict in verdicts),
        "differs": sum(bool(verdict.counterexample) for verdict in verdicts),
        "not_tried": sum(bool(verdict.skipped) for verdict in verdicts),
        "claimed_but_not_proved": too_much,
    }
    print(json.dumps(summary))
    return 1 if too_much else 0


def _page(verdicts: list[Verdict]) -> str:
    from vllm import __version__

    runs = sum(verdict.tried for verdict in verdicts)
    facts = f"vLLM {__version__}, {runs} runs, seed {SEED}."
    return f"{INTRODUCTION}\n{facts}\n\n{table(verdicts)}\n"


INTRODUCTION = """# Streaming parsers

Written by `python -m benchmarks.parsers --write docs/parsers.md`.

At a handover the target's front end gets what was generated so far as one delta, and its tool and reasoning parsers
must make of it what the source's made of the same tokens one by one. vLLM's parsers are not written for that: most
look at one delta after the other and keep a state. So each is driven here, by the way that vLLM's chat serving takes
(`ParserManager.get_parser`, `adjust_request`, the incremental detokenizer, `parse_delta`), with written answers:
content, one call, two calls, nested JSON, other scripts, text before and after a call, reasoning, all of them whole and
cut off, and scrambled ones in which markers come again, unbalanced and in pieces (not where a grammar allows nothing
but calls); markers as pieces of text, as single tokens and as special tokens; the template's thinking on and off.
Compared is what a client puts together (content, reasoning, names, arguments and number of calls, ids that come from
the text, finish reason), token by token against: the first k tokens at once, for every k; groups at random; all at
once. No proof for all texts, then, but each counterexample is one: the first version of this list had no scrambled
answers, and a real model wrote one within minutes.

- *invariant*: the same every time. Only these move while they stream (`vllm_plugin/parsers.py`); for all others the
  request stays, with `parser_not_chunk_invariant`.
- *differs only if the answer ends in the same delta*: moved too. The target sends a replay so that nothing that
  follows is merged into it (`vllm_plugin/replay.py`).
- *but for the usage*: vLLM's count of reasoning tokens differs, and nothing else.
- *differs*: with the first counterexample.
- *not proved*: no text of the corpus makes this parser find a call or any reasoning. Counts as *differs*.
- *not tried*: cannot be made with this tokenizer or without another package. Counts as *differs*. So do `mistral`,
  whose models have a tokenizer of another kind, and `gemma4`, which differed for `none` in a longer search (60
  scrambled answers each, for `none` behind the parsers of the newer kind and for `auto` where it is invariant here).

What counts is the pair of tool and reasoning parser, and the request's tool choice; a pair moves only if each of the
two alone does. `none` stands for chats without tools as well: they pass through the parser, too. With `required` or a
named tool, parsers that support it (`supports_required_and_named`) get JSON that a grammar forces, read by
`vllm.tool_parsers.streaming`, whose state follows from the text alone; the others read their own syntax. Text
completions have no parser. Answers that are not streamed are parsed once, from the whole text
(`chat_completion_full_generator` gets one final output), whatever the deltas were.

No reasoning parser stands it: the rest of the delta in which reasoning ends goes through the parser, which eats a
second marker, while later deltas are passed on as they are (`parse_delta` of `vllm/parser/abstract_parser.py`). Their
count of reasoning tokens, part of the usage, depends on grouping as well. Behind any parser, streams with stop strings
stay, too: there text lags behind its tokens, which is not tried here.

Where it says *differs*, the replay would have to come token by token. That needs nothing replaced: a real server gave
256 outputs of one token each, sent in one message with `VLLM_V1_OUTPUT_PROC_CHUNK_SIZE=1`, as events of one token
within 27 to 97 ms (16 streams, up to 12 at once; 0.2 to 1 s with log probabilities), but for one pair in 2 of them. And
it can hold only while the reader never waits for its client's socket (64 KiB unsent), else vLLM merges. Without
somebody who checks the events' token ids before the source lets go this is no proof, so it is not done.
"""


if __name__ == "__main__":
    sys.exit(main())
