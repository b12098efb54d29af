"""Forms are read as Starlette reads them for vLLM's server, which does so by python-multipart."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from warmfleet.prompt.dialects import form

if TYPE_CHECKING:
    from starlette.types import Message

KIND = "multipart/form-data; boundary=line"
URL_ENCODED = "application/x-www-form-urlencoded"


async def starlettes(content_type: str, body: bytes) -> dict[str, str] | None:
    """The texts that Starlette reads in a form, the last of each name; None if it refuses the form."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", content_type.encode("latin-1"))]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    try:
        found = await request.form()
    except (MultiPartException, HTTPException, LookupError):
        return None
    texts = {name: found[name] for name in found}
    await found.close()
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def part(head: str, value: bytes = b"m") -> bytes:
    return b"--line\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"


MODEL = part('Content-Disposition: form-data; name="model"')
FILE = part('Content-Disposition: form-data; name="file"; filename="a.wav"', b"RIFF\r\n\r\n--lin")
END = b"--line--\r\n"
#: Name → body, and its Content-Type unless it is KIND.
FORMS: dict[str, tuple[bytes, str]] = {
    "plain": (FILE + MODEL + END, KIND),
    "quoted boundary": (MODEL + END, 'multipart/form-data; boundary="line"'),
    "boundary before other options": (MODEL + END, "multipart/form-data; boundary=line; charset=utf-8"),
    "type in capitals": (MODEL + END, "Multipart/Form-Data; Boundary=line"),
    "no boundary": (MODEL + END, "multipart/form-data"),
    "another boundary": (MODEL + END, "multipart/form-data; boundary=other"),
    "line ends before it": (b"\r\n\r\n" + MODEL + END, KIND),
    "words before it": (b"preamble\r\n" + MODEL + END, KIND),
    "words behind it": (MODEL + END + b"epilogue", KIND),
    "no end": (MODEL, KIND),
    "cut off": ((MODEL + MODEL)[:-5], KIND),
    "bare line feeds": ((MODEL + END).replace(b"\r\n", b"\n"), KIND),
    "spaces behind a boundary": ((FILE + MODEL + END).replace(b"--line\r\n", b"--line \t\r\n")[3:], KIND),
    "padding amid": (FILE + MODEL.replace(b"--line\r\n", b"--line  \t\r\n") + END, KIND),
    "the boundary goes on": (part('Content-Disposition: form-data; name="model"', b"a\r\n--lines\r\nb") + END, KIND),
    "name without quotes": (part("Content-Disposition: form-data; name=model") + END, KIND),
    "header in capitals": (part('CONTENT-DISPOSITION: form-data; NAME="model"') + END, KIND),
    "no space behind the colon": (part('Content-Disposition:form-data;name="model"') + END, KIND),
    "other headers around": (
        part('Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\nX: y') + END,
        KIND,
    ),
    "file name before the name": (part('Content-Disposition: form-data; filename="a"; name="model"') + END, KIND),
    "extended name": (part("Content-Disposition: form-data; name*=utf-8''model") + END, KIND),
    "both names": (part("Content-Disposition: form-data; name=\"model\"; name*=utf-8''other") + END, KIND),
    "escaped name": (part('Content-Disposition: form-data; name="mo\\"del"') + END, KIND),
    "a semicolon in a name": (part('Content-Disposition: form-data; name="mo;del"; x=1') + END, KIND),
    "no name": (part("Content-Disposition: form-data") + MODEL + END, KIND),
    "no disposition": (part("Content-Type: text/plain") + MODEL + END, KIND),
    "no header": (b"--line\r\n\r\nm\r\n" + MODEL + END, KIND),
    "a folded header": (part('Content-Disposition: form-data;\r\n name="model"') + END, KIND),
    "twice": (part('Content-Disposition: form-data; name="model"', b"first") + MODEL + END, KIND),
    "a text, then a file": (MODEL + part('Content-Disposition: form-data; name="model"; filename="x"') + END, KIND),
    "empty": (part('Content-Disposition: form-data; name="model"', b"") + END, KIND),
    "empty, no line end": (b'--line\r\nContent-Disposition: form-data; name="model"\r\n\r\n--line--\r\n', KIND),
    "spaces": (part('Content-Disposition: form-data; name="model"', b" m \r\n") + END, KIND),
    "utf-8": (part('Content-Disposition: form-data; name="model"', "ü".encode()) + END, KIND),
    "latin-1": (part('Content-Disposition: form-data; name="model"', b"\xfc") + END, KIND),
    "a charset": (part('Content-Disposition: form-data; name="model"', b"\xa4") + END, KIND + "; charset=iso-8859-15"),
    "an unknown charset": (part('Content-Disposition: form-data; name="model"', b"\xa4") + END, KIND + "; charset=x"),
    "a charset of no text": (MODEL + END, KIND + "; charset=base64"),
    "nothing but the end": (END, KIND),
    "nothing": (b"", KIND),
    "url": (b"file=a&model=m+n%2Fo&stream=true", URL_ENCODED),
    "url with options": (b"model=m", URL_ENCODED + "; charset=utf-8"),
    "url twice": (b"model=a&model=b", URL_ENCODED),
    "url without values": (b"&&model&stream=&=x&", URL_ENCODED),
    "url with a semicolon": (b"a=b;model=m", URL_ENCODED),
    "url in bytes": (b"model=%ff\xfc", URL_ENCODED),
    "url with two signs": (b"model=a=b", URL_ENCODED),
}


@pytest.mark.parametrize("name", FORMS)
async def test_forms_as_starlette_reads_them(name: str) -> None:
    body, content_type = FORMS[name]
    wanted = await starlettes(content_type, body)
    assert form.is_form(content_type.encode())
    found = form.fields(content_type.encode(), body)
    if wanted is not None:
        assert found == wanted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Starlette leaves a cut-off file open
@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*(body for body, kind in FORMS.values() if kind == KIND), MODEL, FILE, END, b"--line", b"\r\n", b"-", b" "]
        ),
        max_size=6,
    ),
    st.integers(0, 400),
)
async def test_any_pieces_as_starlette_reads_them(pieces: list[bytes], cut: int) -> None:
    body = b"".join(pieces)
    body = body[: max(0, len(body) - cut // 20)]
    wanted = await starlettes(KIND, body)
    if wanted is not None:
        assert form.fields(KIND.encode(), body) == wanted


@pytest.mark.parametrize(
    "piece", [b"\r\n--line", b"\r\n--lin", b"\r\n--line\r\n", b"\r", b"-", FILE, MODEL, b"a=b&", b"&"]
)
@pytest.mark.parametrize("kind", [KIND, URL_ENCODED])
def test_no_form_holds_up_others(piece: bytes, kind: str) -> None:
    body = MODEL + piece * (32_000_000 // len(piece))
    began = time.process_time()
    form.fields(kind.encode(), body)
    assert time.process_time() - began < 0.25
