"""The table of current figures in tests/bench/README.md, from results.json.

A figure has the case that it is of, the bound that holds for it, the commit that was measured, and the machine.
"""

from __future__ import annotations

import json
from pathlib import Path

README = Path(__file__).with_name("README.md")
FILE = Path(__file__).with_name("results.json")
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def table() -> str:
    """Return a Markdown table with a row for each case, and the machines in words."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    lines = ["| bench | case | figure | bound | commit | machine |\n|---|---|---|---|---|---|\n"]
    for bench, cases in found["results"].items():
        name = f"[{bench}](#{bench})"
        for case, of in cases.items():
            machine = of["machine"]
            assert machine in found["machines"], f"{bench}: the machine {machine!r} is not described"
            lines.append(f"| {name} | {case} | {of['figure']} | {of['bound']} | {of['commit']} | {machine} |\n")
            name = ""
    machines = "".join(f"- {name}: {words}\n" for name, words in found["machines"].items())
    return f"{''.join(lines)}\n{machines}"


def page() -> str:
    """Return the README with the table of today between its marks. Raises ValueError if it has no marks."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after
