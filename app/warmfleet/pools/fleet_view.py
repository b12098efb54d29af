"""The workers of one pool as they were last read, with tables of all that a request looks up about them."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from warmfleet.pools.pairing import Splits, pairing, splits_of
from warmfleet.pools.served_names import ServedNames
from warmfleet.prompt.images import ImageRules
from warmfleet.prompt.request import MAX_MODEL_LEN, NO_LABELS
from warmfleet.prompt.response_ids import keeper_of
from warmfleet.protocol.wire import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.pools.capabilities import TokenCapability
    from warmfleet.pools.pairing import Pairing
    from warmfleet.prompt.block_hashes import Hasher
    from warmfleet.prompt.prompt_identity import Identity

MAX_SCHEMES = 4  # most schemes of block hashes whose chains a decision (lua/decide.lua) takes


@dataclass(frozen=True, slots=True)
class View:
    """The workers of one pool as one reading of Redis found them, with tables made from them.

    identity: how prompts become token ids; None until it is loaded. hashers: one for each scheme in use. text: whether
    the tokenizer of some worker is not known, so that its prompts are matched by their text. reference: a worker with
    the tokenizer files that most workers have; None if no worker has any, or the settings name a tokenizer.
    max_model_len: the longest context of all routable workers, in tokens. names: served by the workers. streams: names
    of the streams of the workers and their API servers. unreported: workers behind a bridge that reports no finished
    prefill. token_s: seconds of prefill of a token at a worker of median speed. read_at: monotonic seconds.
    images: how most workers that announce it hash images. images_wrong: an image proved it wrong at some worker.
    image_groups: digest of the announced rules -> their workers; the rules in use first. other_images: the workers
    with other rules than those in use. pairing: the engines by role; None if none has one. splits: how
    requests may be split over two engines; None if they may not. may_split: engines may get token ids, without which
    no request is split.
    By worker_id: identity_keys (of workers with tokenizer files), handoff (of workers that take token ids),
    limits (longest contexts, only if they differ), urls, ranks (of engine cores whose server has several), speeds
    (prefill tokens/s, 0: not known), sorting (speeds of workers whose engines sort prompts by priority), labels.
    """

    workers: tuple[WorkerView, ...] = ()
    identity: Identity | None = None
    hashers: tuple[Hasher, ...] = ()
    text: bool = False
    read_at: float = 0.0
    urls: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, str] = field(default_factory=dict)
    names: ServedNames = field(default_factory=ServedNames)
    reference: WorkerView | None = None
    identity_keys: Mapping[str, str] = field(default_factory=dict)
    handoff: Mapping[str, TokenCapability] = field(default_factory=dict)
    max_model_len: int = MAX_MODEL_LEN
    limits: Mapping[str, int] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    unreported: frozenset[str] = frozenset()
    sorting: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, int] = field(default_factory=dict)
    token_s: float = 0.0
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    images: ImageRules | None = None
    images_wrong: bool = False
    image_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    other_images: frozenset[str] = frozenset()
    pairing: Pairing | None = None
    splits: Splits | None = None
    may_split: bool = True

    @property
    def step_s(self) -> float:
        """The least duration of an engine's step in seconds, the median over the workers; 0: no worker reports it."""
        steps = sorted(us for worker in self.workers if (us := worker.record.get("step_us", 0)))
        return steps[len(steps) // 2] / 1e6 if steps else 0.0

    def token_s_of(self, worker_id: str) -> float:
        """Return the seconds of prefill of one token at this worker; at the median speed if its own is not known."""
        speed_tps = self.speeds.get(worker_id, 0)
        return 1 / speed_tps if speed_tps > 0 else self.token_s

    def unlabelled(self, wanted: frozenset[str]) -> tuple[str, ...]:
        """Return the workers that lack one of these labels."""
        return tuple(worker for worker in self.ids if not wanted <= self.labels.get(worker, NO_LABELS))

    def not_keeping(self, response_id: str) -> tuple[str, ...]:
        """Return the workers that do not keep the answer with this id; none if no worker that takes requests does."""
        keeper = self.keeper_of(response_id)
        return tuple(worker for worker in self.ids if worker != keeper) if keeper else ()

    def keeper_of(self, response_id: str) -> str:
        """Return the worker that keeps the answer with this id; empty if none that takes requests does."""
        return keeper_of(response_id, (worker.worker_id for worker in self.workers if worker.routable))

    def label_prices(self, preferences: Mapping[str, float]) -> dict[int, float]:
        """Return the seconds that workers without preferred labels cost more, by slot. preferences: by label."""
        prices = {}
        for worker in self.workers:
            labels = self.labels.get(worker.worker_id, NO_LABELS)
            prices[worker.load.slot] = sum(seconds for label, seconds in preferences.items() if label not in labels)
        return {slot: seconds for slot, seconds in prices.items() if seconds}

    def barred(self, model: str, tokens: int) -> tuple[str, ...]:
        """Return the workers that cannot serve a request of ``tokens`` for ``model``: no such name, or too short a
        context.

        If the context of every worker with the name is too short, no worker is barred for that: the chosen worker
        refuses the request, which informs the client.
        """
        lacking = self.names.lacking(model)
        if not self.limits:
            return lacking
        lacks = frozenset(lacking)
        able = [worker for worker in self.limits if worker not in lacks]
        short = [worker for worker in able if self.limits[worker] < tokens]
        return (*lacking, *short) if len(short) < len(able) else lacking

    def remembering(self, before: View) -> View:
        """Return this view; if it has no routable worker, it identifies prompts as the view ``before`` does.

        After Redis came back empty or with old data, a worker may become routable in Redis before this replica reads
        the workers again. A decision may then choose that worker, and without block hashes would find none of its
        cached blocks. The first view with a routable worker ends this.
        """
        if any(worker.routable for worker in self.workers):
            return self
        return replace(
            self,
            hashers=self.hashers or before.hashers,
            text=self.text or (before.text and not self.hashers),
            names=self.names if self.names.counts else before.names.remembered(),
            max_model_len=before.max_model_len,
            limits=before.limits,
        )


def view_of(
    workers: Sequence[WorkerView],
    identity: Identity | None,
    hashers: Sequence[Hasher],
    *,
    text: bool,
    reference: WorkerView | None = None,
    identity_keys: Mapping[str, str] = MappingProxyType({}),
    handoff: Mapping[str, TokenCapability] = MappingProxyType({}),
    may_split: bool = True,
) -> View:
    """Make a View of these workers. hashers: the scheme of most workers first; only the first MAX_SCHEMES are used."""
    paired = pairing(workers) if any(worker.transfer for worker in workers) else None
    paired = paired if paired is not None and paired.roles else None
    limits = {worker.worker_id: _max_context(worker) for worker in workers if worker.routable}
    speeds = {worker.worker_id: worker.load.speed_tps for worker in workers}
    known = sorted(speed_tps for speed_tps in speeds.values() if speed_tps > 0)
    plugged = [worker for worker in workers if not worker.approximate]
    images, images_wrong, groups = _images(workers)
    cores = Counter(str(worker.record.get("server_id", "")) for worker in workers if worker.server)
    return View(
        workers=tuple(workers),
        identity=identity,
        hashers=tuple(hashers)[:MAX_SCHEMES],
        text=text,
        reference=reference,
        identity_keys=identity_keys,
        read_at=time.monotonic(),
        handoff=handoff,
        ids=tuple(worker.worker_id for worker in workers),
        streams=(*(f"events:{worker.worker_id}" for worker in plugged), *(f"server:{server}" for server in cores)),
        urls={worker.worker_id: worker.url for worker in workers},
        ranks={
            worker.worker_id: str(worker.record.get("rank", 0))
            for worker in workers
            if worker.server and _has_several_cores(worker.server, cores[str(worker.record.get("server_id", ""))])
        },
        unreported=frozenset(worker.worker_id for worker in workers if _facts(worker).get("reports_prefills") is False),
        sorting={worker.worker_id: worker.load.speed_tps for worker in workers if _facts(worker).get("takes_priority")},
        speeds=speeds,
        token_s=1 / known[len(known) // 2] if known else 0.0,
        labels={worker.worker_id: worker.labels for worker in workers if worker.record.get("labels")},
        names=ServedNames(workers),
        max_model_len=max(limits.values(), default=MAX_MODEL_LEN),
        limits=limits if len(set(limits.values())) > 1 else {},
        images=images,
        images_wrong=images_wrong,
        image_groups=groups,
        other_images=frozenset(name for others in list(groups.values())[1:] for name in others),
        pairing=paired,
        splits=splits_of(paired, handoff) if paired is not None and may_split else None,
        may_split=may_split,
    )


def _images(workers: Sequence[WorkerView]) -> tuple[ImageRules | None, bool, dict[str, tuple[str, ...]]]:
    """Return the rules that most workers announce, whether a probe with an image failed at one of these, and the
    workers by the digest of their rules, those of the returned rules first.
    """
    told: dict[str, list[WorkerView]] = {}
    for worker in workers:
        if fact := _facts(worker).get("images"):
            told.setdefault(dumps(fact), []).append(worker)
    rules = {text: known for text in sorted(told) if (known := ImageRules.of(json.loads(text))) is not None}
    if not rules:
        return None, False, {}
    most = max(rules, key=lambda text: len(told[text]))
    wrong = any(worker.record.get("cause") == "image" for worker in told[most])
    groups = {
        hashlib.sha256(text.encode()).hexdigest()[:12]: tuple(worker.worker_id for worker in told[text])
        for text in (most, *sorted(told.keys() - {most}))
    }
    return rules[most], wrong, groups


def _has_several_cores(server: Mapping[str, Any], known: int) -> bool:
    """Return whether requests to this server must name a rank; a server with one core may refuse such a request.

    known: number of its cores in the fleet. More may still join, so the number that the server announced counts, too.
    """
    return max(known, int((server.get("facts") or {}).get("ranks") or 0)) > 1


def _facts(worker: WorkerView) -> Mapping[str, Any]:
    return (worker.server or {}).get("facts") or {}


def _max_context(worker: WorkerView) -> int:
    limit = worker.record.get("max_model_len")
    return min(limit, MAX_MODEL_LEN) if isinstance(limit, int) and limit > 0 else MAX_MODEL_LEN
