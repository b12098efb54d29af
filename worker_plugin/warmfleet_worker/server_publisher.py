"""The thread that writes one API server's stream: where it is reached, and how it turns prompts into token ids."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoPermissionError, RedisError

from warmfleet_worker.protocol import artifacts, wire
from warmfleet_worker.stream import Outage, Refused, StreamGone, StreamWriter, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from warmfleet_worker.pool_assignment import PoolAssignment

logger = logging.getLogger("vllm.warmfleet")

YOUNG_SECONDS = 60.0  # a server with a younger join joins again after a Redis failover, which may have lost the join
ARTIFACT_SECONDS = 86_400  # time to live in Redis of a server's files (tokenizer, template); the server renews it
IN_USE_SECONDS = 600.0  # time between two renewals of the files' time to live, which also find missing files
LOOK_SECONDS = 0.5  # time between two checks whether the adapters have changed; a change is announced at once
READY_SECONDS = 120.0  # longest wait until a server listens; then it joins anyway, and the routers' probe fails


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The announcement of an API server when it joins.

    model: the fleet's model tag. models: the served names. artifacts: files by name, such as the tokenizer.
    facts: settings that decide the token ids of a prompt. ready: tells whether the server listens. adapters: returns
    the paths, by name, of the LoRA adapters that the server serves now; a change is announced. silent: returns True
    while nobody knows if the server lives; then no heartbeat is sent.
    """

    redis_url: str
    model: str
    server_id: str
    url: str
    models: tuple[str, ...]
    version: str
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    ready: Callable[[], bool] = lambda: True
    adapters: Callable[[], Mapping[str, str]] = dict
    silent: Callable[[], bool] = lambda: False


class ServerPublisher:
    """Writes the stream ``server:<server_id>`` from a daemon thread: a join, a heartbeat every 5 s, at last a leave.

    Before the join it stores the artifacts, in chunks that are named by their digest.
    """

    def __init__(self, config: ServerConfig, assignment: PoolAssignment | None = None) -> None:
        """assignment: names the pool to join; without it, the pool is ``config.model``."""
        self.config = config
        self._assignment = assignment
        self._open(config.model)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmfleet-server", daemon=True)
        self.joined = False
        self._joined_at = self._used_at = 0.0
        self._files: list[str] = []  # the keys of the chunks of all artifacts
        self._manifest: dict[str, Any] = {}  # of the artifacts, for the join
        self._adapters: dict[str, str] = {}

    def _open(self, tag: str) -> None:
        """Write into the stream of this pool from now on."""
        self._tag, self._keys = tag, wire.Keys(tag)
        self._stream = StreamWriter(
            connect(self.config.redis_url, self._keys.tag),
            self._keys.server(wire.check_name(self.config.server_id)),
            (self._keys.hello, f"server:{self.config.server_id}"),
            wire.SERVER_MAXLEN,
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """Say goodbye to the fleet and end the thread; gives up after ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.config.ready() and time.monotonic() < deadline and not self._stopping.is_set():
            self._stopping.wait(wire.FLUSH_SECONDS)
        outage = Outage(self._stopping)
        while not self._stopping.is_set():
            try:
                if not self.config.silent():
                    self._round()
            except StreamGone:
                self.joined = False
                if self._assignment is not None:
                    self._assignment.doubt()  # the pool may have been removed
                self._stopping.wait(wire.FLUSH_SECONDS)
            except (RedisError, Refused, OSError) as error:
                outage.wait(error)
            else:
                outage.over()
                self._rest()
        self._leave()

    def _rest(self) -> None:
        """Wait until the next heartbeat is due, or the adapters have changed."""
        until = time.monotonic() + wire.HEARTBEAT_SECONDS
        while (left := until - time.monotonic()) > 0 and not self._stopping.wait(min(left, LOOK_SECONDS)):
            if self._changed:
                return

    @property
    def _changed(self) -> bool:
        """Tell whether the server serves other adapters than it has announced."""
        return self.joined and dict(self.config.adapters()) != self._adapters

    def _round(self) -> None:
        """Join, if that is due, and send a heartbeat."""
        if self._assignment is not None:
            self._sit(self._assignment.look(time.monotonic()))
        moved = self._stream.moved and time.monotonic() - self._joined_at < YOUNG_SECONDS
        if not self.joined or moved:
            self._join()
        elif not self._uses_files():
            self._store()
        self._stream.flush()  # entries that an earlier, failed round has not sent
        if self._changed:  # a join without a new nonce: routers keep the results of their probes
            self._stream.put("join", self._announcement())
        self._stream.put("heartbeat")
        self._stream.flush()

    def _sit(self, tag: str) -> None:
        """Be in the pool ``tag``: if it is not the present one, leave the present one and open a stream in ``tag``."""
        if tag == self._tag:
            return
        self._goodbye()
        self._stream.close()
        self._open(tag)

    def _uses_files(self) -> bool:
        """Every IN_USE_SECONDS renew the time to live of the files in Redis; return False if a file's key is gone.

        Routers read only a few servers' files: they empty the keys of the others, and delete a key to get its file.
        """
        if time.monotonic() - self._used_at < IN_USE_SECONDS:
            return True
        self._used_at = time.monotonic()
        lost = [key for key in self._files if not self._lives_on(key)]
        return not lost

    def _lives_on(self, key: str) -> bool:
        """Let a file live in Redis for another day; return False if Redis does not have its key."""
        try:
            return bool(self._stream.client.expire(key, ARTIFACT_SECONDS))
        except NoPermissionError:  # the user's rights are from an older `warmfleet acl`: the file does not expire
            return True

    def _store(self) -> None:
        """Store the files whose keys Redis does not have."""
        manifest = self._manifest = {}
        self._files, self._used_at = [], time.monotonic()
        for name, content in self.config.artifacts.items():
            manifest[name], chunks = artifacts.split(content)
            for sha256, piece in chunks.items():  # one call per chunk, so that no call takes long
                # SETNX: the ACL allows a worker to add artifacts, not to overwrite them
                self._files.append(self._keys.artifact(self.config.server_id, sha256))
                self._stream.client.setnx(self._files[-1], piece)
                self._lives_on(self._files[-1])

    def _announcement(self) -> str:
        """Return the data of a join entry, with the adapters as they are now."""
        config, self._adapters = self.config, dict(self.config.adapters())
        return wire.dumps(
            {
                "schema": wire.SCHEMA,
                "server_id": config.server_id,
                "url": config.url,
                "models": list(config.models),
                "artifacts": self._manifest,
                "facts": {**config.facts, "loras": self._adapters},
                "version": config.version,
            }
        )

    def _join(self) -> None:
        config = self.config
        self._store()
        self._stream.join(self._announcement())
        self.joined, self._joined_at = True, time.monotonic()
        logger.info("warmfleet: server %s joined %s as %s", config.server_id, self._tag, config.url)

    def _leave(self) -> None:
        self._goodbye()
        self._stream.close()
        if self._assignment is not None:
            self._assignment.close()

    def _goodbye(self) -> None:
        if self.joined:
            self.joined = False
            try:
                self._stream.put("leave")
                self._stream.flush()
                logger.info("warmfleet: server %s said goodbye", self.config.server_id)
            except (RedisError, Refused, StreamGone, OSError) as error:
                logger.info("warmfleet: could not say goodbye: %s", error)
