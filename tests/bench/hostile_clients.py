"""Clients that hold connections and give nothing back: ``python -m tests.bench.hostile_clients --port 8080``.

Slow readers ask for a long stream; half of them take 512 bytes of it every two seconds, the others nothing. Slow
writers send one byte a second, half of them of the headers, the others of a body that they announced. Each begins anew
when the router closes its connection. Prints ``ready`` when all are connected, and on SIGTERM one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import time
from dataclasses import dataclass, field

from tests.bench.proxy_client import request
from tests.bench.proxy_requests import body, small

CHUNKS = 8_000  # of a slow reader's stream: 1.8 MB, beyond all buffers on the way
TURN_S = 0.1  # every turn looks at a part of the connections
READER_TURNS, WRITER_TURNS = 20, 10  # so that each reads every 2 s, and writes every second
TAKEN_BYTES = 512
RECEIVE_BUFFER_BYTES = 4_096  # so that the kernel does not take the whole stream in the client's place
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"


@dataclass
class Client:
    """One connection. ``first`` is sent at once, then ``drip`` byte by byte."""

    port: int
    first: bytes
    drip: bytes = b""
    takes: int = 0
    made: int = 0
    link: socket.socket = field(default_factory=socket.socket)

    def connect(self) -> None:
        self.link.close()
        self.link = socket.socket()
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self.link.connect(("127.0.0.1", self.port))
        self.link.setblocking(False)
        self.made += 1
        self.link.send(self.first)

    def turn(self) -> None:
        """Do what this client does from time to time."""
        try:
            if self.drip:
                self.link.send(self.drip)
            if self.takes and not self.link.recv(self.takes):
                self.connect()
        except BlockingIOError:
            pass
        except OSError:
            self.connect()


def clients(options: argparse.Namespace) -> tuple[list[Client], list[Client]]:
    """The readers and the writers, not connected yet."""
    readers = [
        Client(options.port, request(body(small(f"slow {one}"), CHUNKS)), takes=TAKEN_BYTES if one % 2 else 0)
        for one in range(options.readers)
    ]
    starts = (HEAD + b"x-slow: ", HEAD + b"content-length: 100000\r\n\r\n{")
    writers = [Client(options.port, starts[one % 2], b" ", 4_096) for one in range(options.writers)]
    return readers, writers


async def run(options: argparse.Namespace) -> None:
    """Connect all, then take turns until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    readers, writers = clients(options)
    for one in (*readers, *writers):
        one.connect()
        await asyncio.sleep(options.pause_ms / 1e3)
    print("ready", flush=True)
    turn = 0
    while not stopping.is_set():
        begun = time.monotonic()
        for everyone, turns in (readers, READER_TURNS), (writers, WRITER_TURNS):
            for one in everyone[turn % turns :: turns]:
                one.turn()
        turn += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), max(0.001, begun + TURN_S - time.monotonic()))
    told = {"readers": readers, "writers": writers}
    print(
        json.dumps({f"{name}_connections": sum(one.made for one in everyone) for name, everyone in told.items()}),
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--readers", type=int, default=1_000, help="slow readers (default %(default)s)")
    parser.add_argument("--writers", type=int, default=1_000, help="slow writers (default %(default)s)")
    parser.add_argument("--pause-ms", type=float, default=4.0, help="between two connections (default %(default)s)")
    asyncio.run(run(parser.parse_args()))
