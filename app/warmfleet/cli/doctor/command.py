"""Runs the checks in order: Redis, the workers of each model, the named engines, the named routers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from warmfleet.background.stock.engine_list import EngineList
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.doctor import (
    cluster_checks,
    engine_checks,
    fleet_checks,
    parity_checks,
    pool_checks,
    redis_checks,
    rights_checks,
    router_checks,
    same_engine_checks,
)
from warmfleet.cli.doctor.engine_checks import Engine
from warmfleet.cli.doctor.finding import Finding, Report, State, skipped
from warmfleet.cli.doctor.parity_checks import Subject
from warmfleet.cli.doctor.reach import is_loopback, place_of, resolve
from warmfleet.cli.local import running_stack
from warmfleet.cli.pools.served import slot_ranges
from warmfleet.cli.serve import environment_of
from warmfleet.cli.terminal.progress import Progress
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.errors import FleetUnavailable, WarmfleetError
from warmfleet.fleet import Fleet, Timeouts, WorkerState, connect
from warmfleet.fleet.client import Scripts
from warmfleet.fleet.first_contact import in_words, trouble_with
from warmfleet.fleet.inspection.server import Inspection
from warmfleet.fleet.pool_registry import master_of
from warmfleet.metrics import Metrics
from warmfleet.pools.identities import Identities
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.protocol.pools import served_model
from warmfleet.protocol.redis_address import RedisAddressError, parse, with_ca
from warmfleet.protocol.wire import WireError, model_tag
from warmfleet.settings import Settings, engine_url, secret
from warmfleet.untrusted.template_approval import Templates

if TYPE_CHECKING:
    import argparse
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    import redis.asyncio as aioredis

    from warmfleet.background.stock.known_engines import EngineKey
    from warmfleet.fleet import ReplicaView, WorkerView
    from warmfleet.prompt.prompt_identity import Identity
    from warmfleet.protocol.pools import PoolEntry

CONNECT_S = 3.0
PATIENCE = Timeouts(request_s=5.0, upkeep_s=5.0)
URLS_AT_ONCE = 16
MAX_URLS = 256
TRIE_BYTES = 1_048_576
MIN_SECRET = 8  # least length of a secret that the report replaces by ***; a shorter one may be a usual word
ADMIN_REDIS = "WARMFLEET_ADMIN_REDIS_URL"
ANYWHERE = ("0.0.0.0/0", "::/0")
OF_REDIS = ("server", "clock", "latency", "router rights", "worker rights")  # checks that need answers of Redis


@dataclass(frozen=True)
class Plan:
    """The subjects of the checks. url: of Redis, CA file included. admin_url: with a user who may see users' rights.

    url_from: the option or variable that gave ``url``, for remedies. wall: returns this machine's Unix time.
    """

    settings: Settings
    url: str
    admin_url: str = ""
    engines: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    url_from: str = redis_checks.VARIABLE
    wall: Callable[[], float] = time.time


@dataclass
class Known:
    """The fleet as the checks have seen it so far. workers, fleets: model tag -> the pool's workers; its client.

    listed: the engines of WARMFLEET_STATIC_WORKERS. pools: the pools of all models.
    """

    listed: EngineList
    pools: Sequence[PoolEntry] = ()
    workers: dict[str, list[WorkerView]] = field(default_factory=dict)
    fleets: dict[str, Fleet] = field(default_factory=dict)

    def entry(self, tag: str) -> PoolEntry | None:
        """Return the pool with this tag."""
        return next((entry for entry in self.pools if entry.tag == tag), None)

    @property
    def all_workers(self) -> list[WorkerView]:
        return [worker for workers in self.workers.values() for worker in workers]

    @property
    def names(self) -> dict[str, list[str]]:
        """Return model tag -> served names that the model's workers announce."""
        return {tag: [name for worker in workers for name in worker.models] for tag, workers in self.workers.items()}


def run(options: argparse.Namespace) -> int:
    """Run all checks; return 0: no fault, 1: a fault, 2: a check crashed. Raises CommandError, BadArgument."""
    logging.basicConfig(level=logging.CRITICAL)  # findings, not log lines, report faults
    plan = plan_of(options, environment_of(options))
    quiet = bool(options.json)
    with Progress() as progress:
        report = Report(quiet=quiet, faults_only=options.quiet, busy=progress, secrets=secrets_of(plan))
        asyncio.run(examine(plan, report))
    if quiet:
        print(report.as_json())
    elif not options.quiet or report.status:
        print(f"\n{report.summary()}")
    return report.status


def plan_of(options: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """Read the command line and the environment of a router as a Plan. Raises CommandError, BadArgument."""
    variables, routers, url_from = dict(environment), tuple(options.router), redis_checks.VARIABLE
    if options.redis:
        url_from = "--redis"
        variables.pop("WARMFLEET_REDIS_URL_FILE", None)
        variables["WARMFLEET_REDIS_URL"] = options.redis
    if options.model:
        variables["WARMFLEET_MODELS"] = ",".join(options.model)
    local = running_stack.found(environment)
    if local is not None and not {"WARMFLEET_REDIS_URL", "WARMFLEET_REDIS_URL_FILE"} & variables.keys():
        variables["WARMFLEET_REDIS_URL"], url_from = local.redis_url, redis_checks.OF_UP
    if local is not None and variables.get("WARMFLEET_REDIS_URL") == local.redis_url:
        variables.setdefault("WARMFLEET_MODELS", ",".join(local.models))
        routers = routers or (local.operators_url,)
    settings = Settings.from_environment(variables)
    if not settings.models:
        raise running_stack.no_model(local)
    admin = options.admin_redis or secret(ADMIN_REDIS, variables) or ""
    try:
        url = with_ca(settings.redis_url, settings.redis_ca)
        parse(url)
        if admin:
            admin = with_ca(admin, settings.redis_ca)
            parse(admin)
        for model in settings.models:
            model_tag(model)
    except (RedisAddressError, WireError) as error:
        raise CommandError(str(error)) from error
    return Plan(settings, url, admin, tuple(map(engine_url, options.engines)), routers, url_from)


def secrets_of(plan: Plan) -> tuple[str, ...]:
    """List every password and key of the plan, both as written in a URL (%XX) and decoded, the longest first."""
    found = {plan.settings.worker_api_key, plan.settings.admin_key, plan.settings.tenant_key}
    urls = (plan.url, plan.admin_url, *plan.engines, *plan.routers, *plan.settings.static_workers)
    for password in [parse(plan.url).sentinel_password, *(urlsplit(url).password for url in urls)]:
        found |= {password or "", unquote(password or "")}
    return tuple(sorted((text for text in found if len(text) >= MIN_SECRET), key=len, reverse=True))


async def examine(plan: Plan, report: Report) -> None:
    """Run all checks; every finding goes to the report."""
    named = plan.settings.models
    pools, unread = await pool_checks.pools_of(plan.url, named)
    plan = replace(plan, settings=replace(plan.settings, models=tuple(entry.tag for entry in pools)))
    async with AsyncExitStack() as stack:
        known = Known(EngineList(plan.settings.static_workers, read=False), pools)
        for model in plan.settings.models:
            fleet = Fleet(connect(plan.url, model_tag(model), timeout_s=CONNECT_S), model, PATIENCE)
            stack.push_async_callback(fleet.close)
            known.fleets[model] = fleet
        report.part(in_words(parse(plan.url), plan.url))
        answers = await _redis_answers(plan, known, report)
        if answers:
            report.add(pool_checks.registries(unread, plan.settings.models))
            await _redis(plan, known, report)
        else:
            report.add([skipped(check, "Redis does not answer") for check in OF_REDIS])
            report.add(pool_checks.unknown(unread) if parse(plan.url).kind == "cluster" else [])
        for model in plan.settings.models:
            report.part(f"Workers of {model}")
            if answers and model in known.fleets:
                await _workers(plan, known, model, report)
            else:
                report.add([skipped("workers", "Redis does not answer, where they join")])
        if answers:
            await _pools(plan, known, named, report)
            if any(worker.approximate for worker in known.all_workers):
                await _checked(report, "address", _twice(plan, known))
            if plan.settings.static_workers:
                report.part("Engines of WARMFLEET_STATIC_WORKERS")
                await _checked(report, "listed", _listed(plan, known))
            await _replicas(known, report)
        if plan.settings.epp_port:
            report.part("Pickers for gateways")
            report.add(router_checks.picker(plan.settings))
        for url in plan.engines:
            report.part(f"Engine {fleet_checks.shown(url)}")
            await _engine(plan, known, url, report)
        for url in plan.routers:
            report.part(f"Router {fleet_checks.shown(url)}")
            report.progress("asking the router")
            ids = {tag: [worker.worker_id for worker in workers] for tag, workers in known.workers.items()}
            registered, key = [entry.tag for entry in known.pools if entry.since_ms], plan.settings.admin_key
            work = router_checks.replica(url, ids, key, plan.wall, engine_tls(""), registered)
            await _checked(report, "router", work)


async def _checked(report: Report, check: str, work: Awaitable[Finding | Iterable[Finding]]) -> list[Finding]:
    """Add the findings of a check to the report. A check that raises becomes a finding, and the other checks go on."""
    try:
        got = await work
        found = [got] if isinstance(got, Finding) else list(got)
    except FleetUnavailable as error:
        found = [Finding(check, State.FAULT, str(error), "see the rights of this Redis user, and Redis' log")]
    except WarmfleetError as error:
        found = [Finding(check, State.FAULT, str(error), "read the log of what was asked")]
    except Exception as error:  # noqa: BLE001  a broken check must not hide the others
        found = [Finding(check, State.BROKEN, f"{type(error).__name__}: {error}", "please report this")]
    report.add(found)
    return found


# ---------------------------------------------------------------- Redis


async def _redis_answers(plan: Plan, known: Known, report: Report) -> bool:
    """Check whether Redis answers. In a Cluster, pools whose own master is lost are not checked further."""
    report.progress("connecting to Redis")
    where, fleets = parse(plan.url), list(known.fleets.values())

    async def look(fleet: Fleet) -> list[Finding]:
        return await redis_checks.reachable(fleet.redis, where, plan.url, plan.url_from)

    first = asyncio.create_task(look(fleets[0]))  # measures how long connection and login take
    answers = await asyncio.gather(*[trouble_with(fleet.redis, where) for fleet in fleets])
    troubles = {tag: trouble for tag, trouble in zip(known.fleets, answers, strict=True) if trouble is not None}
    answering = {tag: fleet for tag, fleet in known.fleets.items() if tag not in troubles}
    await asyncio.wait([first])
    work = first if fleets[0] in answering.values() or not answering else look(next(iter(answering.values())))
    found = await _checked(report, "reachable", work)
    if found[-1].state is not State.OK:
        return False
    report.add([redis_checks.lost(tag, trouble, where) for tag, trouble in troubles.items()])
    known.fleets = answering or known.fleets
    return True


async def _redis(plan: Plan, known: Known, report: Report) -> None:
    where = parse(plan.url)
    looks = {model: Inspection(fleet.scripts) for model, fleet in known.fleets.items()}
    for model, fleet in known.fleets.items():
        with suppress(WarmfleetError):  # the check of this model's workers reports the error
            known.workers[model] = await fleet.workers.read()
    capacity = sum(worker.load.capacity_blocks for worker in known.all_workers)

    async def servers() -> list[Finding]:
        """Check the server of each model, because in a Cluster each may have its own."""
        found: list[Finding] = []
        for look in list(looks.values())[: None if where.kind == "cluster" else 1]:
            facts = await look.server()
            found += redis_checks.settings_of(facts, capacity) + await redis_checks.topology(look, where, facts)
        return list(dict.fromkeys(found))

    first = next(iter(looks.values()))
    await _checked(report, "server", servers())
    if where.kind == "cluster":
        of_admin = plan.admin_url and parse(plan.admin_url).kind == "cluster"
        await _checked(report, "coverage", cluster_checks.coverage(plan.admin_url if of_admin else plan.url))
    await _checked(report, "clock", redis_checks.clock(first, plan.wall))
    report.progress("measuring the latency of scripts")
    await _checked(report, "latency", redis_checks.latency(first, plan.settings.decide_timeout_s))
    report.progress("looking at the rights of Redis users")
    await _rights(plan, known, looks, report)


async def _rights(plan: Plan, known: Known, looks: Mapping[str, Inspection], report: Report) -> None:
    cluster = parse(plan.url).kind == "cluster"
    first, look = next(iter(looks.items()))
    reported: set[tuple[str, Finding]] = set()

    async def once(redis: aioredis.Redis, work: Awaitable[list[Finding]]) -> list[Finding]:
        """Return the findings without those that another pool on the same server has reported word for word."""
        found = [finding for finding in await work if (master_of(redis), finding) not in reported]
        reported.update((master_of(redis), finding) for finding in found)
        return found

    async with _administrator(plan, first, look.redis) as admin:
        for model, look in looks.items():
            of_router = once(look.redis, rights_checks.of_router(look, model, cluster=cluster))
            await _checked(report, "router rights", of_router)
            looking = Inspection(Scripts(admin, model, PATIENCE))
            servers = frozenset(str(worker.record.get("server_id")) for worker in known.workers.get(model, []))
            of_workers = once(admin, rights_checks.of_workers(looking, model, servers, cluster=cluster))
            await _checked(report, "worker rights", of_workers)


@asynccontextmanager
async def _administrator(plan: Plan, tag: str, router: aioredis.Redis) -> AsyncIterator[aioredis.Redis]:
    """Return the client for ACL commands: by ``admin_url`` if set, else the router's. tag: of a pool that answers."""
    if not plan.admin_url:
        yield router
        return
    client = connect(plan.admin_url, model_tag(tag), timeout_s=CONNECT_S)
    try:
        yield client
    finally:
        await client.aclose()


# ---------------------------------------------------------------- workers


async def _workers(plan: Plan, known: Known, model: str, report: Report) -> None:
    fleet = known.fleets[model]
    report.progress("reading the workers")

    async def read() -> list[Finding]:
        workers = await fleet.workers.read()
        known.workers[model] = workers
        look = Inspection(fleet.scripts)
        entry = known.entry(model)
        streams = await look.streams()
        alone = streams.servers - {str(worker.record.get("server_id", "")) for worker in workers}
        reading = fleet_checks.PoolReading(
            model,
            workers,
            await fleet.index.truth(workers),
            streams,
            [] if workers else [tag for tag in await look.models() if known.entry(tag) is None],
            drained=entry is not None and entry.draining,
            moved=await _moved(plan, known, model)
            if alone or not all(worker.state.alive for worker in workers)
            else {},
            beside=_beside(known, model),
            configured=served_model(model) if entry is not None and entry.since_ms else model,
            policy=await _policy(plan, fleet),
            handoff=plan.settings.token_handoff,
        )
        return fleet_checks.all_of(reading)

    await _checked(report, "workers", read())
    report.progress("asking the workers' URLs for /health")
    await _checked(report, "url", _urls(plan, known, known.workers.get(model, [])))

    async def read_again() -> list[Finding]:
        return fleet_checks.fights(known.workers.get(model, []), await fleet.workers.read())

    await _checked(report, "names", read_again())


async def _policy(plan: Plan, fleet: Fleet) -> str:
    """Return the policy of the pool's routers, of several ``cost``, which splits requests. No router: the setting."""
    told: set[str] = set()
    with suppress(WarmfleetError):
        told = {view.told.policy for view in await fleet.replicas.read() if view.heard}
    told = told or {plan.settings.policy}
    return "cost" if "cost" in told else min(told)


def _beside(known: Known, model: str) -> list[str]:
    """List other pools of the model that have workers with heartbeats."""
    return [
        tag
        for tag, workers in known.workers.items()
        if tag != model and served_model(tag) == served_model(model) and any(worker.heard for worker in workers)
    ]


async def _moved(plan: Plan, known: Known, model: str) -> dict[str, str]:
    """Find workers heard in another pool, and servers on their way between pools of the model: name -> other pool.

    In another model's pool only engines without the plugin count: they move there when their served name changes.
    """
    found: dict[str, str] = {}
    siblings = [tag for tag in known.fleets if tag != model and served_model(tag) == served_model(model)]
    for tag in known.fleets.keys() - {model}:
        with suppress(WarmfleetError):  # the check of that pool's workers reports the error
            known.workers[tag] = await known.fleets[tag].workers.read()
            heard = [worker for worker in known.workers[tag] if worker.heard]
            found |= {worker.worker_id: tag for worker in heard if worker.approximate or tag in siblings}
    if siblings:
        with suppress(WarmfleetError):
            found |= await pool_checks.on_their_way(plan.url, model, plan.wall())
    return found


async def _pools(plan: Plan, known: Known, named: Sequence[str], report: Report) -> None:
    """Compare the pools of each served model that has several. named: model tags of the settings."""
    tags = {*(entry.tag for entry in known.pools), *(tag for tag in named if "#" in tag)}
    several = [name for name, count in Counter(map(served_model, sorted(tags))).items() if count > 1]
    for name in sorted({served_model(entry.tag) for entry in known.pools if entry.since_ms}):
        strays: list[Finding] = []
        with suppress(WarmfleetError):  # a registry that cannot be read has a finding already
            strays = await pool_checks.strays(plan.url, name, known.pools, named, plan.wall())
        if strays:
            report.part(f"Servers of {name}")
            report.add(strays)
    for name in several:
        report.part(f"Pools of {name}")
        report.add(pool_checks.unregistered([tag for tag in named if served_model(tag) == name], known.pools))
        pools = [entry for entry in known.pools if served_model(entry.tag) == name and entry.tag in known.fleets]
        report.add(pool_checks.beside_each_other(pools, known.workers))
    if several and parse(plan.url).kind == "cluster":

        async def look() -> list[Finding]:
            busy = [tag for tag, workers in known.workers.items() if any(worker.routable for worker in workers)]
            return pool_checks.masters(busy, plan.settings.models, await slot_ranges(plan.url))

        await _checked(report, "masters", look())


async def _replicas(known: Known, report: Report) -> None:
    """Check the routers of the fleet, as they announce themselves in Redis."""
    views: dict[str, list[ReplicaView]] = {}
    for tag, fleet in known.fleets.items():
        with suppress(WarmfleetError):  # the check of this pool's workers reports the error
            views[tag] = await fleet.replicas.read()
    if any(views.values()):
        report.part("Routers of the fleet")
        report.add(router_checks.announced(views))


async def _urls(plan: Plan, known: Known, workers: Sequence[WorkerView]) -> list[Finding]:
    """Check that this machine can reach the URLs of workers. Workers that left, or are silent, are not asked."""
    here = [worker for worker in workers if worker.heard and worker.state is not WorkerState.LEFT]
    urls = dict.fromkeys(worker.url.rstrip("/") for worker in here if worker.url)
    addresses, room = await _addresses(plan, known), asyncio.Semaphore(URLS_AT_ONCE)
    async with _client(addresses, plan) as (client, tls):

        async def check(url: str) -> list[Finding]:
            host, port = place_of(url)
            async with room:
                got = await resolve(host, port)
                if forbidden := engine_checks.allowed(url, addresses, got.addresses):  # before anything is sent there
                    return forbidden
                reached = await engine_checks.reachable(Engine(url, client, tls, addresses=got.addresses))
            there = [worker for worker in workers if worker.url.rstrip("/") == url]
            names = ", ".join(worker.worker_id for worker in there)
            listed = all(worker.approximate for worker in there)
            wrong = [_of_url(found, names, url, listed=listed) for found in reached if found.state is not State.OK]
            return wrong or [_url_ok(plan, names, url)]

        groups = await asyncio.gather(*[check(url) for url in list(urls)[:MAX_URLS]])
    return [finding for group in groups for finding in group]


async def _named(known: Known) -> list[str]:
    """Return the URLs of WARMFLEET_STATIC_WORKERS; routers may use these whatever their addresses."""
    return [engine.url for engine in await known.listed.look()]


async def _addresses(plan: Plan, known: Known) -> Addresses:
    """Return the addresses that the checks may connect to."""
    return Addresses(plan.settings.worker_addresses, (*await _named(known), *plan.engines))


async def _keys(plan: Plan, known: Known, urls: Sequence[str] = ()) -> dict[str, EngineKey]:
    """Ask these URLs and those of all workers for an ``EngineKey``, which is equal for two URLs of one engine."""
    heard = [worker.url for worker in known.all_workers if worker.heard and worker.url]
    async with _client(await _addresses(plan, known), plan) as (client, _):
        return await same_engine_checks.keys_of(client, [*urls, *heard])


async def _twice(plan: Plan, known: Known) -> list[Finding]:
    return same_engine_checks.booked_twice(known.all_workers, await _keys(plan, known))


async def _listed(plan: Plan, known: Known) -> list[Finding]:
    """Check each engine of WARMFLEET_STATIC_WORKERS against the workers; an entry that cannot be read is a fault."""
    urls = (await _named(known))[:MAX_URLS]
    remedy = "mend that entry of WARMFLEET_STATIC_WORKERS; see app/docs/connect.md"
    found = [Finding("listed", State.FAULT, problem, remedy) for problem in known.listed.problems]
    keys, room = await _keys(plan, known, urls), asyncio.Semaphore(URLS_AT_ONCE)
    async with _client(Addresses(ANYWHERE, urls), plan) as (client, tls):

        async def check(url: str) -> list[Finding]:
            if booked := same_engine_checks.worker_of(url, known.all_workers, keys):
                return [booked]
            worker = next(iter(engine_checks.same_engine(url, known.all_workers, ())), None)
            engine = Engine(url, client, tls, plan.settings.worker_api_key)
            async with room:
                return await engine_checks.listed(engine, worker, known.names)

        groups = await asyncio.gather(*map(check, urls))
    return [*found, *(finding for group in groups for finding in group)]


def _of_url(found: Finding, names: str, url: str, *, listed: bool) -> Finding:
    """Turn a finding about a URL into a finding about the URL's workers. listed: the operator lists this engine."""
    shown, remedy = fleet_checks.shown(url), found.remedy
    if not listed and found.check == "reachable" and is_loopback(place_of(url)[0]):
        remedy = f"start the engine on this machine; if it runs on another one: {engine_checks.LOOPBACK_HELP}"
    origin = f"{names} {'is listed as' if listed else 'announces'} {shown}"
    return Finding("url", found.state, f"{origin}: {found.detail.removeprefix(f'{shown}: ')}", remedy)


def _url_ok(plan: Plan, names: str, url: str) -> Finding:
    local = all(is_loopback(host) for host, _ in parse(plan.url).nodes)
    if is_loopback(place_of(url)[0]) and not local:
        text = f"{names} announces {fleet_checks.shown(url)}, which means another machine to routers elsewhere"
        return Finding("url", State.NOTE, text, engine_checks.LOOPBACK_HELP)
    return Finding("url", State.OK, f"{names} at {fleet_checks.shown(url)} answers from here")


# ---------------------------------------------------------------- engines


@asynccontextmanager
async def _client(addresses: Addresses, plan: Plan) -> AsyncIterator[tuple[EngineClient, ssl.SSLContext]]:
    tls = engine_tls(plan.settings.worker_ca)
    client = EngineClient(addresses, CONNECT_S, tls)
    try:
        yield client, tls
    finally:
        await client.close()


async def _engine(plan: Plan, known: Known, url: str, report: Report) -> None:
    async with _client(Addresses(ANYWHERE, (url,)), plan) as (client, tls):
        engine = Engine(url, client, tls, plan.settings.worker_api_key)
        report.progress(f"connecting to {fleet_checks.shown(url)}")
        found = await _checked(report, "reachable", engine_checks.reachable(engine))
        if found[-1].state is not State.OK:
            report.add([skipped("engine", "nothing more can be asked of it")])
            return
        got = await resolve(engine.host, engine.port)
        addresses = Addresses(plan.settings.worker_addresses, await _named(known))
        report.add(engine_checks.allowed(url, addresses, got.addresses))
        await _checked(report, "version", engine_checks.version(engine))
        tag, mine = _mine(known, url, got.addresses)
        served = engine_checks.Served([])

        async def models() -> list[Finding]:
            nonlocal served
            served = await engine_checks.served(engine, known.names)
            by_plugin = served.with_key and any(not worker.approximate for worker in mine)
            listed = plan.settings.lists_workers
            return [*served.findings, *engine_checks.key_reaches(engine, wanted=by_plugin, listed=listed)]

        await _checked(report, "models", models())
        if known.workers:
            report.add([engine_checks.joined(engine, mine, known.all_workers, list(known.workers))])
        if served.names:
            worker = next((worker for worker in mine if worker.server is not None), mine[0] if mine else None)
            subject = Subject(engine, served.names[0], known.fleets.get(tag), worker, _rank(worker, mine))
            await _probe(plan, subject, report)


def _rank(worker: WorkerView | None, mine: Sequence[WorkerView]) -> str:
    """Return the data-parallel rank for a request's header; empty for a server with one core, which refuses it."""
    if worker is None or sum(core.record.get("server_id") == worker.record.get("server_id") for core in mine) < 2:
        return ""
    return str(worker.record.get("rank", 0))


def _mine(known: Known, url: str, addresses: Sequence[str]) -> tuple[str, list[WorkerView]]:
    """Find the model tag and the workers that announce this engine's URL."""
    found = [(tag, engine_checks.same_engine(url, workers, addresses)) for tag, workers in known.workers.items()]
    mine = [(tag, workers) for tag, workers in found if workers]
    heard = [(tag, workers) for tag, workers in mine if any(worker.heard for worker in workers)]
    return next(iter([*heard, *mine]), ("", []))  # heard first: a pool that the engine left lists it for 10 minutes


async def _probe(plan: Plan, subject: Subject, report: Report) -> None:
    settings = plan.settings
    with ThreadPoolExecutor(1) as executor:
        templates = Templates(Metrics(), settings.approved_templates)
        identities = Identities(executor, Trie(TRIE_BYTES), templates)
        try:
            report.progress("loading the announced tokenizer (large ones take seconds)")
            identity: Identity | None = None
            got = await parity_checks.identity_of(subject, identities)
            if isinstance(got, Finding):
                report.add([got])
            else:
                identity = got
                report.progress("comparing token ids")
                await _checked(report, "token ids", parity_checks.token_ids(subject, identity))
            report.progress("sending the engine one short prompt, twice")
            await _checked(report, "completion", parity_checks.probed(subject, identity))
            report.add(parity_checks.handoff(subject, wanted=settings.token_handoff))
        finally:
            await templates.close()
