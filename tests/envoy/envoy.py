"""A real Envoy as gateway, with the listeners of ``gateway_config``."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from tests.envoy.gateway_config import MODES, Mode, binary, config
from tests.support.polling import poll
from tests.support.run.required_tools import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


class Logged(NamedTuple):
    """A line of Envoy's access log. engine: its address, or ``-``. tries: at an engine."""

    status: str
    details: str
    engine: str
    tries: str


@dataclass
class Envoy:
    """A running Envoy. ``urls``: by the name of the listener. ``log``: the file of its access log."""

    process: asyncio.subprocess.Process
    admin: str
    log: Path
    urls: dict[str, str] = field(default_factory=dict)

    async def logged(self, case: str) -> Logged:
        """Return what Envoy logged of the request with this X-Case, once it has."""

        def found() -> list[str]:
            return [line for line in self.log.read_text().splitlines() if line.startswith(f"{case} ")]

        await poll(found, 10, "Envoy logs the request")
        return Logged(*found()[0].split()[1:])

    async def ask(self, path: str) -> str:
        async with aiohttp.ClientSession() as client, client.get(f"{self.admin}{path}") as answer:
            return await answer.text()


def written(folder: Path, made: dict[str, Any]) -> tuple[Path, Path, Path]:
    """Write the configuration; return its path, and those of the admin's address and of the access log."""
    folder.mkdir(exist_ok=True)
    (folder / "envoy.json").write_text(json.dumps(made))
    return folder / "envoy.json", folder / "admin", folder / "log"


@asynccontextmanager
async def envoy(
    folder: Path, pickers: Sequence[str], engines: Sequence[str], modes: Sequence[Mode] = MODES, *, tls: bool = False
) -> AsyncIterator[Envoy]:
    """Run an Envoy whose pickers and engines are at these addresses (``ip:port``)."""
    made, admin, log = written(folder, config(pickers, engines, modes, tls=tls))
    options = ("--concurrency", "1", "--use-dynamic-base-id", "--admin-address-path", str(admin), "-l", "warning")
    with open(log, "wb") as out, open(folder / "errors", "wb") as errors:  # noqa: ASYNC230, PTH123  files of a test
        process = await asyncio.create_subprocess_exec(
            require("envoy", binary()),
            "-c",
            str(made),
            *options,
            "--file-flush-interval-msec",
            "20",
            stdout=out,
            stderr=errors,
        )
    running = Envoy(process, "", log)
    try:
        await poll(lambda: process.returncode is not None or (admin.exists() and admin.read_text()), 30, "Envoy starts")
        assert process.returncode is None, (folder / "errors").read_text()[-2_000:]
        running.admin = f"http://{admin.read_text()}"

        async def listening() -> bool:
            told = json.loads(await running.ask("/listeners?format=json"))["listener_statuses"]
            running.urls = {
                each["name"]: f"http://127.0.0.1:{each['local_address']['socket_address']['port_value']}"
                for each in told
            }
            return len(running.urls) == len(modes) + 1 and "LIVE" in await running.ask("/ready")

        await poll(listening, 30, "Envoy listens")
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
