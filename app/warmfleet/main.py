"""The composition root: builds every object, passes it to its users, closes it. Only the command line imports this."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from warmfleet.api.access.client_keys import ClientKeys
from warmfleet.api.access.cors import Cors
from warmfleet.api.access.operators import Operators, is_loopback
from warmfleet.api.access_log import AccessLog
from warmfleet.api.application import Application, ServiceApplication
from warmfleet.api.completions import CompletionsProxy, Noting
from warmfleet.api.connections import Connections
from warmfleet.api.error_answers import UnknownPath, error_response, internal_error
from warmfleet.api.gateway_routes import GatewayRoutes
from warmfleet.api.http_connection import HttpConnection
from warmfleet.api.listening.server import Door, Doors, GatewayDoor, Server, Sockets, operators_address
from warmfleet.api.listening.tls import ServerTls
from warmfleet.api.openapi.document import documented
from warmfleet.api.proxies import Proxies
from warmfleet.api.service_routes import Health, ServiceRoutes
from warmfleet.api.status_page import history
from warmfleet.api.status_page.history import History
from warmfleet.api.status_page.routes import StatusPage
from warmfleet.api.why_routes import WhyRoutes
from warmfleet.background import session_gauges, spare_files, upkeep, vouching
from warmfleet.background.clock import Clock
from warmfleet.background.hung_engines import HungEngines
from warmfleet.background.index_health import IndexHealthWatch
from warmfleet.background.outage_checks import OutageChecks
from warmfleet.background.pool_changes import PoolChanges
from warmfleet.background.prober import Prober
from warmfleet.background.redis_memory import MemoryWatch
from warmfleet.background.replica_announcements import ReplicaAnnouncements, ReplicaPlace
from warmfleet.background.spare_files import SpareFiles
from warmfleet.background.stock.checks import StockEngines
from warmfleet.background.stock.engine_list import EngineList
from warmfleet.background.supervisor import stop, supervise
from warmfleet.background.view_reader import ViewReader
from warmfleet.background.vouching import Vouching
from warmfleet.background.waiting_models import Waiting
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.engines.upstream import SWEEP_INTERVAL_S, Upstream
from warmfleet.errors import BadArgument, WarmfleetError
from warmfleet.fleet import (
    ANNOUNCE_S,
    QUEUE_PATIENCE,
    Constants,
    Fleet,
    QueueLimits,
    RedisConnections,
    SessionLimits,
    Timeouts,
)
from warmfleet.fleet.first_contact import first_contact, in_words
from warmfleet.fleet.pool_registry import PoolRegistry
from warmfleet.logs.output import LogOutput
from warmfleet.metrics import Metrics
from warmfleet.picker.calls import LOOK_S, Calls
from warmfleet.picker.client_request import ClientRequests
from warmfleet.picker.connection import Http2Connection
from warmfleet.picker.service import Picker
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.identities import Identities
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.prompt.engine_paths import EnginePaths
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.tokenizer import ONE_THREAD
from warmfleet.protocol.redis_address import RedisAddressError, parse, with_ca
from warmfleet.protocol.wire import WireError, model_tag
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.routing.engine_tokenizer import EngineTokenizer
from warmfleet.routing.gateway import Gateway
from warmfleet.routing.identifier import Identifier
from warmfleet.routing.picking import Picking
from warmfleet.routing.router import Router
from warmfleet.settings import PREFIX, Settings, policies, preferences, unknown_variables
from warmfleet.timing import Timing
from warmfleet.tracing.exporter import tracing_of
from warmfleet.tracing.last_requests import LastRequests
from warmfleet.untrusted.template_approval import Templates
from warmfleet.version import version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from starlette.routing import Route
    from starlette.types import Lifespan

    from warmfleet.tracing.exporter import Tracing

logger = logging.getLogger("warmfleet")

DRAIN_SETTLES_S = 3.0  # longest wait at the stop until requests' outcomes are in Redis; one call takes at most 2 s
TELL_AGAIN_INTERVAL_S = 1.0
ALARM_GAP_S = 0.1  # least time between two early rounds of probes for newly suspected workers, per pool
MEMORY_INTERVAL_S = 1.0
AUDIT_INTERVAL_S = 3_600.0  # time between two audits of a worker's part of the index; digests find most errors in 5 s
AUDIT_LOOK_S = 10.0  # time between two checks whether a worker's audit is due
TOKENIZER_THREADS = 2
#: Number of Python's middle garbage collections before a full collection, which stops the process for 0.3 s with 5,000
#: streams, and finds little because requests and connections leave no cycles (``tests/app/test_garbage.py``).
FULL_COLLECTION_AFTER = 1_000


@dataclass(frozen=True)
class _Replica:
    """The parts of a replica that exist before it runs; ``_running`` makes the others."""

    settings: Settings
    timing: Timing
    metrics: Metrics
    health: Health
    tracing: Tracing | None
    certificates: ServerTls | None
    keys: ClientKeys
    redis: RedisConnections
    pools: Pools
    engines: EngineList
    addresses: Addresses
    upstream: Upstream
    engine_client: EngineClient
    decisions: DecisionLog
    router: Router
    may_ask: Operators
    past: History
    last: LastRequests
    page: StatusPage
    place: ReplicaPlace


def create_app(
    settings: Settings,
    log: LogOutput | None = None,
    place: ReplicaPlace | None = None,
    timing: Timing = Timing(),
) -> Doors:
    """Build all paths of a replica and their handlers; the lifespan of the clients' application runs background tasks.

    log: the output for the access log; its dropped lines are counted. place: by default host and port of the settings.
    Raises BadArgument if the settings name no model, or a file that cannot be used; if they give a policy or a TTFT
    objective to a model that they do not name; or if a variable of OpenTelemetry has a wrong value.
    """
    _check_models(settings)
    replica = _replica_of(settings, timing, place or ReplicaPlace(_name_of(settings.admin_port or settings.port)))
    if log is not None:
        log.on_drop = replica.metrics.log_lines_dropped.inc
    wanted = settings.access_log and settings.log_level in ("debug", "info")
    return _doors(replica, AccessLog(log) if wanted and log is not None else None)


def _replica_of(settings: Settings, timing: Timing, place: ReplicaPlace) -> _Replica:
    """Build the replica. Raises BadArgument."""
    metrics, health = Metrics(settings.models), Health()
    tracing = tracing_of(os.environ, timing, metrics)
    certificates = ServerTls(settings, metrics) if settings.tls_cert else None
    keys = ClientKeys(settings.client_keys_file, metrics)
    redis = _redis(settings)
    pools = Pools([_pool(tag, settings, timing, redis) for tag in settings.models])
    engines = EngineList(settings.static_workers)
    addresses = Addresses(settings.worker_addresses, engines.urls)
    trusted = engine_tls(settings.worker_ca)
    upstream = Upstream(addresses, timing.connect_timeout_s, metrics.retries.labels("same").inc, trusted)
    engine_client = EngineClient(addresses, timing.connect_timeout_s, trusted)
    decisions = DecisionLog(settings.decision_log, metrics)
    tokenizer = EngineTokenizer(engine_client, metrics, timing.tokenize_timeout_s)
    identifier = Identifier(tokenizer, metrics)
    past, may_ask, last = History(pools, metrics), Operators(settings), LastRequests()
    return _Replica(
        settings=settings,
        timing=timing,
        metrics=metrics,
        health=health,
        tracing=tracing,
        certificates=certificates,
        keys=keys,
        redis=redis,
        pools=pools,
        engines=engines,
        addresses=addresses,
        upstream=upstream,
        engine_client=engine_client,
        decisions=decisions,
        router=Router(pools, upstream, identifier, settings, metrics, decisions),
        past=past,
        last=last,
        page=StatusPage(pools, past, last, may_ask, health, timing.snapshot_s),
        may_ask=may_ask,
        place=place,
    )


@asynccontextmanager
async def _running(replica: _Replica, picker: Picker | None) -> AsyncIterator[None]:
    """Open what the replica needs, run its background tasks, and close everything at the end."""
    settings, metrics, keys, certificates = replica.settings, replica.metrics, replica.keys, replica.certificates
    async with AsyncExitStack() as stack:
        stack.push_async_callback(replica.redis.aclose)
        stack.push_async_callback(_close_pools, replica.pools)
        if replica.tracing is not None:
            replica.tracing.open()
            stack.callback(replica.tracing.close)
        replica.decisions.open()
        stack.callback(replica.decisions.close)
        await replica.upstream.open()
        stack.push_async_callback(replica.upstream.close)
        stack.push_async_callback(replica.engine_client.close)
        executor = stack.enter_context(ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer"))
        templates = Templates(metrics, settings.approved_templates)
        stack.push_async_callback(templates.close)
        identities = Identities(executor, Trie(settings.trie_bytes), templates)
        stack.push_async_callback(_drain, replica.router)
        clock = Clock()
        if picker is not None:
            stack.callback(picker.calls.close)
            stack.push_async_callback(stop, [_task("picker", LOOK_S, picker.look, metrics, clock)])
        await stack.enter_async_context(_background(replica, identities, clock))
        stack.push_async_callback(replica.page.close)
        stack.push_async_callback(stop, [_task("history", history.EVERY_S, replica.past.look, metrics, clock)])
        files_interval_s = replica.timing.files_interval_s
        if keys.required:
            followed = _task("client_keys", files_interval_s, keys.follow, metrics, clock)
            stack.push_async_callback(stop, [followed])
        if certificates is not None:
            followed = _task("tls", files_interval_s, certificates.follow, metrics, clock)
            stack.push_async_callback(stop, [followed])
        yield


def _doors(replica: _Replica, access_log: AccessLog | None) -> Doors:
    """Build the ports for clients and for operators, with their paths."""
    settings, metrics, health = replica.settings, replica.metrics, replica.health
    router, keys, certificates = replica.router, replica.keys, replica.certificates
    paths = EnginePaths(settings.passed_paths)
    service = ServiceRoutes(router, keys, settings, metrics, health, replica.may_ask)
    gateway = Gateway(router, settings)
    gateways = GatewayRoutes(gateway, router.tenancy, paths, keys, settings, replica.may_ask, replica.last)
    asked_why = WhyRoutes(replica.last, replica.place.name, replica.may_ask)
    for_operators = [*service.for_operators(), *asked_why.routes(), *gateways.routes(), *replica.page.routes()]
    apart = bool(settings.admin_port)
    inside = documented([*service.for_everybody(), *for_operators], (), settings)
    outside = [*service.for_everybody(), *service.for_clients(), *([] if apart else for_operators)]
    outside = documented(outside, paths.all(), settings)
    noting = Noting(replica.last, replica.tracing, access_log)
    proxies = Proxies(paths, lambda path: CompletionsProxy(path, router, keys, settings, metrics, noting))
    picker = _picker(replica, paths, noting) if settings.epp_port else None
    served = _starlette(outside, (path.path for path in paths.all()), lambda _app: _running(replica, picker))
    public = Application(served, proxies, Cors(settings.cors_origins), access_log)
    clients = Connections(public, health, settings, replica.timing, metrics)
    inner = ServiceApplication(_starlette(inside), access_log)
    operators = Connections(inner, health, settings, replica.timing, metrics)
    metrics.connections.set_function(lambda: clients.open + operators.open)
    metrics.body_bytes.set_function(lambda: clients.body_bytes + operators.body_bytes)
    return Doors(
        public,
        health,
        replica.pools.unready,
        Door(clients, certificates.for_clients if certificates else None),
        Door(operators, certificates.for_operators if certificates else None),
        *_gateway_doors(picker, certificates),
    )


def _picker(replica: _Replica, paths: EnginePaths, noting: Noting) -> Picker:
    """Build the picker, which gateways ask where their requests go."""
    settings, metrics, router, health = replica.settings, replica.metrics, replica.router, replica.health
    requests = ClientRequests(paths, replica.keys, router.tenancy, settings)
    picking = Picking(router, settings, metrics)

    def is_ready() -> bool:
        return not (health.draining or replica.pools.unready())

    return Picker(Calls(picking, requests, settings, metrics, noting), settings, metrics, is_ready)


def _gateway_doors(
    picker: Picker | None, certificates: ServerTls | None
) -> tuple[GatewayDoor, GatewayDoor] | tuple[()]:
    """Build the ports for gateways and for kubelets; none without a picker."""
    if picker is None:
        return ()
    tls = certificates.for_gateways if certificates else None
    calls, checks = (partial(Http2Connection, port) for port in (picker.port, picker.health_port))
    return GatewayDoor(calls, tls), GatewayDoor(checks, None)


def _starlette(
    routes: list[Route], passed_on: Iterable[str] = (), lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """Build an application of these routes. passed_on: other paths of the port, whose requests go to engines."""
    unknown = UnknownPath((*(route.path for route in routes), *passed_on))
    handlers = {WarmfleetError: error_response, HTTPException: unknown.handle, Exception: internal_error}
    starlette = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    starlette.router.redirect_slashes = False  # a redirect would repeat any Host that a client sends
    return starlette


def _check_models(settings: Settings) -> None:
    """Raise BadArgument if the settings name no models, or contradict each other about models."""
    if not settings.models:
        raise BadArgument("WARMFLEET_MODELS is empty: name the models to serve")
    if settings.tokenizer.startswith(("/", ".")) and not Path(settings.tokenizer).exists():
        raise BadArgument(f"WARMFLEET_TOKENIZER={settings.tokenizer!r}: there is no such file or folder")
    if len({*settings.models}) < len(settings.models):
        raise BadArgument("WARMFLEET_MODELS names a pool twice")
    for name, given in ("POLICY", policies(settings.policy)), ("TTFT_OBJECTIVE_S", settings.ttft_objective_s):
        if strangers := given.strangers(settings.models):
            raise BadArgument(f"WARMFLEET_{name} names {strangers[0]!r}, which is not in WARMFLEET_MODELS")


def log_output(settings: Settings, replica: str = "") -> LogOutput:
    """Return this process' log output, which starts when entered by ``with``. replica: its number on a shared port."""
    return LogOutput(settings.log_level, settings.log_format, replica)


async def serve(settings: Settings, sockets: Sockets, log: LogOutput | None = None) -> None:
    """Serve until SIGINT or SIGTERM. log: the output for the access log."""
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_AFTER)
    for name, why in unknown_variables().items():
        logger.warning("%s is set, but %s", name, why)
    made = server(settings, sockets, log)
    _tell_of_the_start(settings, sockets)
    await made.serve()


def _tell_of_the_start(settings: Settings, sockets: Sockets) -> None:
    """Log the version, the addresses and the Redis of this replica, before Redis has answered."""
    redis = in_words(parse(settings.redis_url), settings.redis_url)
    models, process = ", ".join(settings.models), os.getpid()
    text = "warmfleet %s, process %d, routes for %s by policy %s. It needs %s first"
    logger.info(text, version(), process, models, settings.policy, redis)
    scheme = "https" if settings.tls_cert else "http"
    for users, listening in ("clients", sockets.clients), ("operators", sockets.operators):
        for host, port in dict.fromkeys(sock.getsockname()[:2] for sock in listening):
            logger.info("for %s: %s://%s:%d", users, scheme, f"[{host}]" if ":" in host else host, port)
    for sock in sockets.gateways:
        how = "TLS" if settings.tls_cert else "no TLS"
        logger.info("for gateways that ask by ext_proc: port %d, %s", sock.getsockname()[1], how)
    if not settings.client_keys_file:
        logger.info("WARMFLEET_CLIENT_KEYS_FILE is not set: every client that reaches this replica is served")
    if settings.explain_key is None:
        text = (
            "WARMFLEET_ADMIN_KEY is not set: everybody who reaches port %d of %s reads /metrics, with the names of "
            "clients, /workers and the sums of /status; single requests, /explain and the paths for gateways are for "
            "this host alone"
        )
        for host, port in dict.fromkeys(sock.getsockname()[:2] for sock in sockets.operators):
            if not is_loopback(host):
                logger.warning(text, port, host)


def server(settings: Settings, sockets: Sockets, log: LogOutput | None = None, timing: Timing = Timing()) -> Server:
    """Build a server with the settings' limits, not yet running. log: for the access log. Raises BadArgument."""
    doors = create_app(settings, log, _place(settings, sockets) if sockets.clients else None, timing)
    config = uvicorn.Config(
        doors.application,
        loop="uvloop",
        http=HttpConnection,  # required, but unused: ``Server`` makes the connections
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # uvicorn would wrap the application
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
    )
    return Server(config, doors, settings.drain_s, sockets)


def _place(settings: Settings, sockets: Sockets) -> ReplicaPlace:
    """Return the name and URL by which operators and the other commands find this replica."""
    host, port = operators_address(sockets, settings.redis_url)
    scheme = "https" if settings.tls_cert else "http"
    return ReplicaPlace(_name_of(port), f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")


def _name_of(port: int) -> str:
    return f"{socket.gethostname()[:64]}:{port}"


def _redis(settings: Settings) -> RedisConnections:
    try:
        return RedisConnections(with_ca(settings.redis_url, settings.redis_ca))
    except RedisAddressError as error:
        raise BadArgument(str(error)) from error
    except BadArgument as error:
        raise BadArgument(f"{PREFIX}REDIS_URL: {error}") from error


def _pool(tag: str, settings: Settings, timing: Timing, redis: RedisConnections) -> Pool:
    try:
        client = redis.of(model_tag(tag))
    except WireError as error:
        raise BadArgument(f"WARMFLEET_MODELS={tag!r}: {error}") from error
    limits = QueueLimits(settings.engine_wait_s(tag), settings.queue_max, QUEUE_PATIENCE)
    held = SessionLimits(round(1_000 * settings.paused_max_s), round(1_000 * settings.session_wait_max_s))
    constants = Constants(limits=limits, sessions=held)
    fleet = Fleet(client, tag, Timeouts(request_s=settings.decide_timeout_s), constants)
    policy, objective_s = policies(settings.policy).of(tag), settings.ttft_objective_s.of(tag)
    pool = Pool(tag, fleet, DegradedMode(timing.redis_retry_s, tag), policy, objective_s, timing)
    pool.preferences = preferences(settings.prefer)
    return pool


def _announcements(replica: _Replica) -> ReplicaAnnouncements:
    return ReplicaAnnouncements(
        replica.pools,
        replica.place,
        draining=lambda: replica.health.draining,
        waiting=lambda pool: replica.past.now(pool).waiting,
        last_minute=replica.past.last_minute,
    )


def _rounds(
    replica: _Replica,
    identities: Identities,
    reader: ViewReader,
    prober: Prober,
    announcements: ReplicaAnnouncements,
) -> list[tuple[str, float, Callable[[], Awaitable[object]]]]:
    """Return the background work over all pools: for each a name, the seconds between two rounds, and the round."""
    settings, timing, metrics, pools = replica.settings, replica.timing, replica.metrics, replica.pools
    engine_client = replica.engine_client
    hung = HungEngines(pools, engine_client, settings, timing, metrics)
    outage = OutageChecks(pools, engine_client, metrics, timing.health_interval_s)
    return [
        ("view", timing.view_interval_s, partial(_look, reader.round, prober, Waiting(pools))),
        ("approved", timing.view_interval_s, partial(upkeep.follow_approvals, pools, identities.templates)),
        ("policy", timing.view_interval_s, partial(upkeep.follow_policy, pools)),
        ("truth", timing.truth_interval_s, IndexHealthWatch(pools, metrics).look),
        ("sessions", timing.truth_interval_s, partial(session_gauges.look, pools, metrics)),
        ("renew", timing.renew_interval_s, partial(upkeep.renew, pools, metrics)),
        ("counted", timing.renew_interval_s, replica.router.counting.keep),
        ("memory", MEMORY_INTERVAL_S, MemoryWatch(pools, metrics).look),
        ("check", timing.health_interval_s, outage.round),
        ("vouch", vouching.VOUCH_INTERVAL_S, Vouching(pools, engine_client, settings, metrics).round),
        ("verdicts", TELL_AGAIN_INTERVAL_S, partial(upkeep.carry_out, pools, metrics)),
        ("outcomes", TELL_AGAIN_INTERVAL_S, partial(upkeep.tell_again, pools)),
        ("limits", timing.limit_interval_s, hung.end_late),
        ("hung", timing.hung_interval_s, hung.round),
        ("clear", timing.clear_interval_s, partial(upkeep.clear, pools)),
        ("audit", AUDIT_LOOK_S, partial(upkeep.audit, pools, metrics, AUDIT_INTERVAL_S)),
        ("files", spare_files.LOOK_S, SpareFiles(pools).look),
        ("kept", SWEEP_INTERVAL_S, replica.upstream.sweep),
        ("announce", ANNOUNCE_S, announcements.round),
    ]


@asynccontextmanager
async def _background(replica: _Replica, identities: Identities, clock: Clock) -> AsyncIterator[None]:
    settings, timing, metrics, pools = replica.settings, replica.timing, replica.metrics, replica.pools
    client = replica.engine_client
    announcements = _announcements(replica)
    static = StockEngines(pools, client, replica.engines, replica.addresses, settings, timing)
    reader = ViewReader(pools, identities, settings, timing, metrics)
    prober = Prober(pools, client, settings, timing, metrics)
    rounds = _rounds(replica, identities, reader, prober, announcements)

    contact = asyncio.Event()
    numbers = itertools.count()  # of pools, in the order in which their tasks were started

    def of_pool(pool: Pool) -> list[asyncio.Task[None]]:
        share = next(numbers) % upkeep.REST_SHARES / upkeep.REST_SHARES
        until_beat = partial(clock.until, upkeep.REST_STEP_S, share)
        apply = partial(upkeep.apply, pool, metrics, until_beat, timing)  # 0.0 below: ``apply`` waits between steps
        alarm = partial(_alarm, pool, reader, prober)
        of_all = (("apply", 0.0, apply), ("alarm", ALARM_GAP_S, alarm))
        return [_task(name, seconds, call, metrics, clock, contact, pool.tag) for name, seconds, call in of_all]

    registries = [PoolRegistry(replica.redis.of(model_tag(name)), name) for name in pools.served]
    make = partial(_pool, settings=settings, timing=timing, redis=replica.redis)
    changes = PoolChanges(pools, registries, make, of_pool, replica.router.waits_in, metrics, timing.leave_s)
    rounds.append(("pools", timing.pools_interval_s, changes.round))
    if settings.static_workers:
        rounds.append(("health", timing.health_interval_s, partial(_check, static, reader, prober, changes)))
    tasks = [_task(name, seconds, call, metrics, clock, contact) for name, seconds, call in rounds]
    tasks.append(asyncio.create_task(_meet(pools, settings.redis_url, contact)))
    try:
        yield
    finally:
        await stop(tasks)
        for close in (
            announcements.close,
            changes.close,
            prober.close,
            reader.close,
            *(registry.close for registry in registries),
        ):
            await close()


def _task(
    name: str,
    seconds: float,
    work: Callable[[], Awaitable[object]],
    metrics: Metrics,
    clock: Clock,
    after: asyncio.Event | None = None,
    tag: str = "",
) -> asyncio.Task[None]:
    async def supervised() -> None:
        if after is not None:
            await after.wait()
        await supervise(name, seconds, work, metrics, clock, tag)

    return asyncio.create_task(supervised(), name=name)


async def _meet(pools: Pools, url: str, contact: asyncio.Event) -> None:
    """Wait for Redis before any round begins, because otherwise every task would log the same outage."""
    try:
        await first_contact([pool.fleet.redis for pool in pools.all], url)
    finally:
        contact.set()


async def _alarm(pool: Pool, reader: ViewReader, prober: Prober) -> None:
    """Wait until a worker is suspected (an answer was not as expected), then probe it before the next round."""
    await pool.fleet.upkeep.suspected.wait()
    pool.fleet.upkeep.suspected.clear()
    await _look(reader.refresh, prober)


async def _check(static: StockEngines, reader: ViewReader, prober: Prober, changes: PoolChanges) -> None:
    """Check engines without the plugin. A new one takes requests at once, not after the next read of Redis."""
    await changes.known()
    if await static.round():
        await _look(reader.refresh, prober)


async def _look(read: Callable[[], Awaitable[bool | None]], prober: Prober, waiting: Waiting | None = None) -> None:
    """Read the workers from Redis, then start the probes that are due: a worker that has just joined is probed at once.

    read: returns False if nothing was read, because every pool is at rest (has no requests).
    """
    anything: bool | None = True
    try:
        anything = await read()
    finally:  # probe also if one model could not be read, so that the other models' workers need not wait
        if anything is not False:
            if waiting is not None:
                waiting.look()
            await prober.round()


async def _close_pools(pools: Pools) -> None:
    for pool in pools.all:
        await pool.fleet.close()


async def _drain(router: Router) -> None:
    """Wait until Redis has the outcomes of all ended requests, which are written in the background."""
    try:
        async with asyncio.timeout(DRAIN_SETTLES_S):
            await router.drained()
    except TimeoutError:
        logger.warning("some reservations could not be settled; their leases expire by themselves")
