"""``warmfleet demo``: the four states of a cached prefix, and the same conversations routed by two policies."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import httpx

from warmfleet.cli import agents_demo
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.chat import Answer, Chat, system, user, words
from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.stack import Plan, Stack
from warmfleet.cli.local.states import Walk
from warmfleet.cli.terminal.output import Table, Tone, Toned, show, text_for
from warmfleet.cli.terminal.progress import Progress

if TYPE_CHECKING:
    import argparse

SEED = 2026
BLOCKS = 1_024  # size of each engine's cache in blocks of 16 tokens: few enough to fill it in seconds
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 600, 200, 48
CONVERSATIONS_PER_SYSTEM_PROMPT = 4
THINK_SECONDS = 0.3  # length of the mean pause between an answer and the next turn
START_SPREAD_SECONDS = 2.0


@dataclass(frozen=True)
class Work:
    """The work of the comparison: conversations whose users read each answer for a moment before the next turn."""

    conversations: int
    turns: int


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0 if every state passed and prefix-aware routing computed fewer prompt tokens and answered
    sooner, else 1. Raises CommandError if a request fails.
    """
    if options.agents:
        return agents_demo.run(options)
    try:
        return _show(options)
    except httpx.HTTPStatusError as error:
        answer = error.response
        raise CommandError(f"{error.request.url} answered {answer.status_code}: {answer.text[:500]}") from error
    except httpx.HTTPError as error:
        raise CommandError(f"a request of the demo failed: {str(error) or type(error).__name__}") from error


def _show(options: argparse.Namespace) -> int:
    work = Work(options.conversations, options.turns)
    plan = Plan(engines=EngineOptions(count=options.engines, blocks=BLOCKS))
    with Progress() as progress:
        with Stack(plan, progress.say, progress.step) as stack:
            progress.say("\nthe four states of a cached prefix")
            passed = asyncio.run(four_states(stack, progress))
        results = {}
        for policy in ("cost", "round_robin"):
            progress.say(f"\n{work.conversations} conversations of {work.turns} turns, policy {policy}")
            with Stack(replace(plan, policy=policy), progress.say, progress.step) as stack:
                results[policy] = asyncio.run(converse(stack, work, progress))
    better, sentence = verdict(results)
    end = Toned("all passed", Tone.GOOD) if passed and better else Toned("FAIL: see above", Tone.BAD)
    show(sys.stdout, ["", compare(results), "", (_word(better), f"  {sentence}"), "", end])
    return 0 if passed and better else 1


def verdict(results: dict[str, list[Answer]]) -> tuple[bool, str]:
    """Return whether prefix-aware routing computed fewer tokens and answered sooner, and a sentence about both."""
    saved = computed(results["round_robin"]) - computed(results["cost"])
    sooner = first_token(results["cost"]) < first_token(results["round_robin"])
    tokens = f"prefix-aware routing computed {abs(saved)} tokens {'less' if saved > 0 else 'more'}"
    if sooner:
        return saved > 0, f"{tokens} and answered sooner"
    return False, f"{tokens}, but answered later: was the machine busy? The two policies ran one after the other"


async def four_states(stack: Stack, progress: Progress) -> bool:
    """Take a prefix from cold start to eviction and recovery (``Walk``), print each verdict; True if all passed."""
    progress.step("walking through the four states")
    chat = Chat(stack.names[0])
    try:
        walk = Walk(stack, chat, random.Random(SEED))
        verdicts = []
        async for verdict in walk.states():
            line = (_word(verdict.passed), f"  {verdict.state}: {verdict.evidence}")
            progress.say(text_for(sys.stdout, [line]))
            verdicts.append(verdict.passed)
        return all(verdicts)
    finally:
        await chat.close()


async def converse(stack: Stack, work: Work, progress: Progress) -> list[Answer]:
    """Hold the conversations; return all answers. The seed is fixed, so each policy gets the same conversations."""
    chat = Chat(stack.names[0])
    rng = random.Random(SEED)
    groups = -(-work.conversations // CONVERSATIONS_PER_SYSTEM_PROMPT)
    prompts = [words(rng, SYSTEM_TOKENS) for _ in range(groups)]
    answered = count(1)

    def note_answer() -> None:
        progress.step("conversations", next(answered), work.conversations * work.turns)

    async def conversation(number: int) -> list[Answer]:
        own = random.Random(SEED + 1 + number)
        messages = [system(prompts[number % groups])]
        answers = []
        await asyncio.sleep(own.uniform(0, START_SPREAD_SECONDS))
        for _ in range(work.turns):
            messages.append(user(words(own, TURN_TOKENS)))
            answers.append(await chat.send(stack.address, messages, ANSWER_TOKENS))
            note_answer()
            messages.append({"role": "assistant", "content": answers[-1].text})
            await asyncio.sleep(own.uniform(0, 2 * THINK_SECONDS))
        return answers

    try:
        parts = await asyncio.gather(*map(conversation, range(work.conversations)))
    finally:
        await chat.close()
    return [answer for part in parts for answer in part]


def compare(results: dict[str, list[Answer]]) -> Table:
    """Make the table that compares both policies, from the engines' own counts of tokens."""
    rows: list[tuple[object, ...]] = []
    for policy, answers in results.items():
        prompt = sum(answer.prompt_tokens for answer in answers)
        times = sorted(answer.first_token_s for answer in answers)
        rows.append(
            (
                policy,
                len(answers),
                f"{1 - computed(answers) / prompt:.1%}",
                computed(answers),
                f"{1_000 * statistics.fmean(times):.0f} ms",
                f"{1_000 * times[int(0.9 * len(times))]:.0f} ms",
            )
        )
    return Table(("POLICY", "ANSWERS", "HIT RATIO", "TOKENS COMPUTED", "MEAN TTFT", "P90 TTFT"), rows)


def computed(answers: list[Answer]) -> int:
    """Sum the prompt tokens that engines had to compute."""
    return sum(answer.computed_tokens for answer in answers)


def first_token(answers: list[Answer]) -> float:
    """Return the mean time to first token in seconds."""
    return statistics.fmean(answer.first_token_s for answer in answers)


def _word(passed: bool) -> Toned:
    return Toned("pass", Tone.GOOD) if passed else Toned("FAIL", Tone.BAD)
