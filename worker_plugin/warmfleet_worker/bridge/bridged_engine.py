"""Reports an engine behind the bridge: the engine joins when it is healthy, leaves when it is gone, and joins anew."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from warmfleet_worker.bridge.block_table import scheme_of
from warmfleet_worker.bridge.engine_api import EngineApi, EngineDown, EventSource, Reading, at_rank
from warmfleet_worker.bridge.group_ends import rules_of
from warmfleet_worker.bridge.rank import EngineSide, Rank
from warmfleet_worker.bridge.tokenizer_files import NONE, TokenizerError
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.load import Load
from warmfleet_worker.pool_assignment import server_assignment
from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.labels import read_labels
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import zmq

    from warmfleet_worker.bridge.engine_api import EngineFacts
    from warmfleet_worker.bridge.group_ends import Group
    from warmfleet_worker.bridge.options import EngineOptions

    #: Loads a tokenizer: (files by name, facts) of (folder or hub name, file of a chat template).
    LoadTokenizer = Callable[[str, str], tuple[dict[str, bytes], dict[str, Any]]]

logger = logging.getLogger("warmfleet")

CHECK_SECONDS = 2.0  # time between two checks of the health
READ_SECONDS = 5.0  # time between two readings of metrics and names, which cost the API server milliseconds
FAILURES = 3  # number of unanswered checks in a row, each up to 5 s long, after which an engine counts as gone
REFUSALS = 2  # failed checks after which it is gone if nothing listens there, or it says that it is dead
CATCH_UP_SECONDS = 60.0  # longest replay of events before the engine joins all the same
TOKENIZER_SECONDS = 60.0  # time between two tries to load a tokenizer from a hub that cannot be reached
ADAPTERS_SECONDS = 1.0  # time between two look-ups of an adapter that is not known
UNKNOWN_CAPACITY_BLOCKS = 65_536  # capacity assumed of an engine that does not say how large its cache is
BYTES_PER_TOKEN = 131_072  # assumed of all engines, since none tells: only its product with the time for a byte counts
TIER = {"capacity_blocks": 2**22, "bytes_per_token": BYTES_PER_TOKEN}  # as announced; its capacity is assumed, too
LEAST_LOADED_TOKENS = 4_096  # tokens loaded from tiers from which on the time that they took counts


class NotUsableError(Exception):
    """The engine answers, but cannot be reported to the fleet; the text says why and what to do."""


class BridgedEngine:
    """Watches one engine in a thread of its own, from ``start`` to ``stop``."""

    def __init__(
        self,
        options: EngineOptions,
        redis_url: str,
        context: zmq.Context[zmq.Socket[bytes]],
        load_tokenizer: LoadTokenizer,
    ) -> None:
        self.options = options
        self.api = EngineApi(options.url, options.api_key)
        self.ranks: list[Rank] = []
        self.state = "not seen yet"  # for the log; "reported" means that all is well
        self._redis_url = redis_url
        self._context = context
        self._load_tokenizer = load_tokenizer
        self._server: ServerPublisher | None = None
        self._reading, self._models, self._adapters = Reading(), tuple[str, ...](), dict[str, str]()
        self._adapters_asked = 0.0
        self._restarted = threading.Event()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._leaves = False
        self._read_due = 0.0
        self._tokenizer_due = float("inf")
        self._failures = self._unresolved = 0  # failed checks in a row: no good answer; no address for the name
        self._groups: dict[int, Group] = {}  # further KV cache groups (a hybrid model), by number
        self._lookahead = 0  # tokens behind a block that its hash covers
        self._tiers = dict[str, bool]()  # its tiers: kind, and ``Offloaded.loads_last``
        self._thread = threading.Thread(target=self._run, name=f"warmfleet-engine-{options.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, leave: bool = False) -> None:
        """Let all threads end. leave: the fleet is told that the engine is gone.

        Without ``leave`` only the bridge ends: routers use the engine, by its last reports, as long as it answers.
        """
        self._leaves = leave
        self._stopping.set()
        self._wake.set()

    def join(self, within_s: float) -> None:
        """Wait up to ``within_s`` seconds for the thread's end, which may take minutes while a tokenizer loads."""
        if self._thread.is_alive():
            self._thread.join(within_s)

    @property
    def ended(self) -> bool:
        """Whether the thread has ended. Until then the bridge reports no other engine under the same name."""
        return not self._thread.is_alive()

    # ------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self.ranks:
                    self._check()
                else:
                    self._join()
            except (EngineDown, NotUsableError, TokenizerError, wire.WireError) as error:
                self._failed(error)
            except Exception:
                logger.exception("warmfleet: %s: unexpected error; will try again", self.options.url)
                self._leave()
            self._wake.wait(CHECK_SECONDS)
            self._wake.clear()
        self._end(leave=self._leaves)

    def _failed(self, error: Exception) -> None:
        """Count a failed check; after FAILURES in a row, or REFUSALS if the engine is gone, it leaves the fleet."""
        if not self.ranks:
            self._say(f"not usable: {error}")
            return
        if isinstance(error, EngineDown) and error.unresolved:  # the name server failed; the engine may be healthy
            self._unresolved += 1
            if self._unresolved >= FAILURES:
                self._say(f"not reachable from the bridge: {error}")
                self._reading = replace(self._reading, work=0)  # unknown: an old number looks like a standstill
            return
        self._failures += 1
        gone = isinstance(error, EngineDown) and error.gone
        if self._failures >= (REFUSALS if gone else FAILURES):
            self._say(f"gone: {error}")
            self._leave()

    def _say(self, state: str) -> None:
        if state != self.state:
            level = logging.INFO if state == "reported" else logging.WARNING
            logger.log(level, "warmfleet: engine %s: %s", self.options.url, state)
        self.state = state

    # ------------------------------------------------ join

    def _join(self) -> None:
        """Read the engine's events up to now, then join the fleet as a server and a worker for each rank."""
        self.api.healthy()
        facts = self._facts()
        sources = self._sources(facts)
        self._models, self._adapters, self._reading = facts.models, dict(facts.adapters), self._read()
        self._restarted.clear()
        ranks = [self._rank(facts, source, rank) for rank, source in sorted(sources.items())]
        config = self._server_config(facts, len(ranks))
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + CATCH_UP_SECONDS
        for rank in ranks:
            rank.caught_up.wait(max(0.0, deadline - time.monotonic()))
        if self._stopping.is_set() or not all(rank.follows for rank in ranks):
            for rank in ranks:
                rank.stop(leave=False)
            if self._stopping.is_set():
                return  # the bridge ends: if the engine joined now, its later blocks would not be reported
            raise NotUsableError("its events cannot be followed; the log says why")
        assignment = server_assignment(self._redis_url, config.model, config.server_id, self._host)
        server = ServerPublisher(config, assignment)
        for rank in ranks:
            rank.publish()
        server.start()
        self.ranks, self._server, self._failures, self._unresolved = ranks, server, 0, 0
        self._say("reported")

    def _facts(self) -> EngineFacts:
        facts, options = self.api.facts(), self.options
        if options.block_tokens:
            facts = replace(facts, page_tokens=options.block_tokens)
        if not facts.capacity_blocks:
            pages = scheme_of(facts.page_tokens).block_tokens // facts.page_tokens  # pages in one block
            facts = replace(facts, capacity_blocks=UNKNOWN_CAPACITY_BLOCKS * pages)
        if not facts.prefix_caching:
            logger.warning("warmfleet: engine %s has no prefix cache: it is routed by load", options.url)
        return facts

    def _sources(self, facts: EngineFacts) -> dict[int, EventSource]:
        """Return where each rank publishes its events, as the operator says, else as the engine says."""
        options = self.options
        if options.endpoint:
            first = EventSource(options.endpoint, options.replay or None)
            return {
                rank: EventSource(at_rank(first.endpoint, rank), at_rank(first.replay, rank) if first.replay else None)
                for rank in range(options.ranks or facts.ranks)
            }
        found = self.api.sources()
        if not found:
            raise NotUsableError(
                "it does not say where it publishes KV events: start it with --kv-events-config, and give the address "
                f"as {options.url}=tcp://HOST:PORT"
            )
        return found

    def _rank(self, facts: EngineFacts, source: EventSource, rank: int) -> Rank:
        options = self.options
        scheme = scheme_of(facts.page_tokens, self._lookahead)
        if not facts.prefix_caching:
            scheme = wire.Scheme(wire.NO_CACHE, bytes(32), scheme.block_tokens)
        config = PublisherConfig(
            redis_url=self._redis_url,
            model=self._model(facts),
            worker_id=wire.worker_id_of(options.name, rank),
            server_id=options.name,
            rank=rank,
            scheme=scheme,
            capacity_blocks=max(1, facts.capacity_blocks * facts.page_tokens // scheme.block_tokens),
            max_model_len=facts.max_model_len,
            version=facts.version,
            closed=not self._groups,
            labels=read_labels(options.labels),
            # A tier holds the blocks of some groups only, and nothing tells what an engine can load of a prefix then.
            sets={wire.ENDS: {"promises_all": 0}} if self._groups else self._announced_tiers(),
        )
        side = EngineSide(
            options.group,
            self._lora_path,
            lambda: self._load(rank),
            self._ps_per_byte,
            self._note_restart,
            self._host,
            self._groups,
        )
        return Rank(self._context, source, facts, config, side)

    def _announced_tiers(self) -> dict[str, dict[str, int]]:
        return {kind: TIER | {"loads_last": int(loads_last)} for kind, loads_last in self._tiers.items()}

    @property
    def _host(self) -> str:
        return urlsplit(self.options.url).hostname or ""

    def _model(self, facts: EngineFacts) -> str:
        return self.options.model or facts.models[0].strip("/")

    def _server_config(self, facts: EngineFacts, ranks: int) -> ServerConfig:
        files, known = self._tokenizer(facts)
        return ServerConfig(
            redis_url=self._redis_url,
            model=self._model(facts),
            server_id=self.options.name,
            url=self.api.url,
            models=facts.models,
            version=facts.version,
            artifacts=files,
            facts={"max_model_len": facts.max_model_len, "ranks": ranks, "reports_prefills": False, **known},
            adapters=lambda: self._adapters,
            # No heartbeat while the engine's name has no address here: then routers ask the engine's URL themselves.
            silent=lambda: self._unresolved >= FAILURES,
        )

    def _tokenizer(self, facts: EngineFacts) -> tuple[Mapping[str, bytes], Mapping[str, Any]]:
        name = self.options.tokenizer or facts.root
        self._tokenizer_due = float("inf")
        if name != NONE:
            logger.info("warmfleet: engine %s: loading the tokenizer %s", self.options.url, name)
        try:
            return self._load_tokenizer(name, self.options.chat_template)
        except TokenizerError as error:
            then = ""
            if error.later:
                self._tokenizer_due = time.monotonic() + TOKENIZER_SECONDS
                then = f"; trying again in {TOKENIZER_SECONDS:.0f} s"
            logger.warning(
                "warmfleet: engine %s: %s. Until --tokenizer, or WARMFLEET_TOKENIZER at the routers, names one, only "
                "prompts of token ids are matched%s",
                self.options.url,
                error,
                then,
            )
            return {}, {}

    def _try_tokenizer_again(self) -> None:
        """Join anew with the tokenizer, if it can be loaded now."""
        files, _ = self._tokenizer(self._facts())
        if files:
            logger.info("warmfleet: engine %s: its tokenizer is there now, so it joins anew", self.options.url)
            self._note_restart()

    # ------------------------------------------------ while it is reported

    def _note_restart(self) -> None:
        self._restarted.set()
        self._wake.set()

    def _check(self) -> None:
        if self._restarted.is_set():
            self._say("restarted")
            self._leave()
            self._join()
            return
        self.api.healthy()
        if self._unresolved >= FAILURES:
            self._say("reported")
        self._failures = self._unresolved = 0
        if time.monotonic() >= self._tokenizer_due:
            self._try_tokenizer_again()
        if time.monotonic() < self._read_due:
            return
        self._read_due = time.monotonic() + READ_SECONDS
        reading = self._read()
        if reading.started and self._reading.started and reading.started != self._reading.started:
            self._note_restart()
        self._reading = reading
        models, self._adapters = self.api.names()
        if models != self._models:
            self._note_restart()  # another model may answer there now
        groups = self._groups | {
            number: group for rank in self.ranks for number, group in rank.table.groups_told.items()
        }
        if groups != self._groups:
            self._groups = groups
            self._warn_of_groups(rank.table.scheme.block_tokens for rank in self.ranks)
            self._note_restart()  # its join said nothing of them
        tiers = self._tiers_told()
        if tiers != self._tiers:
            self._tiers = tiers
            self._note_restart()  # its join said nothing of them
        told = max((rank.table.lookahead for rank in self.ranks), default=0)
        if told != self._lookahead:
            self._lookahead = told
            self._note_restart()  # its join named another scheme
        for rank in self.ranks:
            if rank.stopped:
                self._say(f"not reported any more: {rank.stopped}")

    def _tiers_told(self) -> dict[str, bool]:
        """Return the tiers known by now. Once False, a tier's ``loads_last`` stays so, though new tables forget it."""
        tiers = dict(self._tiers)
        for rank in self.ranks:
            for kind, loads_last in rank.table.tiers_told.items():
                tiers[kind] = loads_last and tiers.get(kind, True)
        return tiers

    def _warn_of_groups(self, sizes: Iterable[int]) -> None:
        if any(rules_of(self._groups, self.options.group, block_tokens) is None for block_tokens in sizes):
            kinds = ", ".join(sorted({group.kind or "not told" for group in self._groups.values()}))
            logger.warning(
                "warmfleet: engine %s has KV cache groups whose rule is not known (%s): no prefix is promised there, "
                "so requests go there by load. Use the plugin",
                self.options.url,
                kinds,
            )

    def _read(self) -> Reading:
        """Read the load; without metrics return the last numbers of requests, and 0 for unknown work."""
        try:
            return self.api.reading()
        except EngineDown as error:
            if error.gone:
                raise
            return replace(self._reading, work=0)  # unchanged work would look like an engine that stands still

    def _load(self, rank: int) -> Load:
        """Return the load of a rank. Metrics do not tell who sent a request, so all count as sent by routers."""
        reading = self._reading
        running, waiting = reading.running.get(rank, 0), reading.waiting.get(rank, 0)
        steps = reading.work if running and reading.work else None
        return Load(running, waiting, steps=steps, paused=rank in reading.asleep)

    def _ps_per_byte(self) -> dict[str, int]:
        """Return the measured time to load a byte, by kind of tier; nothing before the first loads."""
        loads = self._reading.loads
        host = _seconds_per_token(loads.load_s, loads.host_tokens + loads.disk_tokens)
        disk = _seconds_per_token(loads.read_s, loads.disk_tokens)
        told = {wire.CPU: host, wire.DISK: host + disk if disk else 0.0}
        return {
            kind: min(2**31, max(1, round(seconds * 1e12 / BYTES_PER_TOKEN)))
            for kind, seconds in told.items()
            if seconds and kind in self._tiers
        }

    def _lora_path(self, name: str) -> str | None:
        """Return the path of an adapter; ask the engine about an adapter that was loaded a moment ago."""
        path = self._adapters.get(name)
        if path is None and time.monotonic() - self._adapters_asked > ADAPTERS_SECONDS:
            self._adapters_asked = time.monotonic()
            try:
                _, self._adapters = self.api.names()
            except EngineDown:
                return None
            path = self._adapters.get(name)
        return path

    # ------------------------------------------------ the end

    def _leave(self) -> None:
        """Let server and ranks say goodbye, because the engine's process is gone or has been replaced."""
        self._end(leave=True)
        self._restarted.clear()

    def _end(self, *, leave: bool) -> None:
        server, self._server = self._server, None
        if server is not None and leave:
            server.stop()
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.stop(leave=leave)


def _seconds_per_token(seconds: float, tokens: float) -> float:
    """Return the time that loading a token takes; 0: too few tokens to tell."""
    return seconds / tokens if tokens >= LEAST_LOADED_TOKENS and seconds > 0 else 0.0
