"""A private Redis server in trouble: away, frozen, slow, refusing."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from tests.support.redis.servers import valkey_binary, wait_for_server

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How long each call to a slow Redis takes: less than the publisher's time-out of 2 s.
STALL_SECONDS = 1.0


class Server:
    """A private Valkey at a fixed address, which can be killed and started again."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wf-redis-"))
        self.url = f"unix://{self.folder}/s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", f"{self.folder}/s", "--save", "", "--dir", str(self.folder)]
        options += ["--busy-reply-threshold", "50", "--enable-debug-command", "yes"]
        self.process = subprocess.Popen([valkey_binary(), *options], stdout=subprocess.DEVNULL)
        wait_for_server(self.url, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)


@contextmanager
def refusing(client: redis.Redis, how: str) -> Iterator[None]:
    """Make the server refuse writes with OOM, READONLY, NOPERM or BUSY."""
    thread: threading.Thread | None = None
    if how == "OOM":
        client.config_set("maxmemory", 1)
    elif how == "READONLY":
        client.replicaof("127.0.0.1", 1)
    elif how == "NOPERM":
        client.execute_command("ACL", "SETUSER", "default", "-xadd")  # type: ignore[no-untyped-call]
    else:
        thread = threading.Thread(target=_endless_script, args=(client,))
        thread.start()
    yield
    if how == "OOM":
        client.config_set("maxmemory", 0)
    elif how == "READONLY":
        client.replicaof("NO", "ONE")
    elif how == "NOPERM":
        client.execute_command("ACL", "SETUSER", "default", "+xadd")  # type: ignore[no-untyped-call]
    elif thread is not None:
        client.script_kill()
        thread.join()


def _endless_script(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)


@contextmanager
def slow(client: redis.Redis) -> Iterator[None]:
    """While the block runs, every call is answered, but takes up to STALL_SECONDS."""
    over = threading.Event()

    def stall() -> None:
        while not over.is_set():
            client.execute_command("DEBUG", "SLEEP", STALL_SECONDS)  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=stall)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
