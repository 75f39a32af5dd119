"""Tries grammars out, so that one that hangs or crashes takes this process with it and not the server.

Run as a script by sandbox.py; imports nothing of hybridjax. Frames on stdin and stdout are a length of 4
bytes and JSON: first the set-up, then one grammar per frame, each answered by what is wrong with it, or null.
"""

import json
import random
import resource
import signal
import struct
import sys
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def read_frame(stream: Any) -> Any:
    """The next frame, None at the end of the stream."""
    head = stream.read(4)
    return json.loads(stream.read(struct.unpack("<I", head)[0])) if len(head) == 4 else None


def write_frame(stream: Any, value: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def problem_of(tokenizer: LLTokenizer, grammar: str, limits: LLParserLimits, rules: Any) -> str | None:
    """What is wrong with a grammar: does it compile, and can some tokens of it be generated?"""
    fresh = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if fresh.is_error():
        return fresh.get_error()
    matcher = fresh.deep_copy()
    ends = set(rules["eos"])
    draw = random.Random(0)
    accept_left = rules["accept_seconds"]
    for step in range(rules["trial_tokens"]):
        start = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            never = step == 0 and matcher.get_error().startswith("NoExtension")
            return "nothing can match it" if never else f"too complex: {matcher.get_error()}"
        if time.thread_time() - start > rules["mask_seconds"]:
            return "too complex: finding out what may come next takes too long"
        token = pick(mask, draw, ends)
        start = time.thread_time()
        if token is not None and not matcher.consume_token(token):
            return f"too complex: {matcher.get_error()}"
        accept_left -= max(0.0, time.thread_time() - start - rules["quick_accept"])
        if accept_left < 0:
            return "too complex: taking its tokens needs too much time"
        if token is None or matcher.is_stopped():
            matcher = fresh.deep_copy()
    return None


def pick(mask: bytes, draw: random.Random, ends: set[int]) -> int | None:
    """Some token of a mask that is no end token, or None."""
    first = draw.randrange(len(mask))
    for i in range(len(mask)):
        where = (first + i) % len(mask)
        if byte := mask[where]:
            tokens = [8 * where + bit for bit in range(8) if byte >> bit & 1]
            tokens = [token for token in tokens if token not in ends]
            if tokens:
                return draw.choice(tokens)
    return None


def main() -> None:
    rules = read_frame(sys.stdin.buffer)
    if rules is None:
        return
    tokenizer = LLTokenizer(rules["tokenizer"], n_vocab=rules["vocab"], eos_token=rules["eos"])
    limits = LLParserLimits(**rules["limits"])
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + rules["memory"],) * 2)
    write_frame(sys.stdout.buffer, None)
    while (grammar := read_frame(sys.stdin.buffer)) is not None:
        # Ends this process even inside a computation that nobody waits for any more.
        signal.alarm(rules["seconds"] + 1)
        problem = problem_of(tokenizer, grammar, limits, rules)
        signal.alarm(0)
        write_frame(sys.stdout.buffer, problem)


if __name__ == "__main__":
    threading.stack_size(256 * 2**20)
    worker = threading.Thread(target=main)
    worker.start()
    worker.join()
