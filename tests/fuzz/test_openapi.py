"""schemathesis makes requests of the OpenAPI document, right and wrong ones, and holds every answer against it."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.fuzz.target import target
from tests.support.run.required_tools import require

LONG = pytest.mark.long(
    minutes=5,
    shows="schemathesis over the OpenAPI document: no answer is an error of the router, every one is as documented",
)
CONFIG = Path(__file__).with_name("schemathesis.toml")
EXAMPLES = 100  # of each path and method, besides those of schemathesis's own list of borderline cases
SEED = "12"
GROWTH_BYTES = 48 * 2**20  # beside caches that fill

pytestmark = [LONG, pytest.mark.timeout(3_600)]


async def checked(url: str, examples: int, folder: Path) -> tuple[int | None, str]:
    """The exit status of schemathesis, and what it printed. folder: for what it remembers of a run."""
    beside = Path(sys.executable).with_name("st")
    program = require("st", str(beside) if beside.exists() else shutil.which("st"))
    argv = ["--config-file", str(CONFIG), "run", f"{url}/openapi.json", "--max-examples", str(examples)]
    argv += ["--seed", SEED, "--continue-on-failure", "--phases", "examples,coverage,fuzzing"]
    process = await asyncio.create_subprocess_exec(
        program, *argv, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    return process.returncode, printed.decode(errors="replace")


async def test_every_answer_is_as_the_document_says(valkey_url: str, model: str, tmp_path: Path) -> None:
    async with target(valkey_url, model) as router:
        url = f"http://127.0.0.1:{router.port}"
        await checked(url, 5, tmp_path)  # caches fill
        before = router.memory
        status, printed = await checked(url, EXAMPLES, tmp_path)
        grown = router.memory - before
    told = re.search(r"(\d+) generated", printed)
    assert status == 0, printed[-6_000:]
    assert told is not None, printed
    print(f"{told[1]} requests, {router.received} at the engine, memory +{grown / 2**20:.1f} MiB")
    assert int(told[1]) > 50 * EXAMPLES / 2
    assert router.received > EXAMPLES
    assert grown < GROWTH_BYTES
