"""The findings of checks, and how they are printed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

from warmfleet.cli.terminal.output import Tone, Toned, text_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.cli.terminal.progress import Progress

ALL_WELL, FAULTS, NOT_CHECKED = 0, 1, 2
WIDTH = 8  # characters of the column with the state


class State(StrEnum):
    """The state of a finding; the value is the word that is printed."""

    OK = "ok"
    NOTE = "note"  # no fault; the remedy says what would work better
    FAULT = "FAULT"
    SKIPPED = "skipped"  # a fault above, or missing rights, made this check impossible
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
    """The result of a check. check: a stable word for scripts. remedy: what to do; empty if nothing needs doing."""

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
    """All findings in order, each with the part of the report it belongs to; printed as they come, unless ``quiet``.

    faults_only: only faults and crashed checks are printed, each under the heading of its part. secrets: texts that are
    never printed, even if an error message quotes them. busy: shows the running step while it takes time.
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
        """Begin a part of the report that has this heading."""
        self._part = self._safe(name)
        if not self.faults_only:
            self._heading()

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            safe = replace(finding, detail=self._safe(finding.detail), remedy=self._safe(finding.remedy))
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
        """Show a step that takes a while."""
        if self.busy is not None:
            self.busy.step(self._safe(text))

    @property
    def status(self) -> int:
        """The exit status: 0 if no fault was found; 1 if one was; 2 if none was, but a check crashed."""
        states = {finding.state for _, finding in self.found}
        if State.FAULT in states:
            return FAULTS
        return NOT_CHECKED if State.BROKEN in states else ALL_WELL

    def summary(self) -> str:
        counts = Counter(finding.state for _, finding in self.found)
        words = {
            State.FAULT: "fault" if counts[State.FAULT] == 1 else "faults",
            State.NOTE: "note" if counts[State.NOTE] == 1 else "notes",
            State.OK: "ok",
            State.SKIPPED: "skipped",
            State.BROKEN: "broken (a bug of this command: please report it)",
        }
        return ", ".join(f"{counts[state]} {word}" for state, word in words.items() if counts[state]) + "."

    def as_json(self) -> str:
        rows = [{"part": part, **asdict(finding), "state": finding.state.lower()} for part, finding in self.found]
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
        """Return the text with *** in place of secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text
