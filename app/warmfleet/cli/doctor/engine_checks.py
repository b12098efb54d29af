"""Checks of an engine over HTTP: connection, version, models, and whether the engine has joined this fleet."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from warmfleet.cli.doctor.finding import Finding, State, fault, note, ok
from warmfleet.cli.doctor.fleet_checks import JOIN_HELP, shown
from warmfleet.cli.doctor.reach import is_loopback, place_of, reach
from warmfleet.errors import UpstreamError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

    from warmfleet.engines.allowed_addresses import Addresses
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView

GET_S = 5.0
OLDEST, NEWEST = (0, 28), (0, 33)  # versions of vLLM that the plugin is tested with
KEY_HELP = "put the engines' key into WARMFLEET_WORKER_API_KEY (or a file: WARMFLEET_WORKER_API_KEY_FILE)"
_VERSION = re.compile(r"(\d+)\.(\d+)")

REACH_REMEDIES = {
    "name": "correct the host, or the DNS of this machine",
    "connection": "start the engine, let it listen on more than 127.0.0.1 (--host 0.0.0.0), and open its port in"
    " firewalls and network policies",
    "tls": "name the authority of the engines' certificates in WARMFLEET_WORKER_CA; the certificate must name the"
    " host of the URL",
}
LOOPBACK_HELP = "set WARMFLEET_WORKER_URL=http://ITS_HOST:PORT at that engine: 127.0.0.1 means each machine itself"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine by its URL. key: its API key; empty = none is sent. addresses: of its host, if they are known."""

    url: str
    client: EngineClient
    tls: ssl.SSLContext
    key: str = ""
    addresses: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        return place_of(self.url)[0]

    @property
    def port(self) -> int:
        return place_of(self.url)[1]

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}

    async def get(self, path: str, *, key: bool = True) -> tuple[int, Any]:
        """Send a GET; return the answer's status and its JSON (None if it is no JSON). Raises UpstreamError."""
        status, body = await self.client.get(self.url, path, self.headers if key else {}, GET_S)
        return status, json_of(body)


async def reachable(engine: Engine) -> list[Finding]:
    """Check whether this machine can resolve the engine's host, connect, and shake hands by TLS; then check /health."""
    tls = engine.tls if engine.url.startswith("https") else None
    got = await reach(engine.host, engine.port, tls, engine.addresses)
    if got.failed:
        remedy = REACH_REMEDIES[got.failed]
        if is_loopback(engine.host) and got.failed == "connection":
            remedy = "start the engine on this machine, or correct the URL: 127.0.0.1 means each machine itself"
        step = {"name": "the name cannot be resolved", "connection": "no connection", "tls": "TLS fails"}[got.failed]
        return [fault("reachable", f"{shown(engine.url)}: {step} ({got.why})", remedy)]
    found = [ok("reachable", f"connection in {1000 * got.seconds:.1f} ms")]
    try:
        status, _ = await engine.get("/health")
    except UpstreamError as error:
        remedy = "read the engine's log: it hangs or speaks TLS"
        return [*found, fault("health", f"/health gives no answer ({error})", remedy)]
    if status == 200:
        return [*found, ok("health", "/health answers 200")]
    dead = "read the engine's log: its core may be dead; restart it"
    remedy = dead if status >= 500 else "is this URL that of an engine?"
    return [*found, fault("health", f"/health answers {status}", remedy)]


def allowed(url: str, addresses: Addresses, resolved: Sequence[str]) -> list[Finding]:
    """Check that routers with these settings would send requests to this URL. resolved: the addresses of its host."""
    try:
        addresses.check(url)
        addresses.allowed_of(place_of(url)[0], resolved)
    except (UpstreamError, OSError, ValueError) as error:
        remedy = "add the engines' addresses to WARMFLEET_WORKER_ADDRESSES of every router"
        return [fault("allowed", f"routers with this environment send nothing there: {error}", remedy)]
    return []


async def version(engine: Engine) -> Finding:
    """Check the version of vLLM against those that the plugin is tested with."""
    _, answer = await engine.get("/version")
    text = str(answer.get("version", "")) if isinstance(answer, dict) else ""
    numbers = _VERSION.match(text)
    if text.endswith("-sim"):
        return ok("version", f"{text}, the simulator")
    if numbers is None:
        remedy = "an engine other than vLLM is routed to once WARMFLEET_STATIC_WORKERS of the routers lists it"
        return note("version", "it does not tell a version of vLLM at /version", remedy)
    found = int(numbers[1]), int(numbers[2])
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if found < OLDEST:
        return fault("version", f"vLLM {text} is older than the plugin can follow ({span})", "upgrade vLLM")
    if found > NEWEST:
        remedy = "look for `warmfleet:` in its log: the plugin says there what it does not know"
        return note("version", f"vLLM {text} is newer than what the plugin was tested with ({span})", remedy)
    return ok("version", f"vLLM {text}")


@dataclass(frozen=True, slots=True)
class Served:
    """The names that an engine serves, if it told them. with_key: the engine requires a key, and accepted ours."""

    findings: list[Finding]
    names: tuple[str, ...] = ()
    with_key: bool = False


async def served(engine: Engine, wanted: Mapping[str, Sequence[str]]) -> Served:
    """Check the engine's key and served names. wanted: model tag -> names that the model's workers announce."""
    status, answer = await engine.get("/v1/models", key=False)
    with_key = status in (401, 403)
    if with_key:
        if not engine.key:
            return Served([fault("key", f"the engine wants an API key ({status}), and none is set here", KEY_HELP)])
        status, answer = await engine.get("/v1/models")
        if status in (401, 403):
            text = f"the engine refuses the key of WARMFLEET_WORKER_API_KEY ({status})"
            return Served([fault("key", text, KEY_HELP)])
    words = "a key, and takes that of WARMFLEET_WORKER_API_KEY" if with_key else "no key"
    key = ok("key", f"the engine wants {words}")
    entries = answer.get("data") if isinstance(answer, dict) else None
    names = tuple(str(entry.get("id")) for entry in entries or () if isinstance(entry, dict))
    if not names:
        remedy = "is this URL that of an engine with OpenAI's API? Leave out /v1 and what follows"
        return Served([key, fault("models", "/v1/models names no model", remedy)])
    known = {name for tag, announced in wanted.items() for name in (tag.partition("#")[0], *announced)}
    if wanted and known.isdisjoint(names):
        text = f"it serves {', '.join(names[:8])}, but the fleet is of {', '.join(wanted)}"
        remedy = (
            "name the model by --model here and WARMFLEET_MODELS at routers, or set --served-model-name at the engine"
        )
        return Served([key, fault("models", text, remedy)], names, with_key)
    return Served([key, ok("models", f"it serves {', '.join(names[:8])}")], names, with_key)


def key_reaches(engine: Engine, *, wanted: bool, listed: bool) -> list[Finding]:
    """Check that routers would send this engine, which has the plugin, its API key. wanted: the engine requires a key.
    listed: WARMFLEET_WORKER_ADDRESSES is set."""
    if not wanted or listed:
        return []
    text = (
        "routers give a key to no unproved worker while WARMFLEET_WORKER_ADDRESSES is not set, so no probe can prove it"
    )
    return [fault("key", text, f"set WARMFLEET_WORKER_ADDRESSES={engine.host} or the engines' range at every router")]


def same_engine(url: str, workers: Sequence[WorkerView], addresses: Sequence[str]) -> list[WorkerView]:
    """Find the workers that announce the host and port of this URL, or one of the host's addresses with this port."""
    wanted = place_of(url)
    places = {wanted, *((address, wanted[1]) for address in addresses)}
    return [worker for worker in workers if worker.url and place_of(worker.url) in places]


def joined(engine: Engine, mine: Sequence[WorkerView], others: Sequence[WorkerView], tags: Sequence[str]) -> Finding:
    """Check that the plugin in this engine has joined the fleet in this Redis. mine: workers with the engine's URL."""
    if mine:
        names = ", ".join(worker.worker_id for worker in mine)
        if all(worker.approximate for worker in mine):
            text = f"it is known as {names}, without the plugin: its cache is inferred from the requests sent to it"
            remedy = "install the plugin (pip install ./worker_plugin) for exact knowledge of its cache"
            return note("plugin", text, remedy)
        return ok("plugin", f"it has joined as {names}")
    near = [worker for worker in others if worker.url and place_of(worker.url)[1] == engine.port]
    loop = [worker for worker in near if is_loopback(place_of(worker.url)[0])]
    if loop and not is_loopback(engine.host):
        text = f"no worker announces {shown(engine.url)}, but {loop[0].worker_id} announces {shown(loop[0].url)}"
        return fault("plugin", text, LOOPBACK_HELP)
    elsewhere = f"; {near[0].worker_id} announces {shown(near[0].url)}" if near else ""
    return fault(
        "plugin",
        f"no worker of {', '.join(tags) or 'this fleet'} announces this URL{elsewhere}: the engine runs without the"
        " plugin, has joined another Redis or model, or has lost its name to another process",
        f"pip install ./worker_plugin beside vLLM, set WARMFLEET_REDIS_URL there; {JOIN_HELP}; if VLLM_PLUGINS is"
        " set, add `warmfleet`; where the engine announces another address, set WARMFLEET_WORKER_URL",
    )


async def listed(engine: Engine, worker: WorkerView | None, wanted: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Check that an engine of WARMFLEET_STATIC_WORKERS is a worker that takes requests; otherwise a fault says why not.

    wanted: model tag -> names that the model's workers announce. Raises UpstreamError.
    """
    url = shown(engine.url)
    if worker is not None and worker.routable:
        return [ok("listed", f"{url} is the worker {worker.worker_id} ({worker.state})")]
    found = await reachable(engine)
    if all(finding.state is State.OK for finding in found):
        found = (await served(engine, wanted)).findings
    if faults := [finding for finding in found if finding.state is not State.OK]:
        return [
            replace(finding, check="listed", detail=f"{url}: {finding.detail.removeprefix(f'{url}: ')}")
            for finding in faults
        ]
    if worker is not None:
        return [ok("listed", f"{url} answers, and is the worker {worker.worker_id} ({worker.state})")]
    remedy = "give every router this list, and see the routers' log; a new engine is registered in 5 s"
    return [fault("listed", f"{url} answers, but no router has registered it", remedy)]


def json_of(body: bytes) -> Any:
    """Return the JSON value of an answer's body; None if the body is no JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None
