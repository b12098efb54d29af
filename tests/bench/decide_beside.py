"""This checkout's decide script beside that of another one: the bench ``decide --beside ../old``.

Both scripts get the same calls in the same run, in turns, so that other work on the machine hits both. Each script's
figure is its cheapest round. An older script gets the arguments that it knows.

    hot_625_over_other       CPU time of a decision with 64 workers and prompts of 625 blocks, ours over the other's
    workers_1024_over_other  the same with 1,024 workers and prompts without a chain
                             both without the decode terms; with _usual at the end with the default weights
    decisions, differing     random decisions that both made, each on its own copy of a fleet; how many answers (with
                             costs, to 2 us) were not the same
    keys_differing           how many left keys that were not the same
    differing_tiered         the same on fleets with tiers, if both scripts know these; and keys_differing_tiered
    ours_one_over_none       300 workers, the cost with one tier over that without tiers; with ten and with all; and the
                             same of the other script
    no_tiers_over_other      300 workers without tiers, ours over the other's
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import redis
from tests.bench.filled_store import BLOCK_TOKENS, SCHEME, SCRIPTS, FilledStore
from tests.bench.output import say

from warmfleet.fleet import Constants, QueueLimits, Weights
from warmfleet.fleet.constants import FIELDS, RECORD
from warmfleet.fleet.rows import ROW, Flag, LoadRow
from warmfleet.fleet.script_loader import SCRIPT_KEYS
from warmfleet.protocol.wire import Keys
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parents[2]
CONSTANTS_AT, SESSION_AT, ONLY_AT, ENDING_AT, SPLIT_AT = 2, 18, 19, 20, 21  # among decide's arguments
SESSION_FOUND_AT, LOADS_AT, LEG_AT = 13, 14, 15  # in its answer
NO_DECODES = Weights(decode_price=0.0, context_price=0.0)
CASES = {"hot_625_over_other": (64, 625, 40), "workers_1024_over_other": (1_024, 0, 20)}  # workers, blocks, calls
TIERED_WORKERS = 300
TIERED = {"none": 0, "one": 1, "ten": 10, "all": TIERED_WORKERS}  # workers with a tier
STANDING = 200  # open reservations while decisions are timed
CLOCK = "clock"  # a key with the time that both scripts see
NOW_S = 1_900_000_000
USUAL = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
EVERY_KEY = """local found = {}
for _, key in ipairs(redis.call("KEYS", "*")) do
  if not key:find(":load$") then
    found[#found + 1] = key
    found[#found + 1] = redis.call("DUMP", key)
  end
end
return found"""


@dataclass(frozen=True)
class Checkout:
    """A checkout's scripts, and how its decide takes arguments: an older one lacks the newest fields and arguments."""

    texts: dict[str, str]
    fields: list[str]
    record: str
    version: int

    @classmethod
    def read(cls, folder: Path) -> Checkout:
        code = """import json
from warmfleet.fleet import constants
from warmfleet.fleet.script_loader import script_text
texts = {name: script_text(name) for name in %r}
print(json.dumps([texts, constants.FIELDS, constants.RECORD.format, constants.VERSION]))"""
        paths = os.environ | {"PYTHONPATH": str(folder / "app")}
        done = subprocess.run([sys.executable, "-c", code % (SCRIPTS,)], env=paths, check=True, capture_output=True)
        return cls(*json.loads(done.stdout))

    @property
    def takes_session(self) -> bool:
        return "limits, session" in self.texts["decide"]

    @property
    def knows_tiers(self) -> bool:
        return "sets_key" in self.texts["decide"]

    @property
    def knows_roles(self) -> bool:
        return "replica.roles" in self.texts["decide"]

    def arguments(self, ours: list[Any]) -> list[Any]:
        """Return the arguments of this checkout's decide for the same decision."""
        packed, record = ours[CONSTANTS_AT], struct.Struct(self.record)
        _, *values = RECORD.unpack_from(packed)
        known = dict(zip((*FIELDS, "prices", "roles"), values, strict=True))
        counted = ("prices", "roles") if self.knows_roles else ("prices",)
        head = record.pack(self.version, *(known[name] for name in (*self.fields, *counted)))
        fitted = [*ours[:CONSTANTS_AT], head + packed[RECORD.size :], *ours[CONSTANTS_AT + 1 :]]
        if not self.knows_roles:
            del fitted[SPLIT_AT]
        if "only, ending" not in self.texts["decide"]:
            del fitted[ENDING_AT]
        if "local only" not in self.texts["decide"]:
            del fitted[ONLY_AT]
        return fitted if self.takes_session else fitted[:SESSION_AT] + fitted[SESSION_AT + 1 :]

    def answer(self, found: Any) -> Any:
        """Return an answer of this checkout's decide in the form of ours."""
        if not isinstance(found, list) or found[0] not in (b"BOOKED", b"KNOWN"):
            return found
        if not self.takes_session:
            found = [*found[:SESSION_FOUND_AT], b"", *found[SESSION_FOUND_AT:]]
        if not self.knows_tiers:
            found = [*found[:LOADS_AT], b"", *found[LOADS_AT:]]
        return found if self.knows_roles else [*found[:LEG_AT], b"", *found[LEG_AT:]]


def run(url: str, checkout: Path, *, quick: bool) -> dict[str, Any]:
    rounds, decisions = (2, 200) if quick else (30, 10_000)
    both = {"ours": Checkout.read(HERE), "other": Checkout.read(checkout)}
    sides = {name: Side(each) for name, each in both.items()}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for suffix, weights in (("", NO_DECODES), ("_usual", Weights())):
            ratios = []
            for order in (sides, dict(reversed(sides.items()))):  # the store that is filled first is 3 to 6 % dearer
                cost = timed(url, order, *case, rounds, weights)
                say(f"{name}{suffix}: {cost['ours']:.1f} us beside {cost['other']:.1f}")
                ratios.append(cost["ours"] / cost["other"])
            found[name + suffix] = round(geometric_mean(ratios), 3)
    answers, keys = differing(url, both, decisions)
    if all(each.knows_tiers for each in both.values()):
        found["differing_tiered"], found["keys_differing_tiered"] = differing(url, both, decisions, tiered=0.5)
    found |= with_tiers(url, both, rounds)
    return found | {"decisions": decisions, "differing": answers, "keys_differing": keys}


@dataclass(frozen=True)
class Side:
    """A script, in a fleet of which so many workers have a tier."""

    checkout: Checkout
    tiered: int = 0


def with_tiers(url: str, both: Mapping[str, Checkout], rounds: int) -> dict[str, float]:
    """Return the cost of decisions with few and with many tiers over that without any, for each script that knows
    tiers."""
    sides = {
        f"{name}_{tiers}": Side(checkout, tiered)
        for name, checkout in both.items()
        for tiers, tiered in TIERED.items()
        if checkout.knows_tiers
    }
    found: dict[str, list[float]] = {}
    for order in (sides, dict(reversed(sides.items()))):
        cost = timed(url, order, TIERED_WORKERS, 625, 40, rounds, Weights())
        say(", ".join(f"{name}: {us:.1f} us" for name, us in cost.items()))
        for name, us in cost.items():
            found.setdefault(name, []).append(us)
    means = {name: geometric_mean(values) for name, values in found.items()}
    return {
        f"{name}_over_none": round(us / means[name.partition("_")[0] + "_none"], 3)
        for name, us in means.items()
        if not name.endswith("_none")
    } | ({"no_tiers_over_other": round(means["ours_none"] / means["other_none"], 3)} if "other_none" in means else {})


def timed(
    url: str,
    sides: Mapping[str, Side],
    workers: int,
    blocks: int,
    calls: int,
    rounds: int,
    weights: Weights,
) -> dict[str, float]:
    """Return the CPU time of one call in us by side, of the cheapest of ``rounds``."""
    best = dict.fromkeys(sides, float("inf"))
    stores, chains = [], [b""]
    for db, side in enumerate(sides.values()):
        text, fit = side.checkout.texts.__getitem__, side.checkout.arguments
        stores.append(FilledStore(url, workers, db=db, text=text, fit=fit, weights=weights, tiered=side.tiered))
    for store in stores:  # with the same data
        if blocks:
            chains = store.prepare(blocks, 400_000)[0].chains
        else:
            store.client.flushdb()
            store.fleet(random.Random(11))
    rng = random.Random(5)

    def booked(store: FilledStore, some: list[bytes]) -> tuple[float, list[list[Any]]]:
        """Return the cost of a decision for each chain, and the calls that settle them."""
        names, commands = zip(*map(store.decide_args, some), strict=True)
        return store.burn(list(commands)), [store.settle_args(name) for name in names]

    for number in range(rounds):
        standing, some = rng.choices(chains, k=STANDING), rng.choices(chains, k=calls)
        ends = [booked(store, standing)[1] for store in stores]
        for name, store in sorted(zip(best, stores, strict=True), key=itemgetter(0), reverse=number % 2 == 1):
            cost, settles = booked(store, some)
            best[name] = min(best[name], cost)
            store.burn(settles)
        for store, settles in zip(stores, ends, strict=True):
            store.burn(settles)
    return best


def differing(url: str, checkouts: Mapping[str, Checkout], decisions: int, tiered: float = 0.0) -> tuple[int, int]:
    """Make random decisions with both scripts, each in a database of its own. tiered: share of workers with tiers.

    Returns the number of those whose answers differ, and of those after which keys differ.
    """
    fleets = [Twin(redis.Redis.from_url(url, db=db), each) for db, each in enumerate(checkouts.values())]
    answers = keys = 0
    for number in range(decisions):
        if number % 5 == 0:
            commands = random_fleet(random.Random(number), tiered)
            for fleet in fleets:
                fleet.fill(commands)
        call = random_call(random.Random(number), f"wf-{number:022d}", excludes=not tiered)
        ours, other = (fleet.decide(call, number) for fleet in fleets)
        if not same(ours[0], other[0]):
            answers += 1
            if answers <= 3:
                say(f"decision {number}: {ours[0]} beside {other[0]}"[:2_000])
        keys += not same(ours[1], other[1])
    return answers, keys


KEYS = Keys("beside")


class Twin:
    """A small fleet for one script, which sees a clock that stands still during a call."""

    def __init__(self, client: Any, checkout: Checkout) -> None:
        self.client, self.checkout = client, checkout
        self.sha = client.script_load(
            checkout.texts["decide"].replace('call("TIME")', f'call("HMGET", "{CLOCK}", 1, 2)')
        )
        self.everything = client.register_script(EVERY_KEY)

    def fill(self, commands: list[tuple[Any, ...]]) -> None:
        self.client.flushdb()
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        pipe.execute()

    def decide(self, call: list[Any], number: int) -> tuple[Any, dict[bytes, bytes]]:
        """Return the answer and every key afterwards, dumped."""
        self.client.hset(CLOCK, mapping={"1": NOW_S + number % 5, "2": number * 7_919 % 1_000_000})
        keys = [getattr(KEYS, key) for key in SCRIPT_KEYS["decide"]]
        try:
            answer = self.client.evalsha(self.sha, len(keys), *keys, *self.checkout.arguments(call))
        except redis.ResponseError as error:
            answer = str(error).partition(" script:")[0]
        dumped = self.everything()
        return self.checkout.answer(answer), dict(zip(dumped[::2], dumped[1::2], strict=True)) | self.client.hgetall(
            KEYS.load
        )


def same(ours: Any, other: Any) -> bool:
    """Tell whether two answers are the same.

    The last digit of seconds may differ in texts such as ``0.1,2.25``, and so may the derived numbers of load rows. An
    older script tells fewer terms of a cost, and less of a choice: the rest must be 0 or empty.
    """
    if isinstance(ours, list | tuple) and isinstance(other, list | tuple):
        return len(ours) >= len(other) and all(map(same, ours, other)) and not any(ours[len(other) :])
    if isinstance(ours, dict) and isinstance(other, dict):
        return ours.keys() == other.keys() and all(same(ours[key], other[key]) for key in ours)
    if ours == other or not (isinstance(ours, bytes) and isinstance(other, bytes)):
        return bool(ours == other)
    if len(other) > ROW.size and other[ROW.size :].endswith(b".0"):
        return ours[: ROW.size] == other[: ROW.size] and ours.endswith(other[ROW.size :])
    try:
        pairs = zip_longest(map(float, ours.split(b",")), map(float, other.split(b",")), fillvalue=0.0)
        return all(abs(one - two) <= 2e-6 + 1e-9 * abs(one) for one, two in pairs)
    except ValueError:
        return False


def chain_of(rng: random.Random) -> bytes:
    """Return one of few chains of 40 blocks, which share beginnings."""
    heads = [bytes([50 + rng.randrange(part)]) for part in (1, 2, 3, 4)]
    return b"".join(b"".join(heads[: 1 + at // 10]).ljust(6, b"-") + at.to_bytes(2, "big") for at in range(40))


def random_fleet(rng: random.Random, tiered: float = 0.0) -> list[tuple[Any, ...]]:
    """Return the commands that write a fleet: loads, flags, heartbeats and cached blocks of all kinds.

    tiered: share of the workers that have tiers, most of which have gaps. Then all workers are candidates: a tier's
    match is a lower bound, which the blocks of others may raise.
    """
    now = NOW_S * 1_000
    ticked, grace, median = rng.choice((100, 2_400, 9_000)), rng.choice((-1, 9_000)), rng.choice((0, 9_000))
    commands: list[tuple[Any, ...]] = [("SET", KEYS.tick, f"{now - ticked} {now + grace} {median}")]
    idle, alike = rng.random() < 0.3, rng.random() < 0.3
    for slot in rng.sample(range(1, 900), rng.choice((1, 2, 3, 6, 12, 40))):
        name, flags = f"w{slot}.0", int(USUAL)
        for flag in Flag:
            if rng.random() < 0.06 and (flag is Flag.CLOSED if tiered else flag is not Flag.SETS):
                flags ^= flag
        busy, foreign = not idle and rng.random() < 0.7, rng.random() < 0.3
        row = LoadRow(
            epoch=1, slot=slot, flags=flags, scheme=rng.choice((SCHEME, SCHEME, SCHEME, SCHEME if tiered else 8)),
            prefill_tokens=rng.choice((0, rng.randint(1, 20_000))) if busy else 0,
            decode_tokens=rng.randint(0, 200_000) if busy else 0, in_flight=rng.randint(0, 3) if busy else 0,
            speed_tps=10_000 if alike else rng.choice((0, 1_000, 90_000, rng.randint(8_000, 12_000))),
            foreign_prefill_tokens=rng.randint(0, 15_000) if foreign else 0,
            foreign_decode_tokens=rng.randint(0, 90_000) if foreign else 0,
            blocks=0 if alike else rng.randint(0, 11_000), capacity_blocks=rng.choice((0, 10_000, 10_000, 10_000)),
            busy_share=0 if idle else rng.randint(0, 65_535), evicted=0 if alike else rng.randint(0, 3),
            under_way_tokens=rng.randint(0, 9_000) if busy else 0,
            since_ms=rng.choice((0, (now + rng.randint(-60_000, 2_000)) % 2**32)),
        )  # fmt: skip
        has_tiers = rng.random() < tiered
        if has_tiers:
            row = replace(row, flags=row.flags | Flag.SETS)
        commands.append(("HSET", KEYS.load, name, row.pack(name)))
        if rng.random() < 0.95 or tiered:
            age = rng.choice((0, 5_000, 14_000, 30_000))
            commands.append(("ZADD", KEYS.alive, now - (0 if tiered else age), name))
        commands.append(("HSET", KEYS.servers, name[:-2], f'{{"nonce":"n","url":"http:\\/\\/10.0.0.{slot}"}}'))
        chain, depth = chain_of(rng), rng.choice((0, 0, 5, 20, 40, rng.randint(0, 40)))
        for at in range(0, 8 * depth, 8):
            if flags & Flag.CLOSED or rng.random() < 0.95 or (tiered and at == 0):
                commands.append(("SADD", KEYS.prefix + f"s:{slot}", chain[at : at + 8]))
                commands.append(("SADD", KEYS.prefix.encode() + b"b:" + chain[at : at + 8], slot))
        if has_tiers:
            commands += random_tiers(rng, slot, depth)
    return commands


def random_tiers(rng: random.Random, slot: int, depth: int) -> list[tuple[Any, ...]]:
    """Return the commands that write one or two tiers of a worker whose GPU holds so many blocks of a chain."""
    commands: list[tuple[Any, ...]] = []
    for kind, name in ((1, "cpu"), (2, "disk"))[: rng.choice((1, 1, 2))]:
        tier, price = 1_000 * kind + slot, rng.choice((1e-6, 1e-5, 1e-4, 1e-3))
        commands.append(("HSET", KEYS.sets, f"w{slot}.0:{name}", struct.pack(">IIdB", tier, slot, price, kind)))
        commands.append(("HSET", KEYS.tiers, tier, struct.pack(">IdBI", slot, price, kind, 100)))
        chain, held = chain_of(rng), rng.choice((0, depth, 40, rng.randint(0, 40)))
        first, last = sorted((rng.randint(0, 60), rng.randint(0, 60)))  # blocks of a gap
        for at in range(0, 8 * held, 8):
            if not first <= at // 8 < last:
                commands.append(("SADD", KEYS.prefix + f"s:{tier}", chain[at : at + 8]))
                commands.append(("SADD", KEYS.prefix.encode() + b"b:" + chain[at : at + 8], tier))
    return commands


def random_call(rng: random.Random, name: str, *, excludes: bool = True) -> list[Any]:
    """Return the arguments of a decision. excludes: some exclude workers."""
    chain = chain_of(rng)[: 8 * rng.choice((40, 40, 33, 12, 1, 0))]
    prompt = len(chain) // 8 * BLOCK_TOKENS + rng.choice((1, 15, 3_000))
    usual = rng.choice((1e-7, 1e-6)), rng.choice((0, 0, 200))
    weights = replace(NO_DECODES, decode_s_per_token=usual[0], min_match_tokens=usual[1])
    constants = Constants(
        weights=weights, limits=QueueLimits(rng.choice((0.0, 0.05, 0.5, 5.0)), tickets=rng.choice((1, 9))),
        block_tokens={SCHEME: BLOCK_TOKENS},
        label_prices=dict.fromkeys(range(1, 900, 3), 0.1) if rng.random() < 0.15 else {},
    )  # fmt: skip
    some = ",".join(f"w{slot}.0" for slot in rng.sample(range(1, 900), 450))
    excluded = some if rng.random() < 0.15 and excludes else ""
    policy = "cost" if rng.random() < 0.75 else rng.choice(sorted(POLICIES))
    rare = rng.random
    return [
        KEYS.prefix, name, constants.packed, policy, prompt, prompt + rng.choice((0, 300, 40_000)),
        rng.choice((0, 0, 0, 1, 2)), excluded, rng.getrandbits(31), rng.choice((0, 0, 0, 128)),
        some if rare() < 0.2 else "", rng.choice((0, 0, 0, 0.3, 3)), rng.choice((b"", b"tenant-a", b"tenant-b")),
        rng.randrange(3), rng.choice((0, 900)), rng.choice((0, 1, 2)), "", "", "", "", "",
        rng.choice((0, 1, 2)),
        *((SCHEME, BLOCK_TOKENS, chain) if rare() < 0.9 else ()),
        *((8, 2 * BLOCK_TOKENS, chain[: len(chain) // 16 * 8]) if rare() < 0.2 else ()),
    ]  # fmt: skip
