"""Tokenizers that workers bring are tried in real processes; a harmful one never reaches the replica."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.support.engines.simulated import simulated, tokenizer_json
from tests.support.polling import poll
from tests.support.replicas.replica import replica
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity
from warmfleet.prompt.request import Request, parse
from warmfleet.prompt.tokenizer import Encoder
from warmfleet.untrusted import tokenizer_trial
from warmfleet.untrusted.render_process import Child
from warmfleet.untrusted.tokenizer_trial import Encoders, Refused
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

REAL = tokenizer_json(argparse.__file__, 1_000).encode()
END = "<|end|>"


def letters(normalizer: Normalizer | None = None, pre_tokenizer: PreTokenizer | None = None) -> bytes:
    """A tokenizer.json with printable ASCII as its vocabulary, and these parts."""
    tokenizer = Tokenizer(models.BPE({chr(code): at for at, code in enumerate(range(33, 127))}, []))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer.to_str().encode()


def raw(**parts: Any) -> bytes:
    """``letters`` with parts in the form of a file: the library would refuse to build them."""
    return json.dumps(json.loads(letters()) | parts).encode()


def split(pattern: str, *, words: bool = False) -> bytes:
    """A tokenizer with this pattern. words: its model is of a kind that fastokens does not take."""
    tokenizer = Tokenizer.from_str(letters().decode())
    if words:
        tokenizer.model = models.WordLevel({"[UNK]": 0, "b": 1}, "[UNK]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return tokenizer.to_str().encode()


def scripted(special: str) -> bytes:
    """A tokenizer of words, with a special token."""
    tokenizer = Tokenizer.from_str(split(r"\s+", words=True).decode())
    tokenizer.add_special_tokens([special])
    return tokenizer.to_str().encode()


def billions() -> bytes:
    """A tokenizer with an id for which the library makes a table of 16 GB."""
    said = json.loads(REAL)
    said["added_tokens"].append(said["added_tokens"][0] | {"id": 4 * 10**9, "content": "<far>"})
    return json.dumps(said).encode()


TEXT, TOKEN = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "X", "type_id": 0}}


def adding(pieces: list[Any], known: dict[str, Any]) -> dict[str, Any]:
    """A post-processor that turns a text into ``pieces``."""
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": known}


def charsmap(text: bytes) -> bytes:
    """A table of SentencePiece with this one replacement."""
    content = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + text + b"\0").decode()
    return raw(normalizer={"type": "Precompiled", "precompiled_charsmap": content})


def grows(*contents: str) -> bytes:
    return letters(normalizers.Sequence([normalizers.Replace(content[0], content) for content in contents]))


X = {"X": {"id": "X", "ids": [0], "tokens": ["X"]}}
HOSTILE = {
    "eight times ten": (grows(*["a" * 10] * 8), "may make 100000000 characters of one"),
    "a rare character": (grows("\ue000" + "x" * 10**6), "may make 1000001 characters of one"),
    "out of nothing": (letters(normalizers.Replace(Regex("(?=\ue000)"), "x" * 100)), "may make 101"),
    "in front": (letters(normalizers.Prepend("x" * 100)), "may make 101"),
    "a table": (charsmap(b"x" * 1000), "may make 1000"),
    "ever more bytes": (
        letters(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel() for _ in range(24)])),
        "may make 16777216",
    ),
    "an id of billions": (billions(), "limit of its trial: crash"),
    "a pattern without end": (split("(a+)+[b]"), "retry-limit"),
    "of letters of its own": (split("(q+)+[b]"), "fails on a long text"),
    "an unknown special token": (raw(post_processor=adding([TOKEN, TEXT], {})), "no entry found"),
    "a thousand special tokens": (raw(post_processor=adding([TOKEN] * 1000 + [TEXT], X)), "adds 1000 tokens"),
    "no length": (raw(pre_tokenizer={"type": "FixedLength", "length": 0}), "non-zero"),
    "no tokenizer": (b'{"model": 1}', "not a tokenizer"),
    "no text": (b"\xff", "not a tokenizer"),
}

SLOW = {
    "a quadratic pattern": (split(r"[\s\S](?=[\s\S]*\x{e000})|[\s\S]"), "repeated"),
    "counts of counts": (split("((((a{999}){999}){999}){999})"), "repeated"),
    "a text many times": (raw(post_processor=adding([TEXT] * 20_000, {})), "limit of its trial: time"),
}


#: The program of a trial, until it waits for a tokenizer.
TRIAL = """
import psutil
from warmfleet.untrusted import render_child, trial_child
render_child.read_request = lambda: print(psutil.Process().num_threads())
trial_child.main()
"""


def test_a_trial_starts_no_thread_for_each_core() -> None:
    """The address space of a thread for each of 8 cores would be more than a trial may have."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", TRIAL], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "1\n"


@pytest.fixture
def encoders() -> Iterator[Encoders]:
    with ThreadPoolExecutor(1) as executor:
        yield Encoders(executor)


async def refusal(encoders: Encoders, content: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        await encoders.take(content, END, trusted=False)
    return caught.value


async def test_a_tokenizer_that_would_end_or_stall_a_replica_is_refused(encoders: Encoders) -> None:
    for content, reason in HOSTILE.values():
        assert reason in str(await refusal(encoders, content))


@pytest.mark.long(minutes=1, shows="tokenizers that are too slow are refused as fatal ones are")
async def test_a_tokenizer_that_is_slow_on_long_texts_is_refused(encoders: Encoders) -> None:
    for content, reason in SLOW.values():
        assert reason in str(await refusal(encoders, content))


@pytest.mark.parametrize("content", [REAL, scripted(END)], ids=["fast", "slow"])
async def test_a_tokenizer_that_passes_encodes_as_in_its_trial(encoders: Encoders, content: bytes) -> None:
    here = Encoder.load(content)
    encoder, cuts = await encoders.take(content, f"{{{{ x }}}}{END}", trusted=False)
    assert encoder.fast == here.fast == (content == REAL)
    assert (encoder.name, encoder.affixes) == (here.name, here.affixes)
    expected = here.cuts(END)
    assert (cuts.separators, cuts.spaces) == (expected.separators, expected.spaces) != ((), False)
    text = f"Hello, wörld {END}\n" * 300
    assert encoder.whole(text) == here.whole(text)
    again, _ = await encoders.take(content, "", trusted=False)
    assert again is encoder


async def test_a_refusal_is_remembered_for_a_while(encoders: Encoders, monkeypatch: pytest.MonkeyPatch) -> None:
    content, started, start = HOSTILE["a rare character"][0], [], Child.start

    async def counted(*args: Any) -> Child:
        started.append(args)
        return await start(*args)

    monkeypatch.setattr(Child, "start", counted)
    monkeypatch.setattr(tokenizer_trial, "AGAIN_S", 0.5)
    first = await refusal(encoders, content)
    second = await refusal(encoders, content)
    assert str(second) == str(first)
    assert 0 < second.again_s < first.again_s
    assert len(started) == 1
    await asyncio.sleep(second.again_s)
    await refusal(encoders, content)
    assert len(started) == 2


@pytest.mark.parametrize("later_s", [0, 0.2])
async def test_a_cancelled_trial_leaves_no_process(encoders: Encoders, later_s: float) -> None:
    before = set(psutil.Process().children())
    task = asyncio.ensure_future(encoders.take(SLOW["a quadratic pattern"][0], END, trusted=False))
    await poll(lambda: set(psutil.Process().children()) - before, what="the process of the trial")
    await asyncio.sleep(later_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not set(psutil.Process().children()) - before


async def test_a_worker_with_such_a_tokenizer_is_routed_to_by_load(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[bytes] = []
    judged = Encoders._judged

    async def counted(self: Encoders, name: str, content: bytes, template: str) -> tokenizer_trial.Verdict:
        begun.append(content)
        return await judged(self, name, content, template)

    monkeypatch.setattr(Encoders, "_judged", counted)
    settings: dict[str, Any] = {"approved_templates": (), "load_retry_s": 0.0, "identity_wait_s": 0.0}
    content = HOSTILE["eight times ten"][0]
    monkeypatch.setattr(PromptTokenizer, "artifacts", lambda _: {"tokenizer.json": content})
    async with simulated(valkey_url, model), replica(valkey_url, model, **settings) as router:

        async def routable() -> bool:
            return any(worker.routable for worker in await router.fleet.workers.read())

        await poll(routable, what="the worker is routed to")

        async def refused() -> bool:
            return await router.metric('warmfleet_task_failures_total{task="identity"}') > 0

        await poll(refused, what="the tokenizer is refused")
        status, _, _ = await router.post({"model": model, "prompt": "x", "max_tokens": 1})
        assert status == 200
        assert await router.metric('warmfleet_load_only_requests_total{reason="no_identity"}') >= 1
    assert begun == [content], "not at every reading"
    assert "may make 100000000 characters of one" in caplog.text


# ------------------------------------------------ faults that a trial cannot find


@pytest.mark.parametrize("words", [False, True], ids=["fast", "slow"])
async def test_a_text_on_which_a_tokenizer_fails_is_routed_by_load(encoders: Encoders, *, words: bool) -> None:
    content = split(r"([\x{e000}-\x{e0ff}]+)+[b]", words=words)
    encoder, cuts = await encoders.take(content, "", trusted=False)
    assert encoder.fast != words
    with ThreadPoolExecutor(1) as executor:
        identity = Identity(encoder, None, {}, executor, Trie(10**6), cuts)
        for inline in (10**6, 0):
            for text, reason in (("\ue005" * 40 + "xb", "tokenizer"), ("b\ud800", "unicode")):
                with pytest.raises(NotReproducible) as caught:
                    await identity.token_ids(completion(text), inline)
                assert caught.value.reason == reason
            assert len((await identity.token_ids(completion("ab"), inline))[0]) > 0


def completion(text: str) -> Request:
    return replace(parse("completions", b'{"prompt": "x"}'), prompts=[text])


@pytest.mark.parametrize("case", ["a pattern without end", "an unknown special token", "no length", "no tokenizer"])
def test_a_trusted_tokenizer_raises_no_panic(case: str) -> None:
    with pytest.raises(ValueError, match=r"fails on a text|not a tokenizer"):
        Encoder.load(HOSTILE[case][0])
