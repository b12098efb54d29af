"""The command line of ``warmfleet``: every subcommand and option, with units, defaults and examples."""

from __future__ import annotations

import argparse
import os
from functools import partial

from warmfleet.cli.local import running_stack
from warmfleet.cli.terminal import completion
from warmfleet.cli.terminal.completion import completed
from warmfleet.settings import ADMIN_PORT, LOG_FORMATS, LOG_LEVELS, POLICIES
from warmfleet.version import version

MAX_DAYS = 36_500
MAX_WATCH_S = 86_400
MAX_LIMIT = 4_294_967_295  # highest limit of a client's key, as in ``warmfleet.fleet``

DEFAULT_URL = f"http://127.0.0.1:{ADMIN_PORT}"
DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
AS_IT_CAME = "print the replica's answer as it came"

MAIN = """\
Warmfleet sends each request to the vLLM engine whose KV cache already holds its prefix.

  warmfleet up                        start a whole fleet on this machine, with simulated engines
  warmfleet up --worker URL           route to vLLM engines that you already run
  warmfleet serve                     run one router replica, configured by the environment
  warmfleet demo                      show the gain of prefix-aware routing, then exit
  warmfleet workers                   list the engines of a running fleet
  warmfleet replicas                  list the router replicas of a running fleet
  warmfleet bridge                    report engines without the plugin, by the KV events that they publish
  warmfleet pools                     list, add, drain and remove the pools of a model
  warmfleet drain WORKER              send an engine no new requests, and let it finish
  warmfleet doctor                    check Redis, engines and routers, and say what to do
  warmfleet explain --message "Hi"    show where a request would go, and why
  warmfleet why REQUEST               tell why a request was slow; without REQUEST list the slowest
  warmfleet replay FILE               make the decisions of a log again, also by other policies
  warmfleet policy NAME               place requests by another policy, on all replicas at once
  warmfleet artifacts                 list chat templates of workers, and approve them
  warmfleet key NAME                  make an API key for a client
  warmfleet acl MODEL                 print Redis users with no more rights than they need

Tables have colour where the package rich is installed (pip install '.[cli]'), unless NO_COLOR is set. The same extra
completes commands, options, models and workers in your shell:  eval "$(register-python-argcomplete warmfleet)"
"""

UP = """\
Starts a store, engines and router replicas behind one address, and serves until Ctrl-C, which stops them all.

examples:
  warmfleet up                                     4 simulated engines, 2 replicas, http://127.0.0.1:8080
  warmfleet up --engines 8 --policy round_robin    the same work without cache-aware routing
  warmfleet up --worker http://gpu1:8000 --worker http://gpu2:8000
                                                   your own vLLM engines, without the plugin: their cached
                                                   blocks are inferred from the requests sent to them
  warmfleet up --prefill 2 --decode 2              prefill and decode on different engines: two compute prompts, two
                                                   write answers; `warmfleet workers` shows roles and pairs
  warmfleet up --engine vllm --engines 2           real vLLM on the CPU with a tiny model (after `make vllm`)
  warmfleet up --engine vllm -- --max-model-len 8192 --block-size 64
                                                   the same with flags for vLLM
  warmfleet up --redis redis://127.0.0.1:6379/0    your store instead of the embedded one
"""

SERVE = """\
Runs a router replica, or several on one port. WARMFLEET_* environment variables configure it (app/docs/settings.md);
the options below win over them.

examples:
  WARMFLEET_REDIS_URL=redis://redis:6379/0 WARMFLEET_MODELS=Qwen/Qwen3-8B warmfleet serve --host 0.0.0.0
  warmfleet serve --workers 4 --env-file /etc/warmfleet.env
                                       four replicas on one port; SIGHUP reads the file again and drops no request
"""

DEMO = """\
Starts a private fleet, walks the four states of a cached prefix (cold start, stickiness under load, eviction,
recovery) and prints pass or FAIL for each. Then it runs the same conversations with prefix-aware and with round-robin
routing, and prints the figures of both. The exit status is 0 if everything passed, else 1.

  warmfleet demo --agents --plot burst.svg        two fleets side by side, without and with the ledger (2 minutes)
"""

WORKERS = """\
Lists the engines that a replica knows: state, load, cache, age of the last heartbeat; and for each that takes no
requests, or fewer than it could, why, and what to do. Exit status 1 if none takes requests.

examples:
  warmfleet workers
  warmfleet workers --watch                       again every second, in place, until Ctrl-C
  warmfleet workers --watch 10 >> workers.log     a table every ten seconds
  warmfleet workers --wide                        with URLs, versions, proofs and the state of each index
  warmfleet workers --url http://router:9090 --json
"""

DRAIN = """\
Takes engines out of rotation: no replica sends them a new request, what runs there finishes, and `warmfleet workers`
shows them as draining with the requests that are left. A drain outlives restarts of the engine and of replicas. It
ends with --undo, or when nothing was heard of the engine for ten minutes. Stock engines can be drained, too.

examples:
  warmfleet drain gpu1.0 --model Qwen/Qwen3-8B           one engine core, by its name in `warmfleet workers`
  warmfleet drain gpu1 --model Qwen/Qwen3-8B --wait      all cores of a server; returns when nothing runs there
  warmfleet drain gpu1 --model Qwen/Qwen3-8B --undo      back into rotation

This talks to Redis, and needs a user that may write there: `admin` or `router` of `warmfleet acl`. A replica that
cannot reach Redis goes by what it read last, at most two seconds before its way to Redis broke.
"""

POOLS = """\
Lists the pools of a model, or changes them while the fleet runs. A model that has more engines than one Redis core can
follow is served by several pools: llama#1, llama#2 ... Routers follow within a second; engines that know only the
model's name are spread over its pools (app/docs/pools.md).

examples:
  warmfleet pools --model llama        state, workers, blocks, requests and Redis master of each pool
  warmfleet pools add llama#1 llama#2  if llama has engines, it stays a pool beside these two
  warmfleet pools add llama --spread   one more, whose tag lies on the Redis master with the fewest pools
  warmfleet pools drain llama --move   its engines move to the other pools, some at a time, and it serves with those
                                       that are left; without --move it gets no new requests, and they go elsewhere
                                       when they are started again
  warmfleet pools drain llama --undo   it serves again
  warmfleet pools remove llama         and delete what Redis holds of it

This talks to Redis, and needs a user that may write there: `admin` of `warmfleet acl`. `router` may do the same, but it
cannot copy a policy and approved templates into a new pool.
"""

DOCTOR = """\
Checks a fleet end to end and prints for each check ok, or what is wrong and what to do. Run it where a router runs,
with a router's environment (WARMFLEET_REDIS_URL, WARMFLEET_MODELS, WARMFLEET_WORKER_API_KEY ...): it then sees what
the router sees. Without any it checks the stack of `warmfleet up`, if one runs here.

examples:
  warmfleet doctor --model Qwen/Qwen3-8B                        Redis, and the workers that have joined
  warmfleet doctor http://gpu1:8000 --model Qwen/Qwen3-8B       that engine, too: versions, plugin, tokenizer, cache
  warmfleet doctor --router http://router:9090                  that replica, too
  warmfleet doctor -q                                           faults only, for a cron job
  warmfleet doctor --json > health.json || echo "see health.json"

The doctor changes nothing, and only reads in Redis. An engine that you name gets two questions for token ids and
one short prompt, twice, with one token of answer each; to see that the second one is cached takes no less. Workers
that you do not name are asked for /health only. Passwords and keys are never printed.

Exit status: 0 no fault (notes are no faults), 1 a fault, 2 wrong usage, or a check that failed by itself.

The rights of the workers' Redis users can be looked at by a user with ACL LIST and ACL DRYRUN only: put the URL of
one, such as `admin` of `warmfleet acl`, into WARMFLEET_ADMIN_REDIS_URL. Without it that check is skipped.
"""

REPLICAS = """\
Lists the router replicas of a fleet as they report themselves in Redis, whichever replica answers: their state, their
load and what they did in the last minute. A replica that was killed is `silent` 8 s later, for ten minutes or until one
is started at its place.

examples:
  warmfleet replicas
  warmfleet replicas --url http://router:9090 --json

Exit status: 0 if all replicas are heard, 1 if a replica is silent.
"""

EXPLAIN = """\
Asks a replica where a request would go and why: matched blocks, load and predicted cost of every engine.
Nothing is booked and no engine is asked.

examples:
  warmfleet explain --message "What is a KV cache?"
  warmfleet explain request.json
  curl ... | warmfleet explain -
"""

WHY = """\
Tells why a request was slow: where its time went, in sentences and figures, and what helps. REQUEST is the id that the
client sent or got (X-Request-Id), the id in the body of an answer, or the one in an engine's log. Without it the
slowest requests of the last hour are listed. Requests that are still under way are listed, too.

examples:
  warmfleet why 3f1c09e2aa41b7d0
  warmfleet why chatcmpl-wf-.xT2y...           as an answer's body or an engine's log has it
  warmfleet why                                the slowest of the last hour
  warmfleet why --failed                       the last that failed, or whose client hung up
  warmfleet why ID --url http://router-1:9090 --url http://router-2:9090

Each replica keeps the records of its own requests, and loses them when it restarts. All that `warmfleet replicas` lists
are asked, as far as they can be reached from here; name others with --url. Exit status 1 if no request is found.
"""

ARTIFACTS = """\
Workers announce their model's tokenizer and chat template. A template is code: until you approve it, routers render
it in a sandbox in a process of its own, with limits on time and memory, at a few times the cost. Read a template, then
approve it by its sha256 or the first 12 or more digits. Routers follow within a second, without a restart.

examples:
  warmfleet artifacts --model Qwen/Qwen3-8B            list the files, their servers, and approvals
  warmfleet artifacts show 3f1c09e2aa41                print the template
  warmfleet artifacts approve 3f1c09e2aa41
  warmfleet artifacts revoke 3f1c09e2aa41              render it in the sandbox again

This talks to Redis, and needs a user that may write there: `admin` of `warmfleet acl`, not `router`. A router's
settings approve, too: WARMFLEET_APPROVED_TEMPLATES=SHA256,... or, for every worker's, `*`.
"""

KEY = """\
Makes an API key. The line for WARMFLEET_CLIENT_KEYS_FILE, with the key's hash, is printed on standard output; the key
itself appears once, on standard error. Replicas read the file again within a second; deleting a line ends its key.

A limit counts what all replicas do for the client's name together, for each model by itself. Beyond it the answer is
429 with Retry-After. Tokens are those of prompts, cached or not, and of answers. To change a limit edit its number in
the file ("concurrency", "tokens_per_minute"); the next request is held to it.

examples:
  warmfleet key team-a >> keys.jsonl
  warmfleet key team-b --models Qwen/Qwen3-8B --days 90 >> keys.jsonl
  warmfleet key batch --concurrency 8 --tokens-per-minute 200000 >> keys.jsonl
"""

POLICY = """\
Shows the policy that places a model's requests, or switches it. Every replica follows within a second, without a
restart. `default` takes the switch back: each replica then follows its own WARMFLEET_POLICY.

examples:
  warmfleet policy --model Qwen/Qwen3-8B
  warmfleet policy least_loaded --model Qwen/Qwen3-8B
  warmfleet policy default --model Qwen/Qwen3-8B

This talks to Redis, and needs a user that may write there: `admin` of `warmfleet acl`, not `router`. lua/README.md
describes each policy and its source.
"""

REPLAY = """\
Makes the decisions of a log (WARMFLEET_DECISION_LOG) again, with the script that made them, and says how many come out
exactly as they were. All must, unless routers of another version wrote the log; else the exit status is 1. --policy
also shows the choices of other policies on the same states.

examples:
  warmfleet replay decisions.jsonl
  warmfleet replay decisions.jsonl --policy sticky --policy chwbl
  warmfleet replay decisions.jsonl --policy all --redis redis://127.0.0.1:6379/0

Any Redis 7 or newer, or Valkey, will do: the script runs by EVAL_RO and touches no key. The choices are made one by one
on the logged states; a fleet that had run under another policy would have had other states.
"""

ACL = """\
Prints the Redis users of a fleet (Redis 7 or newer, Valkey): `router` may run the scripts on the keys of its models;
`worker-ID` may only append to the streams of that worker, read its commands and add its artifacts. The lines hold
digests; the passwords themselves appear once, on standard error. By default a whole aclfile is printed, with an
`admin` for you and without the password-less user `default`.

examples:
  warmfleet acl Qwen/Qwen3-8B --worker gpu1 --worker gpu2 > users.acl
                                       then: redis-server --aclfile users.acl
  warmfleet acl Qwen/Qwen3-8B --worker gpu3 --no-router >> users.acl
                                       one more worker; then ACL LOAD
  warmfleet acl Qwen/Qwen3-8B --commands | redis-cli
                                       into a running server, for as long as it runs
  warmfleet acl model-a model-b#pool --password-file passwords
                                       one router user for two models; your own passwords, lines of `NAME PASSWORD`;
                                       `NAME.old` gives a user a second one while passwords are changed
  warmfleet acl --shared-worker --password-file /run/passwords
                                       as k8s/ does: models from WARMFLEET_MODELS, one user `worker` for all engines,
                                       whose names nobody knows before; a folder with a file for each user

Give a worker's ID to its server: WARMFLEET_WORKER_ID=gpu1
WARMFLEET_REDIS_URL=rediss://worker-gpu1:PASSWORD@redis:6379. In URLs, % : / @ ? # of a password are written as %XX.
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command; ``command`` names the subcommand."""
    parser = argparse.ArgumentParser(
        prog="warmfleet", description=MAIN, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"warmfleet {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _up(_command(commands, "up", "start a local fleet and serve", UP))
    _serve(_command(commands, "serve", "run one router replica", SERVE))
    _demo(_command(commands, "demo", "show and check what routing gains", DEMO))
    workers = _command(commands, "workers", "list the engines of a running fleet", WORKERS)
    _workers(workers)
    replicas = _command(commands, "replicas", "list the router replicas of a running fleet", REPLICAS)
    replicas.add_argument("--json", action="store_true", help=AS_IT_CAME)
    commands.add_parser("bridge", help="report engines without the plugin, by their KV events", add_help=False)
    _pools(_command(commands, "pools", "list, add, drain and remove the pools of a model", POOLS))
    _drain(_command(commands, "drain", "send engines no new requests, and let them finish", DRAIN))
    _doctor(_command(commands, "doctor", "check Redis, engines and routers, and say what to do", DOCTOR))
    explain = _command(commands, "explain", "show where a request would go, and why", EXPLAIN)
    _explain(explain)
    _why(_command(commands, "why", "tell why a request was slow", WHY))
    _artifacts(_command(commands, "artifacts", "list chat templates of workers, and approve them", ARTIFACTS))
    _policy(_command(commands, "policy", "show or switch how requests are placed", POLICY))
    _replay(_command(commands, "replay", "make the decisions of a log again", REPLAY))
    _key(_command(commands, "key", "make an API key for a client", KEY))
    _acl(_command(commands, "acl", "print Redis users with least rights", ACL))
    local = running_stack.found()
    url = local.operators_url if local else DEFAULT_URL
    url_help = f"address of a replica's WARMFLEET_ADMIN_PORT (default: that of `warmfleet up`, else {DEFAULT_URL})"
    for command in (workers, replicas, explain):
        command.add_argument("--url", default=url, help=url_help)
    return parser


def _up(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to serve on (default %(default)s)")
    add("--port", type=_port, default=8080, help="port to serve on, 0 = any (default %(default)s)")
    add("--replicas", type=_count, default=2, help="router processes behind it (default %(default)s)")
    policy = os.environ.get("WARMFLEET_POLICY", "cost")
    add("--policy", choices=POLICIES, default=policy, help="placement policy (WARMFLEET_POLICY, else cost)")
    redis_help = "your store (default: WARMFLEET_REDIS_URL, else an embedded Valkey)"
    add("--redis", metavar="URL", default=os.environ.get("WARMFLEET_REDIS_URL", ""), help=redis_help)
    add("--logs", metavar="DIR", help="folder for the output of every process (default: discarded)")
    add = parser.add_argument_group("engines that are started for you").add_argument
    add("--engines", type=_count, help="number of engines (default 4; 2 with --engine vllm)")
    add("--engine", choices=("sim", "vllm"), default="sim", help="kind (default %(default)s)")
    role_help = "simulated engines that compute prompts for the others; needs --decode"
    add("--prefill", metavar="N", type=_count, help=role_help)
    add("--decode", metavar="N", type=_count, help="simulated engines that take computed prompts and write answers")
    add("--model", help="served model name (sim) or model folder (vllm)")
    add("--step-time", metavar="PRESET", help="speed of simulated engines: preset or scale factor")
    add("--vllm-python", metavar="PATH", help="interpreter that has vLLM (default .venv-vllm/bin/python)")
    flags_help = "flags for vLLM, which win over those of this command"
    add("engine_flags", nargs="*", metavar="-- FLAG ...", help=flags_help)
    add = parser.add_argument_group("engines that you already run").add_argument
    add("--worker", metavar="URL", action="append", default=[], help="base URL of a vLLM server; repeatable")
    key_help = "the engines' API key (default: WARMFLEET_WORKER_API_KEY, which keeps it out of process lists)"
    add("--worker-api-key", metavar="KEY", default=os.environ.get("WARMFLEET_WORKER_API_KEY", ""), help=key_help)
    tokenizer_help = (
        "folder or name of the engines' tokenizer (needs transformers; default: prompts are matched by text)"
    )
    add("--tokenizer", metavar="PATH", help=tokenizer_help)


def _serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", help="address to listen on (WARMFLEET_HOST)")
    add("--port", type=_port, help="port to listen on (WARMFLEET_PORT)")
    add("--policy", choices=POLICIES, help="placement policy (WARMFLEET_POLICY)")
    add("--redis", metavar="URL", help="address of the store (WARMFLEET_REDIS_URL)")
    add("--models", metavar="NAME,...", help="base models to route for (WARMFLEET_MODELS)")
    add("--log-level", choices=LOG_LEVELS, help="least level of log lines (WARMFLEET_LOG_LEVEL)")
    add("--log-format", choices=LOG_FORMATS, help="lines of text, or a JSON object each (WARMFLEET_LOG_FORMAT)")
    access_help = "log a line for each request (WARMFLEET_ACCESS_LOG)"
    add("--access-log", action="store_true", default=None, help=access_help)
    add(
        "--workers",
        metavar="N",
        type=_count,
        help="run N replicas that share the port; SIGHUP replaces one after the other (operators: WARMFLEET_ADMIN_PORT"
        " and the ports behind it, one for each replica)",
    )
    file_help = "lines NAME=value, which win over the environment; read at every start"
    add("--env-file", metavar="FILE", help=file_help)
    add("--place", help=argparse.SUPPRESS)  # given to replicas that --workers starts
    shared_help = "listen on this port too, shared with other replicas on this machine (SO_REUSEPORT)"
    add("--reuse-port", metavar="PORT", type=_port, help=shared_help)


def _workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wide", action="store_true", help="more columns, for a wide terminal")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help=AS_IT_CAME)
    watch_help = "print the table again and again: every second, or so many seconds, until Ctrl-C"
    add("--watch", metavar="SECONDS", type=_seconds, nargs="?", const=1.0, help=watch_help)


def _explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", nargs="?", help="request body as JSON, - for standard input")
    add("--message", help="a chat request with this one user message")
    add("--prompt", help="a completion request with this prompt")
    model = add("--model", help="model name (default: the first that the replica serves)")
    completed(model, completion.models)
    add("--json", action="store_true", help=AS_IT_CAME)


def _why(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("id", nargs="?", metavar="REQUEST", help="id of a request (default: list the slowest)")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--last", dest="order", action="store_const", const="last", help="list the last requests")
    failed_help = "list the last requests that failed, or whose client hung up"
    order.add_argument("--failed", dest="order", action="store_const", const="failed", help=failed_help)
    parser.set_defaults(order="slowest")
    add("--count", type=partial(_count, most=100), default=10, metavar="N", help="so many (default %(default)s)")
    url_help = "address of a replica's WARMFLEET_ADMIN_PORT; repeatable (default: all of this machine)"
    add("--url", metavar="URL", action="append", default=[], help=url_help)
    add("--json", action="store_true", help="print the replicas' answers by their addresses")


def _demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engines", type=_count, default=4, help="simulated engines (default %(default)s)")
    add("--conversations", type=_count, default=16, help="conversations of the comparison (default %(default)s)")
    add("--turns", type=_count, default=4, help="turns of each conversation (default %(default)s)")
    add("--agents", action="store_true", help="show instead what the ledger of sessions does for a burst of agents")
    add("--plot", metavar="FILE", help="with --agents: an .svg file of the median time to first token")


def _artifacts(parser: argparse.ArgumentParser) -> None:
    _action(parser, "list", "show", "approve", "revoke")
    digests_help = "digest of a template, or its first 12 or more hex digits"
    digests = parser.add_argument("sha256", nargs="*", metavar="SHA256", help=digests_help)
    completed(digests, lambda **_: ())
    parser.add_argument("--json", action="store_true", help="print the list as one JSON object, by model")
    _models_and_store(parser)


def _drain(parser: argparse.ArgumentParser) -> None:
    workers_help = "name of an engine core, or of its server for all"
    workers = parser.add_argument("workers", nargs="+", metavar="WORKER", help=workers_help)
    completed(workers, completion.workers)
    parser.add_argument("--undo", action="store_true", help="send them requests again")
    parser.add_argument("--wait", action="store_true", help="return when no request runs there any more")
    _models_and_store(parser)


def _pools(parser: argparse.ArgumentParser) -> None:
    _action(parser, "list", "add", "drain", "remove")
    add = parser.add_argument
    tags = add("tags", nargs="*", metavar="POOL", help="tag of a pool: the model's name, or NAME#POOL")
    completed(tags, lambda **_: ())
    spread_help = "add: choose a tag for the master with the fewest pools, of all models of --model"
    add("--spread", action="store_true", help=spread_help)
    add("--move", action="store_true", help="drain: its engines move to other pools now")
    add("--undo", action="store_true", help="drain: let it serve again")
    add("--force", action="store_true", help="remove: even if it has engines or requests")
    add("--json", action="store_true", help="print the list as one JSON object, by model")
    _models_and_store(parser)


def _policy(parser: argparse.ArgumentParser) -> None:
    name = parser.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(POLICIES)}, or default")
    completed(name, lambda **_: (*POLICIES, "default"))
    parser.add_argument("--json", action="store_true", help="print the policy of each model as one JSON object")
    _models_and_store(parser)


def _replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="lines of a decision log")
    policy = add("--policy", metavar="NAME", action="append", default=[], help="another policy, or all; repeatable")
    completed(policy, lambda **_: (*POLICIES, "all"))
    add("--json", action="store_true", help="print one JSON object: decisions, same, policies")
    _store(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engines", nargs="*", metavar="ENGINE", help="base URL of an engine to examine, with a probe")
    add("--router", metavar="URL", action="append", default=[], help="a replica to check; repeatable")
    _models(parser)
    redis_help = (
        "the routers' Redis (default: WARMFLEET_REDIS_URL, which hides a password, else that of `warmfleet up`)"
    )
    add("--redis", metavar="URL", help=redis_help)
    admin_help = "the same Redis as a user who may look at the rights of others (default: WARMFLEET_ADMIN_REDIS_URL)"
    add("--admin-redis", metavar="URL", help=admin_help)
    add("--env-file", metavar="FILE", help="lines NAME=value, as for `warmfleet serve`")
    add = parser.add_mutually_exclusive_group().add_argument
    add("-q", "--quiet", action="store_true", help="print faults only; nothing if there is none")
    add("--json", action="store_true", help="print one JSON object: status, findings")


def _key(parser: argparse.ArgumentParser) -> None:
    add, limit = parser.add_argument, partial(_count, most=MAX_LIMIT)
    add("name", metavar="NAME", help="the client; keys with one name are one tenant")
    add("--models", metavar="A,B", help="names of models that the key is for (default: all)")
    days_help = "days until the key expires (default: never)"
    add("--days", type=partial(_count, most=MAX_DAYS), metavar="N", help=days_help)
    add("--concurrency", type=limit, metavar="N", help="requests that it may have in flight (default: any number)")
    tokens_help = "tokens that it may use in a minute (default: any number)"
    add("--tokens-per-minute", type=limit, metavar="N", help=tokens_help)


def _acl(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = running_stack.models_of_environment()
    add("models", nargs="*", metavar="MODEL", default=models, help="model tag (WARMFLEET_MODELS)")
    add("--shared-worker", action="store_true", help="print one user `worker` for all workers, whatever their names")
    add("--worker", metavar="ID", action="append", default=[], help="WARMFLEET_WORKER_ID of a worker; repeatable")
    add("--ranks", type=_count, default=1, help="data-parallel ranks of a worker (default %(default)s)")
    add("--no-router", action="store_true", help="print workers only, to add them to existing users")
    add("--sentinel", action="store_true", help="print users `replica` and `sentinel`, too, for Redis itself")
    add("--cluster", action="store_true", help="allow CLUSTER SLOTS, too, which Redis Cluster needs")
    add("--commands", action="store_true", help="print ACL SETUSER commands in place of an aclfile")
    file_help = "file with lines `NAME PASSWORD`, or a folder with a file for each user (default: generated passwords)"
    add("--password-file", metavar="PATH", help=file_help)


def _action(parser: argparse.ArgumentParser, *actions: str) -> None:
    parser.add_argument("action", nargs="?", choices=actions, default="list", help="action (default: list)")


def _models_and_store(parser: argparse.ArgumentParser) -> None:
    _models(parser)
    _store(parser)


def _models(parser: argparse.ArgumentParser) -> None:
    model_help = "model tag; repeatable (default: WARMFLEET_MODELS, else those of `warmfleet up`)"
    model = parser.add_argument("--model", metavar="MODEL", action="append", default=[], help=model_help)
    completed(model, completion.models)


def _store(parser: argparse.ArgumentParser) -> None:
    local = running_stack.found()
    parser.add_argument(
        "--redis",
        metavar="URL",
        default=os.environ.get("WARMFLEET_REDIS_URL") or (local.redis_url if local else DEFAULT_REDIS),
        help="address of the store (default: WARMFLEET_REDIS_URL, which keeps a password out of process lists, else "
        f"that of `warmfleet up`, else {DEFAULT_REDIS})",
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, short: str, text: str
) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=short, description=text, formatter_class=form, allow_abbrev=False
    )
    parser.set_defaults(parser=parser)  # `main` uses its `error` for faults that argparse does not notice
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.1 <= value <= MAX_WATCH_S:
        raise argparse.ArgumentTypeError(f"0.1 to {MAX_WATCH_S} seconds")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _port(text: str) -> int:
    value = _whole(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError("a port is 0 to 65535")
    return value


def _count(text: str, most: int = 64) -> int:
    value = _whole(text)
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"1 to {most}")
    return value
