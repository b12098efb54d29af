"""What token hand-off saves: ``python -m tests.bench.bench_handoff`` prints one JSON object as its last line.

Real vLLM on the CPU (``make vllm``) serves two replicas in turn, one with the hand-off and one without. Every prompt
adds a sentence to a prompt that the engine holds, so that the model has next to nothing to compute. CPU time is that
of the API server and of the replica, less their use when idle. TTFT is the client's. The figures are medians of
batches, and the CPU time of a batch is a mean. The replica sends one of 16 requests as text, which is not measured.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import MODEL, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import PATIENT_SECONDS, Replica, running_replicas
from tokenizers import Tokenizer

from warmfleet.prompt.json_splice import spliced
from warmfleet.prompt.prefix_trie import Reading, Trie
from warmfleet.prompt.request import PATHS
from warmfleet.prompt.tokenizer import Encoder
from warmfleet.routing.token_handoff import CHECK_EVERY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.prompt.request import Endpoint

SIZES = {"1k": 1_000, "10k": 10_000, "30k": 30_000}
MESSAGE_TOKENS = 500
IDLE_S = 4.0


@dataclass
class Process:
    """A process whose CPU time is measured. idle: its share of a core without requests."""

    pid: int
    idle: float = 0.0

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its threads, without its children."""
        clocks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(clock.read_text().split()[0]) for clock in clocks) / 1e9


def rest(*processes: Process) -> None:
    """Measure the share of a core that each process uses when idle."""
    before, began = [one.cpu_s() for one in processes], time.perf_counter()
    time.sleep(IDLE_S)
    for one, used in zip(processes, before, strict=True):
        one.idle = (one.cpu_s() - used) / (time.perf_counter() - began)


@functools.cache
def texts(tokens: int) -> list[str]:
    """Return messages of Python source, of MESSAGE_TOKENS each and ``tokens`` together."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    source = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    source *= 1 + 6 * tokens // len(source)
    offsets = tokenizer.encode(source).offsets
    cuts = [offsets[at][0] for at in range(0, tokens + 1, MESSAGE_TOKENS)]
    return [source[begin:end] for begin, end in itertools.pairwise(cuts)]


def bodies(kind: Endpoint, tokens: int) -> Iterator[bytes]:
    """Yield requests without end: the same prompt with another last sentence each time."""
    parts, number = texts(tokens), 0
    roles = ("user", "assistant")
    while True:
        number += 1
        last = f"Question {number}: and now?"
        body: dict[str, Any] = {"model": SERVED_NAME, "max_tokens": 1, "temperature": 0, "stream": True}
        if kind == "chat":
            turns = [{"role": roles[index % 2], "content": part} for index, part in enumerate(parts)]
            body["messages"] = [*turns, {"role": "user", "content": last}]
        else:
            body["prompt"] = "".join(parts) + last
        yield json.dumps(body).encode()


def splice_us(endpoint: Endpoint, tokens: int) -> float:
    """Return the CPU µs for the new body of a conversation's next turn. Earlier turns have their ids."""
    encoder = Encoder.load((MODEL / "tokenizer.json").read_bytes())
    trie, reading = Trie(10**9), Reading("bench", encoder.plain, encoder.cuts(""))
    made, taken = bodies(endpoint, tokens), []
    trie.read("".join(texts(tokens)), reading).json()
    for number in range(100):
        body = next(made)
        characters = len(json.loads(body).get("prompt", ""))
        prompt = trie.read("".join(texts(tokens)) + f"Question {number}", reading)
        began = time.process_time_ns()
        spliced(endpoint, body, [prompt.json()], characters)
        taken.append((time.process_time_ns() - began) / 1e3)
    return round(statistics.median(taken), 1)


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> float:
    """Send a request; return the seconds to the first byte of the answer's body."""
    began = time.perf_counter()
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read(1)
    took = time.perf_counter() - began
    rest_of_it = answer.read()
    if answer.status != 200 or b"[DONE]" not in rest_of_it:
        raise RuntimeError(f"{answer.status} {rest_of_it[:500]!r}")
    return took


def batch(replica: Replica, path: str, requests: Iterator[bytes], *watched: Process) -> list[float]:
    """Return seconds per request: TTFT, then the CPU time of each process. The first request is not measured."""
    parts = urlsplit(replica.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    ask(connection, path, next(requests))
    before, began = [one.cpu_s() for one in watched], time.perf_counter()
    waits = [ask(connection, path, next(requests)) for _ in range(CHECK_EVERY - 1)]
    took = time.perf_counter() - began
    used = [one.cpu_s() - start - one.idle * took for one, start in zip(watched, before, strict=True)]
    connection.close()
    return [statistics.median(waits), *[cpu / len(waits) for cpu in used]]


def measure(replicas: dict[str, Replica], api: Process, batches: int) -> dict[str, float]:
    processes = {mode: Process(one.process.pid) for mode, one in replicas.items()}
    rest(api, *processes.values())
    found: dict[str, float] = {}
    for kind, path in PATHS.items():
        for size, tokens in SIZES.items():
            requests, rows = bodies(kind, tokens), {mode: list[list[float]]() for mode in replicas}
            for mode in [*replicas] * (batches + 1):
                rows[mode].append(batch(replicas[mode], path, requests, api, processes[mode]))
            for mode, taken in rows.items():
                ttft, engine, router = (statistics.median(column) for column in zip(*taken[1:], strict=True))
                found |= {
                    f"ttft_ms_{kind}_{size}_{mode}": round(1e3 * ttft, 2),
                    f"api_server_ms_{kind}_{size}_{mode}": round(1e3 * engine, 2),
                    f"router_us_{kind}_{size}_{mode}": round(1e6 * router),
                }
                found[f"splice_us_{kind}_{size}"] = splice_us(kind, tokens)
                print(kind, size, mode, [round(1e3 * one, 2) for one in (ttft, engine, router)], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5, help=f"of {CHECK_EVERY - 1} requests (default %(default)s)")
    batches = parser.parse_args().batches
    patient = {"WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS}
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(redis_url, blocks=4_096, max_model_len=32_768)
        with (
            running(options) as [engine],
            running_replicas(redis_url, 1, 1, WARMFLEET_TOKEN_HANDOFF="0", **patient) as [off],
            running_replicas(redis_url, 1, 1, WARMFLEET_TOKEN_HANDOFF="1", **patient) as [on],
        ):
            assert engine.process is not None
            found = measure({"off": off, "on": on}, Process(engine.process.pid), batches)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
