"""The bench ``proxy --streams`` in small: it reports every figure, and its client measures gaps and failures."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from tests.bench.proxy_client import request
from tests.bench.proxy_requests import body, small
from tests.bench.proxy_streams import allow_files
from tests.bench.proxy_streams_client import opened
from tests.bench.stub_engines import Stub

from warmfleet_loadtest.stacks.processes import StackError


@pytest.mark.long(minutes=1, shows="the bench `proxy --streams` reports every figure")
def test_a_small_run_reports_every_figure() -> None:
    argv = [sys.executable, "-m", "tests.bench.bench_proxy", "--streams", "--quick"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    streams: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (streams["streams"], streams["failed"]) == (40, 0)
    assert streams["gap_engine_p50_ms"] == pytest.approx(100, rel=0.5)
    assert {"kb_per_stream", "gap_client_p95_ms", "late_p95_ms", "replica_core_share"} <= streams.keys()


async def test_the_client_takes_the_times_of_every_chunk_and_tells_a_broken_stream() -> None:
    server = await asyncio.get_running_loop().create_server(partial(Stub, 0), "127.0.0.1", 0)
    asked = [request(body(small(str(number)), 5, 1, stamped=True)) for number in range(3)]
    plain = request(body(small("plain")))
    async with server:
        streams, made = await opened(server.sockets[0].getsockname()[1], [*asked, plain], 1_000.0)
        await streams.over.wait()
    assert [len(stream.sent) for stream in made] == [5, 5, 5, 0]
    assert all(sent <= came for stream in made for sent, came in zip(stream.sent, stream.came, strict=True))
    assert len(streams.failures) == 1
    assert 1 <= streams.most <= 3


def test_too_few_open_files_are_told() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with pytest.raises(StackError, match=f"and only {hard} are allowed here: raise the hard limit"):
        allow_files(2**31)
