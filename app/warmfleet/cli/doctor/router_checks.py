"""Checks of a router replica: it is ready, reaches Redis, and sees the workers that Redis knows."""

from __future__ import annotations

import email.utils
from typing import TYPE_CHECKING, Any

import httpx

from warmfleet.cli.doctor.engine_checks import json_of
from warmfleet.cli.doctor.finding import Finding, fault, note, ok, skipped
from warmfleet.cli.doctor.redis_checks import MAX_SKEW_S
from warmfleet.cli.terminal.output import in_short
from warmfleet.picker.calls import LATER_S
from warmfleet.protocol.pools import served_model
from warmfleet.settings import ADMIN_PORT

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Collection, Mapping, Sequence

    from warmfleet.fleet import ReplicaView
    from warmfleet.settings import Settings

TIMEOUT_S = 10.0
NONE_HELP = "`warmfleet workers` tells the state of each, why, and what to do"
SWITCH = "warmfleet policy NAME --model {}"
ADMIN_HELP = (
    f"name the replica's WARMFLEET_ADMIN_PORT (by default {ADMIN_PORT}) in --router, and put its key into"
    " WARMFLEET_ADMIN_KEY (or a file: WARMFLEET_ADMIN_KEY_FILE)"
)


async def replica(
    url: str,
    workers: Mapping[str, Collection[str]],
    key: str,
    wall: Callable[[], float],
    tls: ssl.SSLContext,
    registered: Collection[str] = (),
) -> list[Finding]:
    """Check the replica at this URL. workers: model tag -> ids of the model's workers in Redis.

    key: WARMFLEET_ADMIN_KEY, or empty. registered: the tags of pools that a registry names.
    """
    base = url.rstrip("/")
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=tls) as client:
        try:
            ready = await client.get(base + "/readyz")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = f"no replica answers ({str(error) or type(error).__name__})"
            return [fault("reachable", text, "start one (warmfleet serve), or correct --router")]
        findings = [_ready(ready), *_clock(ready, wall)]
        try:
            answer = await client.get(base + "/workers", headers={"Authorization": f"Bearer {key}"} if key else {})
        except httpx.HTTPError as error:
            return [*findings, fault("workers", f"/workers gives no answer ({type(error).__name__})", "read its log")]
    if answer.status_code in (401, 403, 404):
        return [*findings, skipped("workers", f"/workers answers {answer.status_code}: {ADMIN_HELP}")]
    reading = json_of(answer.content)
    models = reading.get("models") if isinstance(reading, dict) else None
    if not isinstance(models, list):
        remedy = "is this URL that of a router replica? " + ADMIN_HELP
        return [*findings, fault("workers", f"/workers answers {answer.status_code}, not as a replica does", remedy)]
    routed = {str(model.get("model")): model for model in models if isinstance(model, dict)}
    for tag, names in workers.items():
        of_model = _model(tag, names, routed, registered=tag in registered)
        findings += [finding for finding in of_model if finding not in findings]  # lists a shared fault once
    return findings


def announced(pools: Mapping[str, Sequence[ReplicaView]]) -> list[Finding]:
    """Check the replicas that announce themselves in Redis. pools: tag -> replicas that serve this pool."""
    found: dict[str, ReplicaView] = {}
    for view in (view for views in pools.values() for view in views):
        if view.name not in found or view.age_s < found[view.name].age_s:
            found[view.name] = view
    if not found:
        return []
    heard = [view for view in found.values() if view.heard]
    findings = (
        [ok("replicas", f"{in_short([view.name for view in heard])} of version {_versions(heard)}")] if heard else []
    )
    if len({view.told.version for view in heard}) > 1:
        remedy = "end the upgrade: `warmfleet replicas` names the older ones (app/docs/operate.md, Upgrade)"
        findings = [note("replicas", f"replicas of several versions serve: {_versions(heard)}", remedy)]
    for tag, views in pools.items():
        policies = {view.told.policy for view in views if view.heard}
        if len(policies) > 1:
            text = f"replicas place the requests of {tag} by several policies: {', '.join(sorted(policies))}"
            findings.append(note("replicas", text, f"give all the same WARMFLEET_POLICY, or: {SWITCH.format(tag)}"))
    remedy = "read its log; if it was stopped for good, nothing is to be done: its name goes after ten minutes"
    for view in found.values():
        if not view.heard:
            text = f"{view.name} was last heard {view.age_s:.0f} s ago: killed, hung, or cut off from Redis"
            findings.append(fault("replicas", text, remedy))
    return findings


def picker(settings: Settings) -> list[Finding]:
    """Tell what gateways must allow that ask replicas with these settings where requests go; nothing without a port."""
    if not settings.epp_port:
        return []
    wait_s = settings.queue_timeout_s + LATER_S
    told = f"gateways ask port {settings.epp_port} of each replica, {'by TLS' if settings.tls_cert else 'without TLS'}"
    needs = f"max_message_timeout of at least {wait_s:g} s and a retry_policy of their calls (app/docs/picker.md)"
    without = "" if settings.tls_cert else "; several gateways refuse a picker without TLS: set WARMFLEET_TLS_CERT"
    return [note("picker", told, f"make sure that they grant a {needs}{without}")]


def _versions(views: Sequence[ReplicaView]) -> str:
    return ", ".join(sorted({view.told.version for view in views}))


def _ready(answer: httpx.Response) -> Finding:
    body = json_of(answer.content)
    status = str(body.get("status", "")) if isinstance(body, dict) else ""
    if answer.status_code == httpx.codes.OK:
        return ok("ready", "/readyz answers 200")
    text = f"/readyz answers {answer.status_code}{f': {status}' if status else ''}: balancers send it no requests"
    return fault("ready", text, "mend what it says; its log tells more, and the checks of Redis and the workers above")


def _clock(answer: httpx.Response, wall: Callable[[], float]) -> list[Finding]:
    """Compare the replica's clock, by its header Date in whole seconds, with ours; no finding without this header."""
    try:
        then = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return []
    ahead = then - wall()
    if abs(ahead) <= MAX_SKEW_S + 1:
        return [ok("clock", "its clock and this machine's differ by less than 3 s")]
    text = f"its clock differs from this machine's by {abs(ahead):.0f} s"
    return [fault("clock", text, "let chrony or systemd-timesyncd set the clocks of both machines")]


def _unrouted(tag: str, routed: Mapping[str, Any], *, registered: bool) -> str:
    name = served_model(tag)
    if not registered:
        return f"add {tag} to its WARMFLEET_MODELS"
    if name not in map(served_model, routed):
        return f"add {name} to its WARMFLEET_MODELS: the registry of pools names the others"
    return (
        f"it does not follow the registry of {name}'s pools: see lines with `pools` in its log, and whether its version"
        " is an older one; its way to the master that has the registry may be cut"
    )


def _model(tag: str, names: Collection[str], routed: Mapping[str, Any], *, registered: bool) -> list[Finding]:
    model = routed.get(tag)
    if model is None:
        text = f"it does not route {tag}; its models are {', '.join(routed) or 'none'}"
        return [fault("models", text, _unrouted(tag, routed, registered=registered))]
    if not model.get("fresh", True):
        text = f"it cannot reach Redis: of {tag} it knows what it read last"
        return [fault("redis", text, "check from its host: warmfleet doctor with its WARMFLEET_REDIS_URL")]
    listed = {str(row.get("worker_id")): row for row in model.get("workers") or () if isinstance(row, dict)}
    if set(names) != set(listed):
        text = f"it sees other workers of {tag} than this Redis has: {_differ(set(names), set(listed))}"
        return [fault("workers", text, "give it the WARMFLEET_REDIS_URL that was checked here, with the same database")]
    beside = [row for row in routed.values() if row.get("served_model") == served_model(tag)]
    if not listed and any(row.get("workers") for row in beside):
        return []  # an empty pool beside others: the check of the pool's workers reports it
    routable = sum(bool(row.get("routable")) for row in listed.values())
    text = f"it sees the {len(listed)} workers of {tag} that Redis has, {routable} of them routable"
    finding = ok("workers", text) if routable else fault("workers", f"it has no routable worker of {tag}", NONE_HELP)
    return [finding, *_settings(tag, served_model(tag) if registered else tag, model)]


def _settings(tag: str, named: str, model: Mapping[str, Any]) -> list[Finding]:
    """Note settings by which the replica works more than needed. named: the model or pool that remedies name."""
    findings = []
    if model.get("template") == "sandbox":
        text = f"the chat template of {named} is not approved: it is rendered in a process of its own, at a few times"
        remedy = f"read it, then approve it: warmfleet artifacts --model {named}; warmfleet artifacts approve SHA256"
        findings.append(note("template", f"{text} the cost", remedy))
    if model.get("identity") in ("none", "text") and model.get("workers"):
        by_text = model["identity"] == "text"
        text = f"it has no tokenizer of {tag}: prompts are placed {'by their text' if by_text else 'by load'}"
        remedy = (
            "set WARMFLEET_TOKENIZER (`warmfleet up --tokenizer`), as engines known by their URL bring none"
            if by_text
            else "see its log, and the checks of identity above"
        )
        findings.append(note("identity", text, remedy))
    if str(model.get("tokenizer", "")).startswith("slow"):
        text = f"the tokenizer of {tag} is {model['tokenizer']}: 30 to 90 times slower than others"
        findings.append(note("tokenizer", text, "see app/docs/identity.md, The cost of a conversation's turn"))
    policy = str(model.get("policy", ""))
    if policy and policy != "cost":
        text = f"{tag} is placed by {policy} ({model.get('policy_by')}), not by cost"
        remedy = f"if that is not meant: warmfleet policy default --model {tag}, and WARMFLEET_POLICY=cost"
        findings.append(note("policy", text, remedy))
    return findings


def _differ(known: set[str], listed: set[str]) -> str:
    parts = []
    if lacking := sorted(known - listed):
        parts.append(f"it lacks {', '.join(lacking[:8])}")
    if more := sorted(listed - known):
        parts.append(f"it also has {', '.join(more[:8])}")
    return "; ".join(parts)
