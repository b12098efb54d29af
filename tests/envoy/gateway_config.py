"""Envoy's configuration: a listener for each way in which gateways send bodies to a picker.

This module and ``run``, which users call, need no package beyond the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ENDPOINT, SUBSET = "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset"
TYPE = "type.googleapis.com/envoy"
RETRIES = {"num_retries": 3, "retry_on": "connect-failure,refused-stream,reset,unavailable"}
#: A picker that refused so many calls on end gets none for a while. Fewer than RETRIES, which may all go to it.
EJECTION = {"consecutive_5xx": 2, "interval": "1s", "base_ejection_time": "5s"}
#: A replica that starts listens before it is ready: calls would wait there.
HEALTH = {
    "timeout": "1s",
    "interval": "0.5s",
    "no_traffic_interval": "0.5s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
}
ATTRIBUTES = ["upstream.address", "response.flags", "response.code_details", "upstream.request_attempt_count"]


@dataclass(frozen=True)
class Mode:
    """How a listener sends bodies to the picker. cluster: how the endpoint is found. told: the attributes are sent.

    retries: of a call to the picker. timeout: Envoy's wait for an answer to a message. more_time: the longest time for
    which a picker may ask.
    """

    name: str
    request: str = "FULL_DUPLEX_STREAMED"
    response: str = "FULL_DUPLEX_STREAMED"
    trailers: str = "SEND"
    cluster: str = "original_dst"
    told: bool = False
    retries: bool = True
    timeout: str = "10s"
    more_time: str = "60s"
    response_headers: str = "SEND"

    @property
    def sees_end(self) -> bool:
        """Whether the pieces of the answer pass the picker."""
        return self.response in ("FULL_DUPLEX_STREAMED", "STREAMED")

    @property
    def duplex(self) -> bool:
        return self.request == "FULL_DUPLEX_STREAMED"


MODES = (
    Mode("duplex"),
    Mode("override_host", cluster="override", told=True),
    Mode("duplex_none", response="NONE", trailers="SKIP"),
    Mode("duplex_trailers", response="NONE"),
    Mode("buffered", "BUFFERED", "NONE", "SKIP"),
    Mode("buffered_streamed", "BUFFERED", "STREAMED", "SKIP"),
    Mode("buffered_told", "BUFFERED", "NONE", "SKIP", told=True),
    Mode("streamed", "STREAMED", "STREAMED", "SKIP"),
    Mode("none", "NONE", "NONE", "SKIP"),
)
OTHERS = (
    Mode("default_timeout", "BUFFERED", "NONE", "SKIP", timeout="0.2s"),
    Mode("impatient", "BUFFERED", "NONE", "SKIP", timeout="0.2s", more_time=""),
)


def _typed(name: str, kind: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{TYPE}.{kind}", **values}}


def _picker(mode: Mode) -> dict[str, Any]:
    service: dict[str, Any] = {"envoy_grpc": {"cluster_name": "pickers", "authority": "picker"}, "timeout": "10s"}
    if mode.retries:
        service["retry_policy"] = RETRIES
    values: dict[str, Any] = {
        "grpc_service": service,
        "failure_mode_allow": False,
        "message_timeout": mode.timeout,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": mode.response_headers,
            "request_body_mode": mode.request,
            "response_body_mode": mode.response,
            "request_trailer_mode": "SEND" if mode.duplex else "SKIP",
            "response_trailer_mode": mode.trailers,
        },
    }
    if mode.more_time:
        values["max_message_timeout"] = mode.more_time
    if mode.told:
        values["response_attributes"] = ATTRIBUTES
    kind = "extensions.filters.http.ext_proc.v3.ExternalProcessor"
    return _typed("envoy.filters.http.ext_proc", kind, **values)


def _listener(name: str, cluster: str, filters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    retry = {"retry_on": "connect-failure,refused-stream,reset-before-request", "num_retries": 2}
    route = {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s", "retry_policy": retry}}
    rule = {
        "header": "x-subset",
        "on_header_present": {"metadata_namespace": "envoy.lb.subset_hint", "key": SUBSET, "type": "STRING"},
        "remove": True,
    }
    subset = _typed(
        "envoy.filters.http.header_to_metadata",
        "extensions.filters.http.header_to_metadata.v3.Config",
        request_rules=[rule],
    )
    router = _typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router")
    line = "%REQ(X-CASE)% %RESPONSE_CODE% %RESPONSE_CODE_DETAILS% %UPSTREAM_HOST% %UPSTREAM_REQUEST_ATTEMPT_COUNT%\n"
    log = _typed(
        "envoy.access_loggers.file",
        "extensions.access_loggers.file.v3.FileAccessLog",
        path="/dev/stdout",
        log_format={"text_format_source": {"inline_string": line}},
    )
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        access_log=[log],
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[subset, *filters, router],
    )
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    return {"name": name, "address": address, "filter_chains": [{"filters": [manager]}]}


def _members(cluster: str, places: Sequence[str]) -> dict[str, Any]:
    made = []
    for place in places:
        host, port = place.rsplit(":", 1)
        made.append({"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}})
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": made}]}


def _protocol(idle_s: float = 0.0, **http: Any) -> dict[str, Any]:
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    options: dict[str, Any] = {"@type": f"{TYPE}.{kind}", "explicit_http_config": http}
    if idle_s:
        options["common_http_protocol_options"] = {"idle_timeout": f"{idle_s}s"}
    return {f"envoy.{kind}": options}


def _clusters(pickers: Sequence[str], engines: Sequence[str], *, tls: bool, ejects: bool) -> list[dict[str, Any]]:
    # An engine ends a connection on which no request comes for 5 s, and that may cross with the next request.
    to_engines = _protocol(idle_s=4, http_protocol_options={})
    least = _typed(
        "envoy.load_balancing_policies.least_request",
        "extensions.load_balancing_policies.least_request.v3.LeastRequest",
    )
    override = _typed(
        "envoy.load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {"key": "envoy.lb", "path": [{"key": ENDPOINT}]}}],
        fallback_policy={"policies": [{"typed_extension_config": least}]},
    )
    picker: dict[str, Any] = {
        "name": "pickers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": _protocol(http2_protocol_options={}),
        "load_assignment": _members("pickers", pickers),
    }
    if ejects:
        # Envoy's default of 3 counts a retry until its call ends, so that under load most calls would not be retried.
        picker |= {"outlier_detection": EJECTION, "circuit_breakers": {"thresholds": [{"max_retries": 1_024}]}}
        picker["health_checks"] = [HEALTH]
    if tls:
        kind = f"{TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        context = {"@type": kind, "common_tls_context": {"validation_context": {}}}
        picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    return [
        picker,
        {
            "name": "original_dst",
            "type": "ORIGINAL_DST",
            "connect_timeout": "1s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": ENDPOINT},
            "typed_extension_protocol_options": to_engines,
        },
        {
            "name": "override",
            "type": "STATIC",
            "typed_extension_protocol_options": to_engines,
            "connect_timeout": "1s",
            "load_balancing_policy": {"policies": [{"typed_extension_config": override}]},
            "load_assignment": _members("override", engines),
        },
        {
            "name": "first",
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": _members("first", engines[:1]),
        },
    ]


def config(
    pickers: Sequence[str], engines: Sequence[str], modes: Sequence[Mode], *, tls: bool = False, ejects: bool = False
) -> dict[str, Any]:
    """Return Envoy's configuration; the listener `plain` asks no picker and goes to the first engine.

    ejects: pickers that refuse calls get none for a while.
    """
    listeners = [_listener(mode.name, mode.cluster, [_picker(mode)]) for mode in modes]
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {
            "listeners": [*listeners, _listener("plain", "first", [])],
            "clusters": _clusters(pickers, engines, tls=tls, ejects=ejects),
        },
    }


def binary() -> str | None:
    """Return the path of the Envoy that ``make envoy`` installs, or None."""
    found = Path(__file__).parents[2].glob(".venv-envoy/lib/python3*/site-packages/envoy/_bin/envoy")
    return next((str(path) for path in found), None)
