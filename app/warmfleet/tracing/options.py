"""The standard variables of OpenTelemetry that a replica obeys, read and checked.

A collector's address turns tracing on: ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``. As
for every variable of the exporter, that with ``TRACES`` wins. ``app/docs/tracing.md`` lists all variables.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from warmfleet.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "OTEL_EXPORTER_OTLP_"
ENDPOINT = f"{PREFIX}ENDPOINT"
PROTOCOL = "http/protobuf"
DEFAULT_TIMEOUT_MS = 10_000.0
DEFAULT_SERVICE = "warmfleet"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t -~]*")
#: Sampler → whether a caller's decision counts, and the share of other traces kept; None = OTEL_TRACES_SAMPLER_ARG.
SAMPLERS: dict[str, tuple[bool, float | None]] = {
    "parentbased_always_on": (True, 1.0),
    "parentbased_traceidratio": (True, None),
    "parentbased_always_off": (True, 0.0),
    "always_on": (False, 1.0),
    "traceidratio": (False, None),
    "always_off": (False, 0.0),
}


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """Options of tracing. ``endpoint``: the URL that spans are posted to. ``share``, ``by_parent``: see ``Sampler``.

    ``certificate``: a PEM file of the authority that signed the collector's certificate; empty = the system's.
    ``client_certificate``, ``client_key``: PEM files that the collector may ask for. ``resource``: attributes that all
    spans of this replica have in common. ``headers`` are secret, so ``repr`` does not show them.
    """

    endpoint: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_MS / 1_000
    gzip: bool = False
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""
    by_parent: bool = True
    share: float = 1.0
    resource: dict[str, str] = field(default_factory=dict)


def tracing_options(environment: Mapping[str, str]) -> TracingOptions | None:
    """Read the options in these variables; return None if tracing is off. Raises BadArgument that names a variable."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter == "none":
        return None
    endpoint = _endpoint(environment)
    if not endpoint:
        return None
    if exporter != "otlp":
        raise BadArgument(f"OTEL_TRACES_EXPORTER={exporter!r}: known are otlp, none")
    protocol = _of_exporter(environment, "PROTOCOL") or PROTOCOL
    if protocol != PROTOCOL:
        raise BadArgument(
            f"{PREFIX}PROTOCOL={protocol!r}: a router speaks {PROTOCOL} only, for which collectors usually have port "
            f"4318 (4317 is for grpc)"
        )
    compression = _of_exporter(environment, "COMPRESSION") or "none"
    if compression not in ("none", "gzip"):
        raise BadArgument(f"{PREFIX}COMPRESSION={compression!r}: known are gzip, none")
    by_parent, share = _sampler(environment)
    resource = {"service.name": DEFAULT_SERVICE} | _pairs("OTEL_RESOURCE_ATTRIBUTES", environment)
    if service := environment.get("OTEL_SERVICE_NAME", "").strip():
        resource["service.name"] = service
    return TracingOptions(
        endpoint=endpoint,
        headers=_headers(f"{PREFIX}HEADERS", environment) | _headers(f"{PREFIX}TRACES_HEADERS", environment),
        timeout_s=_timeout_s(environment),
        gzip=compression == "gzip",
        certificate=_of_exporter(environment, "CERTIFICATE"),
        client_certificate=_of_exporter(environment, "CLIENT_CERTIFICATE"),
        client_key=_of_exporter(environment, "CLIENT_KEY"),
        by_parent=by_parent,
        share=share,
        resource=resource,
    )


def _number(text: str) -> float:
    """Return the number that the text writes; NaN if it writes none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _of_exporter(environment: Mapping[str, str], name: str) -> str:
    """Return an exporter's option: from the variable for traces if that is set, else from the one for all signals."""
    return environment.get(f"{PREFIX}TRACES_{name}", "").strip() or environment.get(PREFIX + name, "").strip()


def _endpoint(environment: Mapping[str, str]) -> str:
    """Return the URL that spans are posted to; empty if no variable names a collector. Raises BadArgument."""
    for name, path in (f"{PREFIX}TRACES_ENDPOINT", ""), (ENDPOINT, "/v1/traces"):
        url = environment.get(name, "").strip()
        if not url:
            continue
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            usable = usable and url.isprintable() and " " not in url
            if parts.username is not None:
                raise BadArgument(f"{name} holds a user: name it in {PREFIX}HEADERS, as authorization=Basic ...")
            if "?" in url or "#" in url:
                raise BadArgument(
                    f"{name} holds a query or a fragment: a key for the collector belongs in {PREFIX}HEADERS"
                )
        except ValueError:
            usable = False
        if not usable:
            raise BadArgument(f"{name} is not the URL of a collector, such as http://127.0.0.1:4318")
        return url.rstrip("/") + path if path else url
    return ""


def _timeout_s(environment: Mapping[str, str]) -> float:
    """Return the time-out of a try, which the variable has in milliseconds. Raises BadArgument."""
    text = _of_exporter(environment, "TIMEOUT") or str(DEFAULT_TIMEOUT_MS)
    ms = _number(text)
    if not 0 < ms < math.inf:
        raise BadArgument(f"{PREFIX}TIMEOUT={text!r} is not a number of milliseconds above 0")
    return ms / 1_000


def _sampler(environment: Mapping[str, str]) -> tuple[bool, float]:
    """Return whether a caller's decision counts, and the share of all other traces. Raises BadArgument."""
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip() or "parentbased_always_on"
    if name not in SAMPLERS:
        raise BadArgument(f"OTEL_TRACES_SAMPLER={name!r}: known are {', '.join(SAMPLERS)}")
    by_parent, share = SAMPLERS[name]
    if share is not None:
        return by_parent, share
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0"
    share = _number(text)
    if not 0 <= share <= 1:
        raise BadArgument(f"OTEL_TRACES_SAMPLER_ARG={text!r} is a share: 0 to 1")
    return by_parent, share


def _pairs(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Parse ``key=value,key=value`` with escapes as in a URL. Raises BadArgument that does not show the value."""
    found = {}
    for part in filter(None, map(str.strip, environment.get(name, "").split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise BadArgument(f"{name} is not a list of key=value, separated by commas")
        found[unquote(key).strip()] = unquote(value).strip()
    return found


def _headers(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the ``_pairs``; raises BadArgument for one that HTTP forbids, before httpx raises one with its value."""
    found = _pairs(name, environment)
    for key, value in found.items():
        if not _HEADER_NAME.fullmatch(key):
            raise BadArgument(f"{name}: a name in it is not the name of a header")
        if not _HEADER_VALUE.fullmatch(value):
            raise BadArgument(f"{name}: the value of {key} has characters beyond printable ASCII")
    return found
