"""The process that renders one chat template nobody approved. Started by ``sandbox``, a replica runs nothing of it.

It speaks over standard input, a socket: a request is 4 bytes of length and marshalled values, first ``(source, content
format)``, then ``(messages, arguments, fixed)`` each; an answer is a status, 4 bytes of length and text. It opens no
file, no connection and no process: the kernel refuses. It ends with its parent, whose death closes the socket, and at
its CPU limit by SIGPROF, which also ends a single call that never comes back to Python.
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

CPU_S = 0.25  # of one render, or of compiling: 0.02 s are usual for that
MEMORY_BYTES = 256 * 2**20
HEAD_BYTES = 4

#: An answer's first byte: the text (or the content format), why it cannot be rendered, or out of memory.
DONE, REFUSED, MEMORY = b"=", b"-", b"!"
Answer = tuple[bytes, str]


def main() -> None:
    """Serve until the parent closes the socket. Arguments: folders to import from."""
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
    from warmfleet.prompt.chat_template import ChatTemplate

    source, form = marshal.loads(request)  # noqa: S302  what the parent made
    try:
        template = ChatTemplate(source, form)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  a template may make the compiler raise anything at all
        return None, (REFUSED, type(error).__name__)
    return template, (DONE, template.content_format)


def _rendered(template: ChatTemplate, request: bytes) -> Answer:
    from warmfleet.prompt.messages import NotReproducible

    try:
        return DONE, template.render(*marshal.loads(request))  # noqa: S302  as above
    except NotReproducible as why:
        return REFUSED, why.reason


def _import_all() -> None:
    """Also what jinja2 would import late: no file can be opened then."""
    import pprint  # noqa: F401  of jinja2.utils

    import jinja2.constants
    import jinja2.debug  # noqa: F401  of its tracebacks

    from warmfleet.prompt.chat_template import ChatTemplate

    ChatTemplate("{{ strftime_now('%Y') }}").render([], {}, {})  # the time zone is read now


def close_doors(memory_bytes: int) -> None:
    """From here on this process gets nothing from the kernel but ``memory_bytes`` of address space."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123  pathlib takes time to import
        score.write("1000")  # if memory is short, this process is the one to end
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,  # what is open stays open
    }
    for name, value in limits.items():
        with suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(name, (value, value))


def read_request() -> bytes | None:
    """None: the parent closed the socket."""
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
    view = memoryview(status + len(body).to_bytes(HEAD_BYTES, "little") + body)
    while view:
        view = view[os.write(0, view) :]


if __name__ == "__main__":
    main()
