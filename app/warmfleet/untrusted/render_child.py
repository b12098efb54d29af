"""The program of a process that renders one chat template that no operator has approved.

``render_process`` starts this program; a replica itself only uses its constants. The process reads requests from, and
writes answers to, its standard input, a socket. A request is 4 bytes of length and marshalled values: first ``(source,
content format)``, then ``(messages, arguments, fixed)``. An answer is a status byte, 4 bytes of length and a text.
The kernel refuses the process every file, connection and child process. The process ends when its parent dies, which
closes the socket. SIGPROF ends it at its CPU limit, even in a call that never returns to Python.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmfleet.prompt.chat_template import ChatTemplate

CPU_S = 0.25  # longest CPU time of one render, or of compiling, which usually takes 0.02 s
MEMORY_BYTES = 256 * 2**20  # most address space of the process
HEAD_BYTES = 4  # size of the number that gives the length of a request or an answer

#: Status byte of an answer. DONE: the rendered text follows, or the content format after compiling. REFUSED: the reason
#: follows. MEMORY: the process ran out of memory.
DONE, REFUSED, MEMORY = b"=", b"-", b"!"
Answer = tuple[bytes, str]


def main() -> None:
    """Serve until the parent closes the socket. The command's arguments are folders to import from."""
    sys.path[:0] = sys.argv[1:]
    _import_all()
    close_doors(MEMORY_BYTES)
    template: ChatTemplate | None = None
    while (request := read_request()) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            if template is None:
                template, answer = _compiled(request)
            else:
                answer = _rendered(template, request)
            body = answer[1].encode("utf-8", "surrogatepass")
        except MemoryError:
            answer, body = (MEMORY, ""), b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_answer(answer[0], body)


def _compiled(request: bytes) -> tuple[ChatTemplate | None, Answer]:
    """Compile the first request's template; return it and its content format, or the name of the error raised."""
    from warmfleet.prompt.chat_template import ChatTemplate

    source, form = marshal.loads(request)  # noqa: S302  the parent has written it
    try:
        template = ChatTemplate(source, form)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  a template may make the compiler raise any exception
        return None, (REFUSED, type(error).__name__)
    return template, (DONE, template.content_format)


def _rendered(template: ChatTemplate, request: bytes) -> Answer:
    from warmfleet.prompt.messages import NotReproducible

    try:
        return DONE, template.render(*marshal.loads(request))  # noqa: S302  the parent has written it
    except NotReproducible as refusal:
        return REFUSED, refusal.reason


def _import_all() -> None:
    """Import each module now, even those that jinja2 imports late, because ``close_doors`` forbids to open files."""
    import pprint  # noqa: F401  for jinja2.utils

    import jinja2.constants
    import jinja2.debug  # noqa: F401  jinja2 imports it for tracebacks

    from warmfleet.prompt.chat_template import ChatTemplate

    ChatTemplate("{{ strftime_now('%Y') }}").render([], {}, {})  # this reads the time zone from its file


def close_doors(memory_bytes: int) -> None:
    """Give up all rights that the kernel grants, except ``memory_bytes`` of address space and the open socket."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123  pathlib takes time to import
        score.write("1000")  # if the machine runs out of memory, it ends this process first
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,  # open files stay open
    }
    for name, value in limits.items():
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(name, (value, value))


def read_request() -> bytes | None:
    """Read the next request; return None when the parent has closed the socket."""
    head = _exactly(HEAD_BYTES)
    return None if head is None else _exactly(int.from_bytes(head, "little"))


def _exactly(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece: Any = os.read(0, min(size - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def send_answer(status: bytes, body: bytes) -> None:
    """Write one answer to the parent."""
    view = memoryview(status + len(body).to_bytes(HEAD_BYTES, "little") + body)
    while view:
        view = view[os.write(0, view) :]


if __name__ == "__main__":
    main()
