"""``warmfleet up``: a fleet on this machine that serves until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.running_stack import RunningStack, announced
from warmfleet.cli.local.stack import Plan, Stack
from warmfleet.cli.local.watch import AnswerWatch
from warmfleet.cli.terminal.progress import Progress
from warmfleet.protocol.pools import served_model
from warmfleet.settings import engine_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

POLL_SECONDS = 0.5  # time between two looks for dead processes and first answers

#: A prompt that fills several blocks of any engine, so that a second request with it visibly finds cached blocks.
RULES = (
    "You answer questions about a library. It opens at nine and closes at six, on Saturdays at one. A card costs "
    "nothing and lasts for two years. Ten books may be borrowed at a time, for four weeks each, and renewed twice. A "
    "late book costs ten cents a day, five euros at most. Films are lent for a week. Rooms for groups are booked at "
    "the desk a day before. Children under twelve need a card of their own, which a parent signs."
)

READY = """
Warmfleet is ready: {address}   (Ctrl-C stops everything)

Run this twice. x-warmfleet-matched-tokens says how many tokens of the prompt were in the engine's cache: 0 at first,
and then most of them, because the second request goes to the engine that has computed them.

  ask='{{"model": "{model}", "max_tokens": 32, "messages": [{{"role": "system", "content": "{rules}"}},
    {{"role": "user", "content": "When do you open?"}}]}}'
  curl -sS -D- {address}/v1/chat/completions -H 'Content-Type: application/json' -d "$ask" |
    grep -E '^HTTP|x-warmfleet-(worker|matched|prompt)|"(choices|error)"'

With Python and the openai package{openai_hint}:

  from openai import OpenAI
  client = OpenAI(base_url="{address}/v1", api_key="none")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "What is a KV cache?"}}], max_tokens=32
  )
  print(answer.choices[0].message.content)

See the fleet:  {command} workers
Live:           {live}
Its metrics:    {operators}/metrics   (each replica has a port of its own for operators)
Why there:      echo "$ask" | {command} explain -   (what each engine holds of it and would cost)
"""

WITHOUT_PLUGIN = """\
Your engines run without the plugin: their cached blocks are inferred from the requests sent to them.
After each of the first answers a line says how much of its prompt was matched.
"""

OTHER_MODELS = """\
WARMFLEET_MODELS has no effect on these routers: they serve {models}. Other commands that are called with it in their
environment are about the models that it names. `warmfleet pools add` makes several pools of a model.
"""


def plan_of(options: argparse.Namespace) -> Plan:
    """Turn the command line into a Plan. Raises CommandError if it needs a package that is not installed."""
    if options.tokenizer and find_spec("transformers") is None:
        raise CommandError("--tokenizer needs the package transformers: pip install 'transformers>=5'")
    if options.engine_flags and options.engine != "vllm":
        raise CommandError(f"{options.engine_flags[0]!r} is for vLLM: add --engine vllm")
    prefill, decode = options.prefill or 0, options.decode or 0
    _check_roles(options)
    engines = EngineOptions(
        count=prefill + decode or options.engines or (2 if options.engine == "vllm" else 4),
        prefill=prefill,
        decode=decode,
        kind=options.engine,
        model=options.model or "",
        step_time=options.step_time or "",
        vllm_python=options.vllm_python or "",
        flags=tuple(options.engine_flags),
    )
    name = engines.served_name
    if not options.worker and "#" in name:
        raise CommandError(
            f"--model {options.model}: {name!r} would be a pool of {served_model(name)!r}. Give a name without #; "
            "`warmfleet pools add` makes several pools of it"
        )
    return Plan(
        engines=engines,
        replicas=options.replicas,
        policy=options.policy,
        host=options.host,
        port=options.port,
        redis_url=options.redis,
        workers=tuple(map(engine_url, options.worker)),
        worker_api_key=options.worker_api_key,
        tokenizer=options.tokenizer or "",
        logs=Path(options.logs) if options.logs else None,
    )


def _check_roles(options: argparse.Namespace) -> None:
    """Raise CommandError if no engines can have the wanted roles."""
    if not options.prefill and not options.decode:
        return
    if not (options.prefill and options.decode):
        raise CommandError("--prefill and --decode belong together: neither engine can serve the other's part")
    if options.engines or options.worker:
        raise CommandError("--prefill and --decode say how many engines to start: leave out --engines and --worker")
    if options.engine == "vllm":
        raise CommandError(
            "--prefill and --decode start simulated engines. Real vLLM needs the package nixl: start each engine "
            "with the plugin and its own --kv-transfer-config, and routers with `warmfleet serve` (app/docs/operate.md)"
        )


def run(options: argparse.Namespace) -> int:
    """Start the stack, print how to use it, and serve until Ctrl-C or SIGTERM. Returns 1 if every replica died."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both, because shells start background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    plan = plan_of(options)
    try:
        with Progress() as progress, Stack(plan, progress.say, progress.step) as stack:
            operators = tuple(replica.operators for replica in stack.replicas)
            local = RunningStack(stack.address, stack.redis_url, stack.models, os.getpid(), operators)
            with announced(local):
                say(usage(stack.address, operators, stack.names[0]))
                note_other_models(stack.models)
                if plan.workers:
                    say(WITHOUT_PLUGIN)
                return serve(stack)
    except KeyboardInterrupt:
        say("\nstopped: every process that was started is gone")
        return 0


def note_other_models(served: Sequence[str]) -> None:
    """Print that WARMFLEET_MODELS has no effect here, if it names other models than those ``served``."""
    if os.environ.get("WARMFLEET_MODELS") not in (None, "", ",".join(served)):
        say(OTHER_MODELS.format(models=", ".join(served)))


def serve(stack: Stack) -> int:
    """Report dead processes and, for engines without the plugin, the matched tokens of the first prompts.

    Returns 1 once no replica is alive. No process is restarted, because a user of this command wants to see a death.
    """
    watch = AnswerWatch(stack, say) if stack.plan.workers else None
    while True:
        time.sleep(POLL_SECONDS)
        for child in stack.children.newly_dead():
            say(f"{child.name} died ({child.ending}); it is not restarted. Its last lines:\n{child.tail(5)}")
        alive = sum(replica.child.alive for replica in stack.replicas if replica.child)
        if not alive:
            say("no replica is left")
            return 1
        if watch is not None:
            watch.look()


def usage(address: str, operators: Sequence[str], model: str) -> str:
    """Return the text with the commands to type next. operators: the URL of each replica for its operators."""
    command = sys.argv[0] if Path(sys.argv[0]).name == "warmfleet" else f"{sys.executable} -m warmfleet"
    hint = f" (installed for {sys.executable})" if find_spec("openai") else " (pip install openai)"
    pages = " ".join(f"{url}/status" for url in operators)
    live = f"{pages}   (for a browser{'; each shows its own requests' if len(operators) > 1 else ''})"
    names = {"address": address, "operators": operators[0], "live": live, "model": model}
    return READY.format(**names, command=command, openai_hint=hint, rules=RULES)


def say(line: str) -> None:
    """Print a line of progress at once, also into a pipe."""
    print(line, flush=True)
