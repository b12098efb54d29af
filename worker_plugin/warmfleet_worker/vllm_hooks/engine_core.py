"""The engine-core half of the plugin reports the block table, the load and the speed of one vLLM Scheduler."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from warmfleet_worker.config import PublisherConfig, labels_of_environment
from warmfleet_worker.ends import GroupedTransitions
from warmfleet_worker.load import Load
from warmfleet_worker.pool_assignment import core_assignment
from warmfleet_worker.protocol import wire
from warmfleet_worker.reservations import Reservations
from warmfleet_worker.speed_meter import SpeedMeter
from warmfleet_worker.tracker import Transitions
from warmfleet_worker.vllm_hooks import eviction
from warmfleet_worker.vllm_hooks.block_table import WholeBlocks, hash_of_key, hook_prefix_cache_reset, track
from warmfleet_worker.vllm_hooks.compatibility import Part, extra_keys_form, missing, refuse, version
from warmfleet_worker.vllm_hooks.cpu_tier import CpuTier, CpuTiers
from warmfleet_worker.vllm_hooks.groups import is_full_attention, keeps_all_ends, report_chains, rules_of
from warmfleet_worker.vllm_hooks.kv_transfer import hook_handshake, transfer_of, unfit_alone
from warmfleet_worker.vllm_hooks.scheduler_work import finished_prefills, foreign_load, step_tokens
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet_worker.ends import Rules

logger = logging.getLogger("vllm.warmfleet")


def hook_scheduler(redis_url: str) -> None:
    """Give every Scheduler of this process a ``SchedulerReporter``, which is told of each step."""
    scheduler_class = _class_to_hook()
    if scheduler_class is None:
        return
    hook_prefix_cache_reset()
    # By id of the scheduler. Normally a process has one scheduler, which lives as long as the process.
    reporters: dict[int, SchedulerReporter] = {}
    tiers = CpuTiers()

    def init(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config = kwargs.get("vllm_config", args[0] if args else None)
        with swallow_errors("could not follow a tier in CPU memory"):
            tiers.hook(vllm_config)
        with swallow_errors("could not follow the handshakes of its KV connector"):
            hook_handshake(vllm_config)
        original(scheduler, *args, **kwargs)
        with swallow_errors("could not start the publisher"):
            reporters[id(scheduler)] = reporter = SchedulerReporter(scheduler, redis_url, tiers)
            reporter.start()

    def schedule(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        reporter = reporters.get(id(scheduler))
        if reporter is not None:
            reporter.scheduled(output)
        return output

    def update_from_output(original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        reporter = reporters.get(id(scheduler))
        if reporter is not None:
            reporter.updates = True
        outputs = original(scheduler, scheduler_output, *args, **kwargs)
        if reporter is not None:
            reporter.done(scheduler_output, outputs)
            reporter.updated()
        return outputs

    def shutdown(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        reporter = reporters.pop(id(scheduler), None)
        if reporter is not None:
            with swallow_errors("could not say goodbye"):
                reporter.stop()
        return original(scheduler, *args, **kwargs)

    wrap(scheduler_class, "__init__", init)
    wrap(scheduler_class, "schedule", schedule)
    wrap(scheduler_class, "update_from_output", update_from_output)
    wrap(scheduler_class, "shutdown", shutdown)
    if not _lacks(Part.IMAGES):
        _hook_images(scheduler_class, reporters)
    if not missing(Part.ENDS):
        wrap(scheduler_class, "add_request", functools.partial(_add_request, reporters))
        wrap(scheduler_class, "_free_request", functools.partial(_free_request, reporters))


def _hook_images(scheduler_class: Any, reporters: Mapping[int, SchedulerReporter]) -> None:
    """Let each reporter see the images of its Scheduler's requests."""

    def add_request(original: Any, scheduler: Any, request: Any) -> Any:
        if request.mm_features:
            reporter = reporters.get(id(scheduler))
            if reporter is not None:
                reporter.sees(request)
        return original(scheduler, request)

    wrap(scheduler_class, "add_request", add_request)


def _add_request(
    reporters: Mapping[int, SchedulerReporter], original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    reporter = reporters.get(id(scheduler))
    if reporter is not None:
        reporter.added(request)
    return original(scheduler, request, *args, **kwargs)


def _free_request(
    reporters: Mapping[int, SchedulerReporter], original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    answer = original(scheduler, request, *args, **kwargs)
    reporter = reporters.get(id(scheduler))
    if reporter is not None:
        reporter.freed(request)
    return answer


def _class_to_hook() -> Any:
    """Return vLLM's Scheduler class; None if it is hooked already, or must not be hooked.

    If this vLLM lacks an internal of Part.BLOCKS, nothing is reported, and each engine core logs a line about it.
    """
    reason = missing(Part.BLOCKS)
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
    except ImportError:
        refuse(Part.BLOCKS, reason)  # logged by all processes: only a Scheduler shows which is an engine core
        return None
    if not first_time(Scheduler):
        return None
    if reason:
        wrap(Scheduler, "__init__", functools.partial(_refused, reason))
        return None
    return Scheduler


def _refused(reason: str, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    refuse(Part.BLOCKS, reason)


class SchedulerReporter:
    """Reports a Scheduler's blocks and load. ``scheduled``, ``done`` run on the engine's thread, ``load`` does not."""

    def __init__(self, scheduler: Any, redis_url: str, tiers: CpuTiers | None = None) -> None:
        self._scheduler = scheduler
        self._speed = SpeedMeter()
        self._steps = 0  # number of steps begun and of steps ended, added up
        self._steps_unreadable, self._load_unreadable = _lacks(Part.STEPS), _lacks(Part.LOAD)
        self._images_unreadable = False
        self._reservations = None if _lacks(Part.ENDS) else Reservations(self.requests, reason_of)
        self._reporting: Reservations | None = None  # the same from the publisher's start on, until an error
        self._ends_unreadable, self._requests_unreadable = False, False
        self.updates = False  # whether vLLM is reading a step's result
        self._freed: list[tuple[str, int, object]] = []  # what has ended in that result, see ``Reservations.end``
        group = full_attention_group(scheduler)
        target = os.environ.get("WARMFLEET_TTFT_TARGET_S")
        self._eviction = hook = eviction.install(scheduler, target, lambda: self._speed.speed_tps, group.matched)
        # T-LRU may evict blocks that two conversations share while later blocks of one of them stay cached.
        group = replace(group, closed=group.closed and (hook is None or hook.eviction.tail is None))
        self.transitions = Transitions(hash_of_key(group.number))
        self.announced: dict[str, Mapping[str, int | str]] = {}  # the further sets of blocks that are reported
        if group.matched:
            pool = scheduler.kv_cache_manager.block_pool
            if group.rules is not None:
                self.transitions = transitions = GroupedTransitions(hash_of_key(group.number), group.rules)
                report_chains(pool, transitions, group.rules.chained())
                self.announced[wire.ENDS] = {"promises_all": int(keeps_all_ends(scheduler, group.rules))}
            some = group.hash_block_tokens != group.block_tokens
            whole = WholeBlocks(pool, group.number, group.block_tokens) if some else None
            track(pool.cached_block_hash_to_block, self.transitions, whole)
        self._tiers = tiers
        self._tier: CpuTier | None = None
        if tiers is not None and group.matched:
            with swallow_errors("could not follow the tier in CPU memory"):
                drops = drops_last_block(scheduler.vllm_config)
                self._tier = tiers.find(scheduler, group.block_tokens, drops=drops)
        self._left: frozenset[str] = frozenset()  # ids of requests reserved in a pool that this engine has left
        self._publisher: WorkerPublisher | None = None
        self._make_config = functools.partial(publisher_config, scheduler.vllm_config, redis_url, group)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the publisher as soon as this engine's hash scheme is known, in a thread of its own."""
        threading.Thread(target=self._start_publisher, name="warmfleet-start", daemon=True).start()

    def _start_publisher(self) -> None:
        """Wait for NONE_HASH, a part of the scheme, which the engine core makes only after its Scheduler.

        Where there is a KV connector, the engine core makes it in any case, after the connector's handshake is known.
        """
        from vllm.v1.core import kv_cache_utils

        with swallow_errors("could not start the publisher"):
            vllm_config = self._scheduler.vllm_config
            if reason := unfit_alone(vllm_config):
                logger.error("warmfleet: %s: this engine reports nothing, so it gets no requests from routers", reason)
                return
            comes = vllm_config.cache_config.enable_prefix_caching or self._scheduler.connector is not None
            while comes and not hasattr(kv_cache_utils, "NONE_HASH"):
                if self._stopping.wait(0.05):
                    return
            config = self._make_config()
            yielded = None if self._eviction is None else self._eviction.eviction.yield_sessions
            assignment = core_assignment(config)
            sets: dict[str, Transitions] = {}
            if isinstance(self.transitions, GroupedTransitions):
                sets[wire.ENDS] = self.transitions.ends
            if self._tier is not None:
                sets[wire.CPU], self.announced[wire.CPU] = self._tier.tracker, self._tier.announced()
                if self._tier.store is not None:
                    store = self._tier.store
                    sets[wire.DISK] = store.findings
                    self.announced[wire.DISK] = store.announced(config.scheme.scheme_id)
            config = replace(config, sets=self.announced)
            with swallow_errors("could not read its KV connector", Part.TRANSFER.value):
                config = replace(config, transfer=transfer_of(self._scheduler, config.scheme.block_tokens))
            told = self._reservations
            self._publisher = WorkerPublisher(
                config, self.transitions, self.load, assignment, self.moved, yielded, sets, self.ps_per_byte, told
            )
            self._reporting = told
            self._publisher.start()

    def stop(self) -> None:
        """Say goodbye to the fleet; takes a second at most."""
        self._stopping.set()
        if self._publisher is not None:
            self._publisher.stop(1.0)

    def scheduled(self, output: Any) -> None:
        self._steps += 1
        self._speed.scheduled(id(output), time.monotonic())

    def done(self, scheduler_output: Any, outputs: Any) -> None:
        """Measure the speed of a step that has its result, and report the prefills that it has finished.

        After the first error no further step is read, so that a changed vLLM does not fill the log.
        """
        publisher = self._publisher
        self._steps += 1
        if self._steps_unreadable or publisher is None:
            return
        self._steps_unreadable = True  # unless the end of this block is reached
        with swallow_errors("could not read a step's result"):
            prefill, decode = step_tokens(scheduler_output)
            self._speed.done(id(scheduler_output), time.monotonic(), prefill, decode)
            for request_id, cached_tokens, prompt_tokens in finished_prefills(outputs):
                reservation = wire.first_child(request_id)
                if reservation:  # other children find in the cache the blocks that the first has just computed
                    publisher.progress(reservation, cached_tokens, prompt_tokens)
                if self._eviction is not None:
                    self._eviction.first_token(request_id, cached_tokens, prompt_tokens)
            self._steps_unreadable = False

    def sees(self, request: Any) -> None:
        """Note the tokens of a request's images, unless an earlier request's could not be read."""
        publisher, ids = self._publisher, request.prompt_token_ids
        if self._images_unreadable or publisher is None or ids is None:
            return
        self._images_unreadable = True  # unless the end of this block is reached
        with swallow_errors("could not read a request's images", Part.IMAGES.value):
            for feature in request.mm_features:
                if feature.modality == "image":
                    place = feature.mm_position
                    publisher.images.note(feature.identifier, ids, place.offset, place.length)
            self._images_unreadable = False

    # The three below run between two steps, where every call costs microseconds: so they do without ``swallow_errors``.

    def added(self, request: Any) -> None:
        """Note a request that vLLM is about to add; not the further input of one that it has."""
        if self._reporting is None:
            return
        try:
            if request.request_id not in self._scheduler.requests:
                self._reporting.arrive(request.request_id)
        except Exception as error:  # noqa: BLE001 - see ``swallow_errors``
            self._cannot_read_ends("could not read a new request", error)

    def freed(self, request: Any) -> None:
        """Report a request that vLLM has finished or aborted; one of a step under way when its prefill is reported."""
        if self._reporting is None:
            return
        try:
            if request.request_id not in self._left:
                self._freed.append((request.request_id, request.num_output_tokens, request.status))
        except Exception as error:  # noqa: BLE001 - see ``swallow_errors``
            self._cannot_read_ends("could not read the end of a request", error)
        if not self.updates:
            self.updated()

    def updated(self) -> None:
        """Report the requests that have ended, because vLLM has read a step's result."""
        self.updates = False
        if self._freed and self._reporting is not None:
            self._reporting.end(self._freed)
            self._freed.clear()

    def _cannot_read_ends(self, failure: str, error: Exception) -> None:
        self._ends_unreadable, self._reporting = True, None
        with swallow_errors(failure, Part.ENDS.value):
            raise error

    def requests(self) -> list[str] | None:
        """List the ids of the requests that the engine has and has not finished; None after the first error.

        Runs beside the engine's thread: ``list`` of a dict is one atomic call.
        """
        if not self._requests_unreadable and not self._ends_unreadable:
            with swallow_errors("could not read the scheduler's requests", Part.ENDS.value):
                present = [each for each in list(self._scheduler.requests.values()) if not each.is_finished()]
                return [each.request_id for each in present if each.request_id not in self._left]
            self._requests_unreadable = True
        return None

    def ps_per_byte(self) -> dict[str, int]:
        """Return the measured time to load a byte, by kind of tier; 0: not measured."""
        if self._tiers is None or self._tier is None:
            return {}
        store = self._tier.store
        return {wire.CPU: self._tiers.meter.ps_per_byte} | ({wire.DISK: store.meter.ps_per_byte} if store else {})

    def moved(self) -> None:
        """Count the present requests as foreign from now on, because the new pool has no reservations for them."""
        with swallow_errors("could not read the scheduler's requests"):
            self._left = frozenset(list(self._scheduler.requests))

    def load(self) -> Load:
        """Return the present work of the engine; zeros after the first error, because the heartbeat must go on.

        Runs beside the engine's thread: ``list`` of a dict is one atomic call.
        """
        if self._eviction is not None:
            self._eviction.beside()
        if not self._load_unreadable:
            self._load_unreadable = True  # unless the end of this block is reached
            with swallow_errors("could not read the scheduler's load"):
                running, waiting = self._scheduler.get_request_counts()
                prefill, decode = foreign_load(list(self._scheduler.requests.values()), self._left)
                works = self._scheduler.get_num_unfinished_requests() > 0  # a paused engine keeps requests at rest
                paused = int(self._scheduler.pause_state) != 0  # a sleeping engine is paused, too
                self._load_unreadable = False
                steps = self._steps if works else None
                speed = self._speed
                return Load(running, waiting, prefill, decode, speed.speed_tps, steps, paused, speed.step_us)
        return Load()


def _lacks(part: Part) -> bool:
    """Tell whether this vLLM lacks an internal of this part; if so, log which."""
    reason = missing(part)
    if reason:
        refuse(part, reason)
    return bool(reason)


@dataclass(frozen=True, slots=True)
class Group:
    """The KV cache group that routers match prompts with.

    block_tokens: tokens in one of its blocks. hash_block_tokens: tokens that vLLM hashes at a time, fewer where groups
    have blocks of several sizes. closed: every held block's predecessors are held, too; that is certain only where
    nothing else (another group, a KV connector) takes part. matched: False if there is no such group. rules: what all
    groups need of a prefix, if there are others.
    """

    number: int
    block_tokens: int
    hash_block_tokens: int
    closed: bool
    matched: bool = True
    rules: Rules | None = None


def full_attention_group(scheduler: Any) -> Group:
    """Find the group of the full-attention layers, which alone keep whole prefixes.

    Sliding-window, Mamba and other groups forget the middle of a prompt.
    """
    manager = scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    full = [number for number, group in enumerate(groups) if is_full_attention(group.kv_cache_spec)]
    if not full:
        size = int(scheduler.hash_block_size)
        return Group(0, size, size, closed=False, matched=False)
    number = full[0]
    block_tokens = int(manager.coordinator.single_type_managers[number].block_size)
    closed = len(groups) == 1 and scheduler.connector is None
    rules = None
    if len(groups) > 1 and not _lacks(Part.GROUPS):
        with swallow_errors("could not read what its KV cache groups need", Part.GROUPS.value):
            rules = rules_of(scheduler, number)
    return Group(number, block_tokens, int(scheduler.hash_block_size), closed, rules=rules)


def publisher_config(vllm_config: Any, redis_url: str, group: Group) -> PublisherConfig:
    """Make the announcement of this engine core."""
    cache = vllm_config.cache_config
    server_id, rank = server_id_of(vllm_config), rank_of(vllm_config)
    return PublisherConfig(
        redis_url=redis_url,
        model=model_tag(vllm_config),
        worker_id=wire.worker_id_of(server_id, rank),
        server_id=server_id,
        rank=rank,
        scheme=scheme_of(vllm_config, group),
        capacity_blocks=cache.num_gpu_blocks,
        max_model_len=vllm_config.model_config.max_model_len,
        step_tokens=0 if _lacks(Part.STEP_SIZE) else vllm_config.scheduler_config.max_num_batched_tokens,
        version=f"vllm-{version()}",
        closed=group.closed,
        labels=labels_of_environment(),
    )


def server_id_of(vllm_config: Any) -> str:
    """Return the name of this server; ``register`` has seen to it that WARMFLEET_WORKER_ID is set.

    Where each data-parallel rank has an API server of its own (``--data-parallel-external-lb``, and its form with
    several ports), the ranks may share the environment and the command line. The rank then makes their names differ.
    """
    name, parallel = os.environ["WARMFLEET_WORKER_ID"], vllm_config.parallel_config
    return f"{name}-{parallel.data_parallel_index}" if parallel.data_parallel_external_lb else name


def rank_of(vllm_config: Any) -> int:
    """Return the number of this engine core at its API server, the value of the header ``X-data-parallel-rank``.

    A server that has the cores of one node only (``--data-parallel-hybrid-lb``) numbers them from 0.
    """
    parallel = vllm_config.parallel_config
    local = parallel.local_engines_only
    return int(parallel.data_parallel_rank_local or 0) if local else int(parallel.data_parallel_index)


def ranks_of(vllm_config: Any) -> int:
    """Count the engine cores to which an API server hands its requests. For the process of an API server only."""
    parallel = vllm_config.parallel_config
    return int(parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size)


def scheme_of(vllm_config: Any, group: Group) -> wire.Scheme:
    """Return how this engine hashes blocks. Without prefix caching it has no NONE_HASH, and never stores a block."""
    from vllm.v1.core import kv_cache_utils

    cache = vllm_config.cache_config
    if not (cache.enable_prefix_caching and group.matched):
        why = wire.NO_PREFIXES if cache.enable_prefix_caching else wire.NO_CACHE
        logger.info("warmfleet: this engine is chosen by load only: %s", wire.UNMATCHED[why])
        return wire.Scheme(why, bytes(32), group.block_tokens)
    algorithm, none_hash = cache.prefix_caching_hash_algo, bytes(kv_cache_utils.NONE_HASH)
    lookahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)  # vLLM 0.33 with EAGLE or MTP
    extra_keys = extra_keys_form(algorithm, group.hash_block_tokens, none_hash, lookahead)
    if not lookahead and drops_last_block(vllm_config):
        extra_keys += wire.DROPS
    return wire.Scheme(
        algorithm=algorithm,
        none_hash=none_hash,
        block_tokens=group.block_tokens,
        extra_keys=extra_keys,
        hash_block_tokens=group.hash_block_tokens,
    )


def drops_last_block(vllm_config: Any) -> bool:
    """Return whether this engine, without look-ahead hashes, computes the last block that it has once more.

    A draft model of EAGLE or MTP needs the hidden states of a token to draft the next one.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False
    return bool(getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)())  # the former since 0.30


def model_tag(vllm_config: Any) -> str:
    """Return the model to join: WARMFLEET_MODEL, else the first served name. Raises WireError if it is no name."""
    served = vllm_config.model_config.served_model_name
    name = os.environ.get("WARMFLEET_MODEL") or (served if isinstance(served, str) else served[0]).strip("/")
    try:
        wire.model_tag(name)
    except wire.WireError as error:
        raise wire.WireError(f"set WARMFLEET_MODEL: {error}") from error
    return name


def reason_of(status: object) -> str:
    """Return vLLM's word for the reason why a request has this status."""
    from vllm.v1.request import RequestStatus

    return str(RequestStatus.get_finished_reason(status))
