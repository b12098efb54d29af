"""The trace of a request, and the share of traces that are kept, as the standards of W3C and OpenTelemetry have it."""

from __future__ import annotations

import re

import pytest

from warmfleet.errors import BadArgument
from warmfleet.tracing.options import TracingOptions, tracing_options
from warmfleet.tracing.trace_context import Sampler, traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-ab",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has four parts
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
        "\xff" * 55,
    ],
)
def test_without_a_traceparent_a_trace_begins(header: str) -> None:
    context = Sampler(1.0, by_parent=True).context(header.encode("latin-1"), b"a=1")
    assert re.fullmatch("[0-9a-f]{32}", context.trace_id)
    assert context.trace_id != TRACE
    assert context[1:] == ("", True, b"")


@pytest.mark.parametrize("version", ["00", "01", "cc"])
@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("02", False), ("03", True)])
def test_a_callers_decision_counts(version: str, flags: str, sampled: bool) -> None:
    header = f"{version}-{TRACE}-{SPAN}-{flags}".encode()
    for share in (0.0, 1.0):
        assert Sampler(share, by_parent=True).context(header, b"a=1") == (TRACE, SPAN, sampled, b"a=1")
    assert Sampler(1.0, by_parent=False).context(header).sampled
    assert not Sampler(0.0, by_parent=False).context(header).sampled


def test_a_later_version_may_have_more_parts() -> None:
    assert Sampler(0.0, by_parent=True).context(f"01-{TRACE}-{SPAN}-01-what".encode()).trace_id == TRACE


def test_the_share_decides_by_the_trace_id() -> None:
    """As ``TraceIdRatioBased`` of OpenTelemetry does it, so that all processes of one trace keep it or none does."""
    sampler = Sampler(0.25, by_parent=False)
    for id_, kept in ("3fffffffffffffff", True), ("4000000000000000", False), ("0000000000000001", True):
        assert sampler.context(f"00-{TRACE[:16]}{id_}-{SPAN}-00".encode()).sampled is kept
    found = sum(Sampler(0.1, by_parent=True).context(b"").sampled for _ in range(5_000))
    assert 350 < found < 650


def test_a_traceparent_is_read_back() -> None:
    for sampled in (True, False):
        made = traceparent(TRACE, SPAN, sampled=sampled)
        assert Sampler(0.5, by_parent=True).context(made) == (TRACE, SPAN, sampled, b"")


@pytest.mark.parametrize(
    "off",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318"},
        ON | {"OTEL_SDK_DISABLED": "true"},
        ON | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_it_is_off(off: dict[str, str]) -> None:
    assert tracing_options(off) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (ON, "http://collector:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp/"}, "https://c/otlp/v1/traces"),
        (ON | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other/spans"}, "http://other/spans"),
    ],
)
def test_where_spans_go(variables: dict[str, str], expected: str) -> None:
    options = tracing_options(variables)
    assert options is not None
    assert options.endpoint == expected


def test_all_variables() -> None:
    options = tracing_options(
        ON
        | {
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret%20one%0A,x=1",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x=2",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
            "OTEL_SERVICE_NAME": "router",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=lost,deployment.environment.name=a%2Cb",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        }
    )
    assert options == TracingOptions(
        endpoint="http://collector:4318/v1/traces",
        headers={"api-key": "secret one", "x": "2"},
        timeout_s=2.5,
        gzip=True,
        certificate="/ca.pem",
        share=0.01,
        resource={"service.name": "router", "deployment.environment.name": "a,b"},
    )
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:99999"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@collector"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector/?key=secret"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector/v1/traces?key=secret"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector/#secret"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector/secret\n/x"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=secret%0d%0ax"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "key=secret%C3%A9"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=secret%00"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "the%20secret=x"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "=secret"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        *(("OTEL_TRACES_SAMPLER_ARG", share) for share in ("1.5", "-1", "nan", "all")),
    ],
)
def test_a_wrong_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(BadArgument, match=variable) as error:
        tracing_options(ON | {"OTEL_TRACES_SAMPLER": "traceidratio", variable: value})
    assert "secret" not in str(error.value)
