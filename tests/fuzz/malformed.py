"""Malformed requests, made from one seed: bodies, headers and paths with odd values, and attempts to smuggle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.fleet.damaged_announcements import ODD, paths

from warmfleet.prompt.engine_paths import KNOWN, NEVER, OWN

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

HIDDEN_PATH = "/v1/completions"  # of a request within another one; no other request of these has this path
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant", "content": "Yes?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 4, "stream": False, "stop": ["x"], "n": 1, "seed": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 4, "temperature": 0.5},
    "/v1/messages": {"messages": MESSAGES, "system": [{"type": "text", "text": "Be kind"}], "max_tokens": 4},
    "/v1/responses": {"input": MESSAGES[:1], "instructions": "Be kind", "max_output_tokens": 4},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float"},
    "/tokenize": {"prompt": "Hello"},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/settle": {"reservation": "wf-00000000000000000001", "outcome": "finished"},
    "/renew": {"reservation": "wf-00000000000000000001"},
    "/explain": {"prompt": "Hello", "endpoint": "/v1/completions", "tenant": "t"},
}
HEADERS = (
    *("Content-Type", "Accept", "Authorization", "Cookie", "Origin", "Referer", "User-Agent", "X-Request-Id"),
    *("X-Request-Timeout-Ms", "X-Session-ID", "X-Warmfleet-Explain", "X-Warmfleet-Prefix-Len", "X-Warmfleet-Session"),
    *("X-Warmfleet-Conversation", "X-Warmfleet-Labels"),
    *("Content-Encoding", "Expect", "Range", "TE", "Trailer", "Upgrade", "X-Forwarded-For", "X-HTTP-Method-Override"),
    *("traceparent", "tracestate", "Access-Control-Request-Method", "X-data-parallel-rank", "Via", "Accept-Encoding"),
)
VALUES = (
    *(b"", b" ", b"0", b"-1", b"1e999", b"9" * 400, b"true", b"null", b"\xff\xfe", b"\x80" * 40, b"a" * 9_000, b"*"),
    *(b"gzip", b"100-continue", b"h2c", b"websocket", b"multipart/form-data; boundary=", b"application/json", b"../.."),
    *(b"bytes=0-", b"text/html;q=\xe9", b"Bearer \xff", b"%00%0d%0a", b"a\tb", b'"', b",", b";", b"=", b"{}"),
)
BAD_BYTES = (b"\x00", b"\n", b"\r", b"\x7f", b"\x0b", b" ", b":", b"\r\n", b"\r\n\r\n")
METHODS = (b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"post", b"PROPFIND")


def requests(rng: random.Random, model: str) -> Iterator[bytes]:
    """Yield whole requests without end, each malformed in one way."""
    kinds = (_body, _body, _raw_body, _header, _target)
    while True:
        yield rng.choice(kinds)(rng, model)


def _request(target: bytes, body: bytes, *lines: bytes, method: bytes = b"POST") -> bytes:
    head = [b"%b %b HTTP/1.1" % (method, target), b"Host: x", *lines, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def _body(rng: random.Random, model: str) -> bytes:
    """Give one to three fields of a good body odd values, or unknown names."""
    path = rng.choice(list(BODIES))
    body = json.loads(json.dumps({"model": model} | BODIES[path]))
    marks = {}
    for number in range(rng.randint(1, 3)):
        *above, last = rng.choice(list(paths(body)))
        place = body
        for key in above:
            place = place[key]
        marks[f'"@{number}@"'] = rng.choice(ODD)
        place[last] = f"@{number}@"
    text = json.dumps(body)
    for mark, odd in marks.items():
        text = text.replace(mark, odd, 1)
    return _request(path.encode(), text.encode("utf-8", "surrogatepass"), b"Content-Type: application/json")


def _raw_body(rng: random.Random, model: str) -> bytes:
    """The bytes of a good body are cut, changed, doubled or replaced."""
    path = rng.choice(list(BODIES))
    body = bytearray(json.dumps({"model": model} | BODIES[path]).encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(4):
            case 0:
                del body[at:]
            case 1:
                body[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 4))
            case 2:
                body[at:at] = rng.choice(ODD).encode()
            case _:
                body += body[at:]
    return _request(path.encode(), bytes(body), rng.choice((b"Content-Type: application/json", b"A: b")))


def _header(rng: random.Random, model: str) -> bytes:
    """Headers that routers or servers know, with odd values; some hold bytes that no header may hold."""
    path = rng.choice(list(BODIES))
    lines = [b"%b: %b" % (rng.choice(HEADERS).encode(), rng.choice(VALUES)) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.3:
        at = rng.randrange(len(lines))
        cut = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:cut] + rng.choice(BAD_BYTES) + lines[at][cut:]
    if rng.random() < 0.05:
        lines *= 60
    return _request(path.encode(), json.dumps({"model": model} | BODIES[path]).encode(), *lines)


def _target(rng: random.Random, model: str) -> bytes:
    """Known paths with odd letters, by any method."""
    path = bytearray(rng.choice([*KNOWN, *OWN, *NEVER]).encode())
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(path) + 1)
        path[at:at] = rng.choice(
            (
                b"/",
                b"..",
                b"%2e",
                b"%2F",
                b"%00",
                b"?",
                b"#",
                b"%",
                b"\xff",
                b";",
                b"//",
                b"%zz",
                b"@",
                b":",
                b"*",
                b"\\",
            )
        )
    body = json.dumps({"model": model, "prompt": "Hello"}).encode()
    return _request(bytes(path), body, method=rng.choice(METHODS))


# ---------------------------------------------------------------- smuggling

LENGTHS = (
    *(
        b"Content-Length: %d",
        b"content-length:%d",
        b"Content-Length: +%d",
        b"Content-Length: 0%d",
        b"Content-Length: %d ",
    ),
    *(
        b"Content-Length: %d, %d",
        b"Content-Length: %d\r\nContent-Length: %d",
        b"Content-Length: %d\r\nContent-Length: 0",
    ),
    *(
        b"Content-Length: 0\r\nContent-Length: %d",
        b"Content-Length : %d",
        b"Content-Length\t: %d",
        b"Content-Length: -%d",
    ),
    *(b" Content-Length: %d", b"Content-Length: %d;", b"Content-Length: \x0b%d", b"Content-Length: %d\r\n 0"),
    *(b"A: b\nContent-Length: %d", b"A: b\rContent-Length: %d", b"Content_Length: %d", b"Content-Length: %d\x00"),
)
CODINGS = (
    *(
        b"Transfer-Encoding: chunked",
        b"transfer-encoding:chunked",
        b"Transfer-Encoding: Chunked",
        b"Transfer-Encoding:\tchunked",
    ),
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked, identity"),
    *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"),
    *(b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", b"Transfer-Encoding:\r\n chunked"),
    *(b"Transfer-Encoding: \x0bchunked", b'Transfer-Encoding: "chunked"', b"Transfer-Encoding: chunked;q=1"),
    *(b" Transfer-Encoding: chunked", b"A: b\nTransfer-Encoding: chunked", b"A: b\rTransfer-Encoding: chunked"),
    *(b"Transfer_Encoding: chunked", b"Transfer-Encoding: chunked\x00", b"Transfer-Encoding:", b"TE: chunked"),
)
ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"")


def smuggler(rng: random.Random, model: str) -> bytes:
    """A request for HIDDEN_PATH in the body of another one whose length two readers might not agree on; then ``LAST``.

    By every reading that RFC 9112 allows, the inner request is part of a body, or the connection ends before it.
    """
    body = json.dumps({"model": model, "prompt": "x"}).encode()
    hidden = _request(HIDDEN_PATH.encode(), body)
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b\r\n\r\n' % model.encode()
    lines = [b"POST /v1/audio/transcriptions HTTP/1.1", b"Host: x", b"Content-Type: multipart/form-data; boundary=b"]
    if rng.random() < 0.5:  # a body with a length, and a coding that must not count or must end the connection
        content = rng.choice((b"0\r\n\r\n", b"1\r\nZ\r\n0\r\n\r\n", form)) + hidden
        told = [rng.choice(LENGTHS[:2]) % len(content), rng.choice(CODINGS)]
    else:  # a body in chunks, and a length that must not count or must end the connection
        content = _chunked(rng, form + hidden)
        told = [rng.choice(CODINGS[:4])]
        if rng.random() < 0.6:
            length = rng.choice(LENGTHS)
            told.append(length.replace(b"%d", b"%d" % rng.choice((0, 4, len(content)))))
    rng.shuffle(told)
    head = b"\r\n".join([*lines, *told])
    return head + b"\r\n\r\n" + content + LAST


def _chunked(rng: random.Random, data: bytes) -> bytes:
    """``data`` in chunks, with extensions and trailers; sometimes one line end is wrong."""
    wrong = rng.random() < 0.5
    pieces, at = [b"%x" % len(data), b"\r\n", data, b"\r\n", b"0", b"\r\n", b"\r\n"], rng.choice((1, 3, 5))
    if rng.random() < 0.5:
        pieces[0] += rng.choice((b";a=b", b';a="\r\n"', b";\n", b" ;a", b";" + b"a" * 300, b"\t", b";a\r", b"_"))
    if rng.random() < 0.4:
        pieces[6] = rng.choice((b"A: b\r\n\r\n", b"Content-Length: 3\r\n\r\n", b"A: b\r\n c\r\n\r\n", b"A\r\n\r\n"))
    if wrong:
        pieces[at] = rng.choice(ENDS)
    return b"".join(pieces)
