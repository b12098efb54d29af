"""The messages of Envoy's ext_proc by Google's protobuf, and a gateway that calls a picker by Google's gRPC.

Both are second implementations, independent of those in ``warmfleet.picker``. Numbers and types of the fields are those
of envoy/service/ext_proc/v3/external_processor.proto and the files that it imports.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
SPEC = """
HeaderValue: key=1 string, value=2 string, raw_value=3 bytes
HeaderMap: headers=1 *HeaderValue
HttpHeaders: headers=1 HeaderMap, end_of_stream=3 bool
HttpBody: body=1 bytes, end_of_stream=2 bool, end_of_stream_without_message=3 bool
HttpTrailers: trailers=1 HeaderMap
ProtocolConfiguration: request_body_mode=1 int32, response_body_mode=2 int32
Entry: key=1 string, value=2 .google.protobuf.Struct
Metadata: filter_metadata=1 *Entry
ProcessingRequest: request_headers=2 HttpHeaders, response_headers=3 HttpHeaders, request_body=4 HttpBody, \
response_body=5 HttpBody, request_trailers=6 HttpTrailers, response_trailers=7 HttpTrailers, \
metadata_context=8 Metadata, attributes=9 *Entry, protocol_config=11 ProtocolConfiguration
HeaderValueOption: header=1 HeaderValue, append_action=3 int32
HeaderMutation: set_headers=1 *HeaderValueOption, remove_headers=2 *string
StreamedBodyResponse: body=1 bytes, end_of_stream=2 bool
BodyMutation: body=1 bytes, clear_body=2 bool, streamed_response=3 StreamedBodyResponse
CommonResponse: status=1 int32, header_mutation=2 HeaderMutation, body_mutation=3 BodyMutation, clear_route_cache=5 bool
HeadersResponse: response=1 CommonResponse
BodyResponse: response=1 CommonResponse
TrailersResponse: header_mutation=1 HeaderMutation
HttpStatus: code=1 int32
ImmediateResponse: status=1 HttpStatus, headers=2 HeaderMutation, body=3 bytes, details=5 string
ProcessingResponse: request_headers=1 HeadersResponse, response_headers=2 HeadersResponse, \
request_body=3 BodyResponse, response_body=4 BodyResponse, request_trailers=5 TrailersResponse, \
response_trailers=6 TrailersResponse, immediate_response=7 ImmediateResponse, \
dynamic_metadata=8 .google.protobuf.Struct, override_message_timeout=10 .google.protobuf.Duration
HealthCheckRequest: service=1 string
HealthCheckResponse: status=1 int32
"""


def _made() -> dict[str, Any]:
    kinds = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc_test.proto", package="test", syntax="proto3")
    file.dependency.extend([struct_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name])
    for line in filter(None, SPEC.splitlines()):
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for told in fields.split(", "):
            field, number, kind = told.replace("=", " ").split()
            made = message.field.add(name=field, number=int(number), label=3 if kind.startswith("*") else 1)
            kind = kind.lstrip("*")
            made.type = kinds.get(kind, 11)
            if kind not in kinds:
                made.type_name = kind if kind.startswith(".") else f".test.{kind}"
    pool = descriptor_pool.DescriptorPool()
    for known in (struct_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"test.{name}")) for name in names}


TYPES = _made()


def request(**fields: Any) -> bytes:
    """Return a ProcessingRequest as bytes. metadata, attributes: dicts by namespace."""
    made = TYPES["ProcessingRequest"]()
    for name in ("metadata", "attributes"):
        for key, values in fields.pop(name, {}).items():
            entries = made.metadata_context.filter_metadata if name == "metadata" else made.attributes
            entry = entries.add(key=key)
            entry.value.update(values)
    modes = fields.pop("modes", None)
    if modes is not None:
        made.protocol_config.request_body_mode, made.protocol_config.response_body_mode = modes
        made.protocol_config.SetInParent()
    for name, value in fields.items():
        getattr(made, name).CopyFrom(value)
    return bytes(made.SerializeToString())


def headers(*, ends: bool = False, **fields: str) -> Any:
    """Return HttpHeaders; ``_`` in a name stands for ``-``, and ``__`` in front for a colon."""
    made = TYPES["HttpHeaders"](end_of_stream=ends)
    made.headers.SetInParent()
    for name, value in fields.items():
        spelled = name.replace("__", ":", 1) if name.startswith("__") else name
        made.headers.headers.add(key=spelled.replace("_", "-"), raw_value=value.encode())
    return made


def body(data: bytes = b"", *, ends: bool = False) -> Any:
    return TYPES["HttpBody"](body=data, end_of_stream=ends)


def trailers() -> Any:
    made = TYPES["HttpTrailers"]()
    made.trailers.headers.add(key="x-trailer", raw_value=b"1")
    return made


class Answer:
    """A ProcessingResponse, read by protobuf. ``kind``: the field that answers the gateway's message."""

    def __init__(self, data: bytes) -> None:
        self.message = TYPES["ProcessingResponse"].FromString(data)
        listed = [field.name for field, _ in self.message.ListFields()]
        self.kind = listed[0] if listed else ""

    @property
    def common(self) -> Any:
        return getattr(self.message, self.kind).response

    @property
    def set_headers(self) -> dict[str, bytes]:
        """The headers that the gateway is to set; each replaces what the client sent."""
        mutation = (
            self.message.immediate_response.headers
            if self.kind == "immediate_response"
            else (self.common.header_mutation)
        )
        assert all(option.append_action == 2 for option in mutation.set_headers)
        return {option.header.key: option.header.raw_value for option in mutation.set_headers}

    @property
    def endpoints(self) -> tuple[str, str]:
        """The endpoint in the header and in the metadata."""
        name = "x-gateway-destination-endpoint"
        told = self.set_headers.get(name, b"").decode()
        return told, dict(dict(self.message.dynamic_metadata).get("envoy.lb", {})).get(name, "")

    @property
    def piece(self) -> tuple[bytes, bool]:
        streamed = self.common.body_mutation.streamed_response
        return streamed.body, streamed.end_of_stream


class Gateway:
    """Opens calls as a gateway does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._process = channel.stream_stream(PROCESS)
        self._check = channel.unary_unary(CHECK)

    def call(self) -> GatewayCall:
        return GatewayCall(self._process())

    async def health(self, service: str) -> int:
        """Return 1 for SERVING, 2 for NOT_SERVING. Raises AioRpcError."""
        made = TYPES["HealthCheckRequest"](service=service).SerializeToString()
        return int(TYPES["HealthCheckResponse"].FromString(await self._check(made, timeout=10)).status)


class GatewayCall:
    """One call; each method sends a message, or reads one."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, **fields: Any) -> None:
        """Send a message, unless the picker has ended the call."""
        with suppress(grpc.aio.AioRpcError):
            await self._call.write(request(**fields))

    async def send_raw(self, message: bytes) -> None:
        await self._call.write(message)

    async def read(self) -> Answer:
        """Return the picker's next message, but for its wishes for more time."""
        while True:
            found = await self._call.read()
            assert found is not grpc.aio.EOF, await self._call.debug_error_string()
            if (answer := Answer(found)).kind != "override_message_timeout":
                return answer

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def ended(self) -> Any:
        """Return the call's status once the picker has ended it; fails if a message comes."""
        with suppress(grpc.aio.AioRpcError):
            assert await self._call.read() is grpc.aio.EOF
        return await self._call.code()

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def gateway(port: int, authority: bytes = b"") -> AsyncIterator[Gateway]:
    """Connect to a picker. authority: the certificate by which the picker's is checked; empty: no TLS."""
    address, options = f"127.0.0.1:{port}", [("grpc.max_send_message_length", -1)]
    if authority:
        made = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
    else:
        made = grpc.aio.insecure_channel(address, options)
    async with made as channel:
        yield Gateway(channel)
