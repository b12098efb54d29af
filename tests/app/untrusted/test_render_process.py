"""Chat templates that are not approved, in real processes: a limit harms only the request that meets it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from warmfleet.prompt.messages import Message, NotReproducible
from warmfleet.untrusted import render_process
from warmfleet.untrusted.render_process import Child, LimitMet, Sandboxed

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = (
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}{{ bos_token }}"
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)
#: A template that makes mischief if the last message is "boom", and renders any other message.
WHEN = "{% if messages[-1].content == 'boom' %}MISCHIEF{% endif %}{{ messages[-1].content }}"
HOURS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
BOOM: list[Message] = [{"role": "user", "content": "boom"}]
HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def process(box: Sandboxed) -> psutil.Process:
    assert box._child is not None
    return psutil.Process(box._child.process.pid)


def limits(box: Sandboxed) -> dict[str, float]:
    """How often each kind of limit was met."""
    [counter] = box._metrics.template_limits.collect()
    return {sample.labels["limit"]: sample.value for sample in counter.samples}


async def refused(box: Sandboxed, messages: list[Message] = BOOM) -> str:
    with pytest.raises(NotReproducible) as caught:
        await box.render(messages, {}, {})
    return caught.value.reason


# ------------------------------------------------ limits

MISCHIEF = {
    "a gigabyte": ("{{ 'x' * (10**9 + messages | length) }}", "memory"),
    "a gigabyte in pieces": ("{% for i in range(90000) %}{{ 'x' * 20000 }}{% endfor %}", "memory or time"),
    "ten megabytes": ("{{ 'x' * (10**7 + messages | length) }}", "output"),
    "indent": ("{{ messages | tojson(indent=10**9) }}", "memory"),
    "width": ("{{ '%*d' % (10**9 + messages | length, 1) }}", "memory"),
    "nested loops": (HOURS, "time"),
    "one call that never returns": ("{% if 3 ** (10**9 + messages | length) %}{% endif %}", "time"),
    "a list without end": (
        "{% set ns = namespace(l=[1]) %}{% for i in range(90000) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "memory or time",
    ),
}


@pytest.mark.parametrize("case", MISCHIEF)
async def test_a_limit_harms_the_request_that_meets_it(started: Callable[..., Sandboxed], case: str) -> None:
    mischief, kind = MISCHIEF[case]
    box = started(WHEN.replace("MISCHIEF", mischief))
    assert await box.render(HELLO, {}, {}) == "hello"
    assert await refused(box) == "template_limit"
    [(met, count)] = limits(box).items()
    assert met in kind.split(" or ")
    assert count == 1
    assert await box.render(HELLO, {}, {}) == "hello"


@pytest.mark.parametrize(
    "mischief", ["{{ range(10**9) | list }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ 1 // 0 }}"]
)
async def test_a_render_that_only_fails_meets_no_limit(started: Callable[..., Sandboxed], mischief: str) -> None:
    box = started(WHEN.replace("MISCHIEF", mischief))
    assert await refused(box) == "template"
    alive = process(box)
    assert await box.render(HELLO, {}, {}) == "hello"
    assert (process(box), limits(box)) == (alive, {})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "template"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "template"),
        ("{{ 3 ** (10 ** 9) }}", "template_limit"),
        ("{{ 'x' * 10 ** 8 }}", "template_limit"),
    ],
    ids=["syntax", "depth", "power", "constant"],
)
async def test_compiling_has_limits_too(started: Callable[..., Sandboxed], source: str, reason: str) -> None:
    box = started(source)
    assert await refused(box, HELLO) == reason
    assert box._child is None
    assert await refused(box, HELLO) == reason


async def test_a_request_that_is_too_large_is_not_sent(started: Callable[..., Sandboxed]) -> None:
    box = started(PLAIN)
    assert await refused(box, [{"role": "user", "content": "x" * render_process.MAX_REQUEST_BYTES}]) == "template_limit"
    assert limits(box) == {}


async def test_the_event_loop_and_the_others_go_on(started: Callable[..., Sandboxed]) -> None:
    bad, good = started(WHEN.replace("MISCHIEF", HOURS)), started(PLAIN)
    await bad.ready()
    await good.ready()
    slow = asyncio.ensure_future(refused(bad))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(bad.render(HELLO, {}, {}))
    rounds = 0
    while not slow.done():
        assert "hello" in await good.render(HELLO, {}, {})
        await asyncio.sleep(0.001)  # gives other tasks a turn
        rounds += 1
    assert rounds > 3, "another template does not wait for this one"
    assert await slow == "template_limit"
    assert await waiting == "hello", "a request that waited is served by the next process"


async def test_the_queue_is_short(started: Callable[..., Sandboxed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_process, "WAIT_S", 0.05)
    box = started(WHEN.replace("MISCHIEF", HOURS))
    await box.ready()
    slow = asyncio.ensure_future(refused(box))
    await asyncio.sleep(0.01)
    assert await refused(box, HELLO) == "busy"
    monkeypatch.setattr(render_process, "MAX_WAITING", 0)
    assert await refused(box, HELLO) == "busy"
    await slow


async def test_a_client_that_hangs_up_leaves_no_answer_behind(started: Callable[..., Sandboxed]) -> None:
    box = started(WHEN.replace("MISCHIEF", "{% for i in range(90000) %}{% endfor %}"))
    await box.ready()
    for _ in range(3):
        task = asyncio.ensure_future(box.render(BOOM, {}, {}))
        await asyncio.sleep(0.002)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await box.render(HELLO, {}, {}) == "hello"
    assert limits(box) == {}


# ------------------------------------------------ a template that meets limits again and again


async def test_a_template_that_keeps_meeting_limits_is_held_back(
    started: Callable[..., Sandboxed], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(render_process, "FIRST_HOLD_S", 0.5)
    box = started(WHEN.replace("MISCHIEF", "{{ 'x' * (10**9 + messages | length) }}"))
    box._hold_s = 0.5
    for _ in range(3):
        assert await refused(box) == "template_limit"
    assert box.state == "held back"
    for _ in range(100):
        assert await refused(box, HELLO) == "template_limit"
        assert box._child is None, "no process is started for them"
    assert limits(box) == {"memory": 3, "held_back": 100}
    assert "not rendered for" in caplog.text
    await asyncio.sleep(0.6)
    assert await box.render(HELLO, {}, {}) == "hello"
    assert (box.state, box._hold_s) == ("sandbox", 1.0)


# ------------------------------------------------ how a process ends, and what it can reach


async def test_a_process_that_dies_is_replaced(
    started: Callable[..., Sandboxed], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = started(PLAIN)
    await box.ready()
    process(box).kill()
    assert await refused(box) == "template_limit"
    assert "hello" in await box.render(HELLO, {}, {})
    stopped = process(box)
    stopped.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(render_process, "WALL_S", 0.3)
        assert await refused(box) == "template_limit"
    assert not stopped.is_running()
    assert limits(box) == {"crash": 1, "stuck": 1}
    assert "hello" in await box.render(HELLO, {}, {})


PARENT = """
import asyncio
from warmfleet.metrics import Metrics
from warmfleet.untrusted.render_process import Sandboxed
async def main():
    idle, busy = (Sandboxed(source, "auto", "test", Metrics()) for source in ("", {hours!r}))
    await idle.ready(), await busy.ready()
    asyncio.ensure_future(busy.render([], {{}}, {{}}))
    await asyncio.sleep(0.05)
    print(idle._child.process.pid, busy._child.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_it_dies_with_its_replica() -> None:
    argv = [sys.executable, "-c", PARENT.format(hours=HOURS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    replica = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    children = [psutil.Process(int(pid)) for pid in replica.stdout.readline().split()]
    assert len(children) == 2
    replica.kill()
    replica.wait()
    replica.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


async def test_the_process_shares_nothing_with_its_replica(
    started: Callable[..., Sandboxed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_REDIS_URL", "redis://user:s3cret@redis")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        box = started(PLAIN)
        await box.ready()
        child = process(box)
        assert set(child.environ()) <= {"TZ", "LC_CTYPE"}  # Python sets the latter itself
        held = held_files(child.pid)
        assert held.pop("0").startswith("socket:")
        assert set(held.values()) == {"/dev/null"}
        doors = (psutil.RLIMIT_NOFILE, psutil.RLIMIT_NPROC, psutil.RLIMIT_FSIZE, psutil.RLIMIT_CORE)
        assert [child.rlimit(name) for name in doors] == [(0, 0)] * 4
        assert child.rlimit(psutil.RLIMIT_AS) == (256 * 2**20, 256 * 2**20)
        assert child.memory_info().rss < 48 * 2**20


def held_files(pid: int) -> dict[str, str]:
    return {link.name: str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"=" + (2**31).to_bytes(4, "little") + b"x" * 2**12, "output"),
        (b"=\x01\x00\x00\x00", "crash"),
        (b"", "crash"),
        (b"!\x05\x00\x00\x00abcde", "memory"),
    ],
    ids=["long", "cut off", "closed", "limit"],
)
async def test_an_answer_is_not_trusted(answer: bytes, kind: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = Child(sleeper(), *await asyncio.open_unix_connection(sock=ours))
        theirs.setblocking(False)
        theirs.send(answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LimitMet) as caught:
            await child.ask(b"request")
        assert caught.value.kind == kind
        await child.end()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])
