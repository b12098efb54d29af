"""What a check found, and how findings are printed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

from warmfleet.cli.terminal.output import Tone, Toned, text_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.cli.terminal.progress import Progress

ALL_WELL, FAULTS, NOT_CHECKED = 0, 1, 2
WIDTH = 8  # of the column with the state


class State(StrEnum):
    """The value is the word that is printed."""

    OK = "ok"
    NOTE = "note"  # it works; the remedy says how it would work better
    FAULT = "FAULT"
    SKIPPED = "skipped"  # a fault that is told above, or missing rights, made this check impossible
    BROKEN = "broken"  # the check itself failed, which is a bug of the doctor


TONES = {
    State.OK: Tone.GOOD,
    State.NOTE: Tone.MIND,
    State.FAULT: Tone.BAD,
    State.SKIPPED: Tone.FAINT,
    State.BROKEN: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. check: a stable word for scripts. remedy: what to do; empty where there is nothing."""

    check: str
    state: State
    detail: str
    remedy: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, State.OK, detail)


def note(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, State.NOTE, detail, remedy)


def fault(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, State.FAULT, detail, remedy)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, State.SKIPPED, why)


@dataclass
class Report:
    """All findings in order, by the part that they belong to. Findings are printed as they come, unless ``quiet``.

    faults_only: only faults are printed, and checks that failed by themselves, each under the heading of its part.
    secrets: texts that are never printed, whatever an error message quotes. busy: shows what takes a while now.
    """

    out: TextIO = field(default_factory=lambda: sys.stdout)
    busy: Progress | None = None
    quiet: bool = False
    faults_only: bool = False
    secrets: tuple[str, ...] = ()
    found: list[tuple[str, Finding]] = field(default_factory=list)
    _part: str = ""
    _headed: str | None = None  # the last part whose heading was printed

    def part(self, name: str) -> None:
        """What is checked from now on, as a heading."""
        self._part = self._safe(name)
        if not self.faults_only:
            self._heading()

    def add(self, findings: Iterable[Finding]) -> None:
        for one in findings:
            safe = Finding(one.check, one.state, self._safe(one.detail), self._safe(one.remedy))
            self.found.append((self._part, safe))
            if self.faults_only:
                if safe.state not in (State.FAULT, State.BROKEN):
                    continue
                if self._headed != self._part:
                    self._heading()
            self._line("  ", Toned(f"{safe.state:{WIDTH}}", TONES[safe.state]), f"{safe.check}: {safe.detail}")
            if safe.remedy:
                self._line(f"  {'':{WIDTH}}-> {safe.remedy}")

    def progress(self, text: str) -> None:
        """What takes a while now."""
        if self.busy is not None:
            self.busy.step(self._safe(text))

    @property
    def status(self) -> int:
        """0: no fault; 1: a fault; 2: no fault was found, but a check failed by itself."""
        states = {one.state for _, one in self.found}
        if State.FAULT in states:
            return FAULTS
        return NOT_CHECKED if State.BROKEN in states else ALL_WELL

    def summary(self) -> str:
        counts = {state: sum(one.state is state for _, one in self.found) for state in State}
        told = [f"{count} {word}" for word, count in _counted(counts) if count]
        return f"{', '.join(told)}."

    def as_json(self) -> str:
        rows = [{"part": part, **asdict(one), "state": one.state.lower()} for part, one in self.found]
        return json.dumps({"status": self.status, "findings": rows}, indent=2)

    def _heading(self) -> None:
        self._line("\n" if self._headed is not None else "", Toned(self._part, Tone.HEAD))
        self._headed = self._part

    def _line(self, *pieces: str | Toned) -> None:
        if self.quiet:
            return
        text = text_for(self.out, [pieces])
        if self.busy is not None:
            self.busy.say(text, self.out)
        else:
            print(text, file=self.out, flush=True)

    def _safe(self, text: str) -> str:
        """Without secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def _counted(counts: dict[State, int]) -> list[tuple[str, int]]:
    faults = counts[State.FAULT]
    return [
        ("fault" if faults == 1 else "faults", faults),
        ("notes" if counts[State.NOTE] != 1 else "note", counts[State.NOTE]),
        ("ok", counts[State.OK]),
        ("skipped", counts[State.SKIPPED]),
        ("broken (a bug of this command: please report it)", counts[State.BROKEN]),
    ]
