"""A client in a process of its own, so that it can be killed in the middle of an answer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Self


@dataclass
class Stream:
    """A process of curl that reads a streamed completion."""

    process: subprocess.Popen[bytes]

    @classmethod
    def open(cls, url: str, prompt: str, max_tokens: int) -> Self:
        """Start the client, and return at the first bytes of the answer, while the engine decodes."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        argv = ["curl", "-sN", "--max-time", "60", f"{url}/v1/completions", "-H", "content-type: application/json"]
        process = subprocess.Popen([*argv, "-d", json.dumps(body)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith(b"data: {"), first
        return cls(process)

    def kill(self) -> None:
        """Send SIGKILL, so that only the kernel closes the connection."""
        self.process.kill()
        self._close()

    def read_to_end(self) -> tuple[bytes, int]:
        """Return the unread part of the answer, and curl's exit status, which is 18 for an answer that was cut off."""
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        return rest, self._close()

    def _close(self) -> int:
        code = self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code
