"""The most used prefixes are found among many prompts, in bounded memory; unused ones are forgotten."""

from __future__ import annotations

import gc
import random
from array import array

from warmfleet.prompt.cut_points import Cuts
from warmfleet.prompt.popular_prefixes import HALF_LIFE_S, MAX_COUNTED, PopularPrefixes
from warmfleet.prompt.prefix_trie import Prompt, Reading, Trie, whole

LONG = 1_024


def words(rng: random.Random, pieces: int) -> str:
    """A text of so many pieces and a short rest."""
    return "".join(f" {rng.getrandbits(40):010x}z" for _ in range(pieces * LONG // 12 + 8))


def codes(text: str) -> array[int]:
    return array("I", map(ord, text))


class CountedTexts:
    """Texts that are read into a trie and counted. Each character is a token."""

    def __init__(self, limit_bytes: int = 2**26) -> None:
        self.trie = Trie(limit_bytes)
        self.now = 0.0
        self.uses = PopularPrefixes(lambda: self.now)
        self.rng = random.Random(1)

    def ask(self, text: str, salt: str | None = None, key: str = "k") -> Prompt:
        lora = ("adapter", "/path") if salt == "lora" else None
        found = self.trie.read(text, Reading("characters", codes, Cuts((), spaces=True), salt=salt, lora=lora))
        self.uses.note(found, key)
        return found

    def tops(self, limit: int = 3) -> list[str]:
        return ["".join(map(chr, whole(node)[0])) for node in self.uses.most_used(limit)]


def test_the_most_used_come_first_and_end_where_prompts_part() -> None:
    texts = CountedTexts()
    hot, warm, cold = (words(texts.rng, 3) for _ in range(3))
    for times, prefix in ((20, hot), (9, warm), (1, cold)):
        for _ in range(times):
            texts.ask(prefix + words(texts.rng, 1))
    found = texts.tops()
    assert len(found) == 2, "a prompt that was asked once is no common prefix"
    for text, prefix in zip(found, (hot, warm), strict=True):
        assert prefix.startswith(text)
        assert len(text) > len(prefix) - 1.2 * LONG
    assert texts.tops(1) == found[:1]


def test_a_prefix_of_a_chosen_one_is_not_chosen_besides() -> None:
    texts = CountedTexts()
    base, more = words(texts.rng, 3), words(texts.rng, 3)
    for _ in range(20):
        texts.ask(base + more + words(texts.rng, 1))
    for _ in range(9):
        texts.ask(base + words(texts.rng, 1))
    (found,) = texts.tops()
    assert found.startswith(base)


def test_a_prefix_keeps_its_count_when_another_prompt_parts_in_its_middle() -> None:
    texts = CountedTexts()
    hot = words(texts.rng, 4)
    for _ in range(9):
        texts.ask(hot + " short")
    texts.ask(hot[: 2 * LONG + 600] + words(texts.rng, 1))
    (found,) = texts.tops(1)
    assert len(found) > len(hot) - 1.2 * LONG
    assert texts.uses._counts[texts.uses.most_used(1)[0].marked()] == 8.0


def test_salt_and_adapter_are_part_of_a_prefix() -> None:
    texts = CountedTexts()
    hot = words(texts.rng, 3)
    for salt in (None, "tenant", "lora"):
        for _ in range(5):
            texts.ask(hot + words(texts.rng, 1), salt)
    found = {whole(node)[1:] for node in texts.uses.most_used(9)}
    assert found == {(None, None), ("tenant", None), ("lora", ("adapter", "/path"))}


def test_it_is_bounded_and_the_hot_one_survives_thousands_of_conversations() -> None:
    texts = CountedTexts()
    hot, largest = words(texts.rng, 2), 0
    for number in range(2_000):
        if number % 20 == 0:
            texts.ask(hot + words(texts.rng, 0))
        conversation = f"{number:011d}z" * 90
        for turn in range(2):
            texts.ask(conversation + " and then" * (turn + 1))
        largest = max(largest, len(texts.uses))
    assert largest <= MAX_COUNTED + 32
    assert [hot.startswith(text) for text in texts.tops(1)] == [True]


def test_prefixes_that_are_no_longer_used_are_forgotten() -> None:
    texts = CountedTexts()
    hot = words(texts.rng, 2)
    for _ in range(1_000):
        texts.ask(hot + words(texts.rng, 0))
    texts.now += 5 * HALF_LIFE_S
    assert texts.tops()
    texts.now += 30 * HALF_LIFE_S
    assert texts.tops() == []
    texts.ask(hot + words(texts.rng, 0))
    texts.ask(hot + words(texts.rng, 0))
    assert texts.tops(), "a new day"


def test_prefixes_that_the_trie_evicted_are_forgotten() -> None:
    texts = CountedTexts(limit_bytes=150_000)
    hot = words(texts.rng, 2)
    for _ in range(3):
        texts.ask(hot + words(texts.rng, 0))
    assert len(texts.tops()) == 1
    for _ in range(100):
        texts.ask(words(texts.rng, 1))
    gc.collect()
    assert (texts.tops(), len(texts.uses)) == ([], 0)


def test_a_new_identity_empties_the_counts() -> None:
    texts = CountedTexts()
    hot = words(texts.rng, 2)
    for _ in range(5):
        texts.ask(hot + words(texts.rng, 0))
    texts.ask("short", key="another")
    assert texts.tops() == []
