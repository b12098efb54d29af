"""The command line: accepted words, printed tables, and errors in one line."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.replicas.fixed_answers import replica

from warmfleet.__main__ import main
from warmfleet.cli import explain, replicas, serve, up, workers
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local import engines, ports
from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.parser import build_parser
from warmfleet.cli.terminal.output import plain
from warmfleet.errors import BadArgument

if TYPE_CHECKING:
    from pathlib import Path

LOAD = dict.fromkeys(
    (
        "slot",
        "blocks",
        "capacity_blocks",
        "in_flight",
        "prefill_tokens",
        "foreign_prefill_tokens",
        "decode_tokens",
        "foreign_decode_tokens",
        "speed_tps",
    ),
    7,
)
TRUTH = {
    "lag_batches": 17,
    "lag_s": 1.25,
    "digest_age_s": None,
    "cause": "gap",
    "found": 3,
    "healed": 2,
    "resyncs": {"join": 1, "gap": 2},
}
WORKER = {
    "worker_id": "sim-1.0",
    "url": "http://127.0.0.1:9",
    "version": "vllm-0.32.0",
    "state": "unreachable",
    "draining": False,
    "routable": False,
    "moved_to": "",
    "proof": "url",
    "why": "routers get no answer at its URL (it does not answer)",
    "remedy": "make its URL reachable",
    "reason": "it does not answer",
    "cause": "",
    "suspect": "",
    "heartbeat_age_s": None,
    "load": LOAD,
    "truth": TRUTH,
}
INDEX = {
    "entries": 1234,
    "retired_slots": 2,
    "memory_used_bytes": 3 * 2**20,
    "memory_limit_bytes": 8 * 2**20,
    "counts": {},
}
TTFT = {"requests": 12, "p50_s": 0.1, "p90_s": 0.5, "p99_s": 2.0, "objective_s": 0.4, "in_force_s": 0.1}
MODEL = {
    "model": "demo",
    "fresh": False,
    "identity": "exact",
    "tokenizer": "slow, no pieces",
    "template": "sandbox",
    "policy": "cost",
    "policy_by": "setting",
    "pool_state": "serving",
    "queue": {"waiting": 0, "work_s": 0.0, "next": None},
    "index": INDEX,
    "ttft": TTFT,
}
FLEET = {"models": [MODEL | {"workers": [WORKER]}]}
CANDIDATE = {
    "worker_id": "sim-1.0",
    "matched_tokens": 32,
    "matched_blocks": 2,
    "speculative_tokens": 0,
    "prefill_tokens": 10,
    "foreign_prefill_tokens": 5,
    "decode_tokens": 3,
    "in_flight": 1,
    "cost_s": 0.0125,
    "terms": {"wait_s": 0.002, "compute_s": 0.001, "again_s": 0.0, "leave_s": 0.004, "evict_s": 0.0, "busy_s": 0.0055},
    "chosen": True,
}
EXPLAINED = {
    "model": "demo",
    "fresh": True,
    "policy": "cost",
    "why": "lowest",
    "because": "the lowest predicted cost",
    "moved": "",
    "identity": "exact",
    "reason": "",
    "prompt_tokens": 40,
    "blocks": 2,
    "waits": False,
    "waits_for": "",
    "turn_s": 0.0,
    "queue": None,
    "pools": [],
    "passed_over": [],
    "chosen": "sim-1.0",
    "candidates": [CANDIDATE],
}


def test_a_closed_pipe_is_no_error() -> None:
    script = "import sys\nfrom warmfleet.__main__ import main\nfrom warmfleet.cli import workers\n"
    script += "workers.run = lambda options: print('row ' * 99_999) or 0\nsys.exit(main(['workers']))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == (b"", 141)


@pytest.mark.parametrize("command", ["", "up", "serve", "demo", "workers", "drain", "doctor", "explain", "key", "acl"])
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: warmfleet" in printed
    assert len(printed.splitlines()) > 8


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fly",
        "workers --watch 0",
        "workers --watch --json",
        "up --engines 0",
        "up --port 65536",
        "up --policy best",
        "up --replica 1",
        "demo --turns none",
    ],
)
def test_unknown_words_end_with_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_unknown_option_shows_the_options_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model", "m"])
    printed = capsys.readouterr().err
    assert printed.startswith("usage: warmfleet serve ")
    assert printed.endswith("warmfleet serve: error: unrecognized arguments: --model m\n")


def test_another_redis_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(ports.listen("127.0.0.1", 0)) as taken:  # the port does not listen yet: connections are refused
        address = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["drain", "w", "--model", "m", "--redis", address]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("warmfleet drain: Redis is away or slow: ")
    assert printed.endswith("(--redis or WARMFLEET_REDIS_URL names another Redis; `warmfleet doctor` says more)\n")


def shown(*workers_: dict[str, Any], wide: bool = False, **more: Any) -> str:
    """The output of ``warmfleet workers`` for a model with these workers. more: other fields of the model."""
    return plain(workers.parts_of({"models": [MODEL | more | {"workers": list(workers_)}]}, wide=wide))


class TestWorkers:
    def test_the_table_says_state_load_and_why(self, capsys: pytest.CaptureFixture[str]) -> None:
        with replica({"/workers": (200, FLEET)}) as (url, _):
            assert main(["workers", "--url", url]) == 1, "none is routable"
        printed = capsys.readouterr().out
        assert "0 of 1 workers take requests; policy: cost by setting" in printed
        assert "the store does not answer" in printed
        assert "sim-1.0: unreachable, not routable: routers get no answer at its URL (it does not answer)\n" in printed
        assert "\n  -> make its URL reachable\n" in printed
        row = next(line.split() for line in printed.splitlines() if line.startswith("sim-1.0  "))
        assert row == ["sim-1.0", "unreachable", "100%", "7", "14", "7", "-", "1.2", "s"], "with foreign tokens"

    def test_its_columns_fit_100_characters_and_wide_shows_the_rest(self) -> None:
        loaded = dict.fromkeys(LOAD, 12_345_678) | {"in_flight": 123}
        worker = WORKER | {"worker_id": "vllm-qwen3-8b-7d9f8b6c5-x2k4.0", "load": loaded, "heartbeat_age_s": 600.0}
        head, row = (
            line
            for line in shown(worker).splitlines()
            if line.startswith(("WORKER", "vllm-qwen3-8b-7d9f8b6c5-x2k4.0  "))
        )
        assert max(len(head), len(row)) <= 100
        wide = shown(worker, wide=True)
        assert re.search(
            r" tier=gold,zone=a$", shown(worker | {"labels": {"zone": "a", "tier": "gold"}}, wide=True), re.MULTILINE
        )
        row = next(line for line in wide.splitlines() if line.startswith("vllm-qwen3-8b-7d9f8b6c5-x2k4.0  "))
        assert re.search(r"http://127\.0\.0\.1:9 +vllm-0\.32\.0 +url +", row)
        assert re.search(r" 17 +never +2 of 3, gap +gap 2 join 1 +-$", row)

    @pytest.mark.parametrize(
        ("state", "routable", "head"),
        [
            ("draining", False, "sim-1.0: draining: its reason"),
            ("silent", False, "sim-1.0: silent, not routable: its reason"),
            ("load-only", True, "sim-1.0: load-only, but routable: its reason"),
        ],
    )
    def test_each_worker_that_is_not_used_has_a_reason_and_a_remedy(
        self, state: str, routable: bool, head: str
    ) -> None:
        worker = WORKER | {"state": state, "routable": routable, "why": "its reason", "remedy": "do this"}
        assert shown(worker).splitlines()[-2:] == [head, "  -> do this"]

    def test_a_worker_that_is_well_needs_no_line(self) -> None:
        well = WORKER | {"state": "proven", "routable": True, "why": "takes requests", "remedy": ""}
        assert shown(well).splitlines()[-1].startswith("sim-1.0  proven  ")

    def test_the_title_shows_prompts_times_and_the_size_of_the_index(self) -> None:
        assert "tokenizer: slow, no pieces" in shown(WORKER)
        line = "12 streams, last minute, this replica: P50 0.100 s, P90 0.500 s, P99 2.000 s; "
        line += "objective 0.4 s, in force 0.100 s"
        assert line in shown(WORKER)
        assert "no stream in the last minute" in shown(WORKER, ttft=TTFT | {"requests": 0})
        first = {"prompt_tokens": 812, "worker_id": "sim-1.0", "waited_s": 1.23, "because": "so", "has_room": False}
        first["to_compute_there_s"] = 0.96
        printed = shown(WORKER, queue={"waiting": 3, "next": first})
        assert "; 3 requests wait for a worker\n" in printed
        line = "first in the queue: 812 tokens, waits for sim-1.0, which needs 0.96 s for it, has waited 1.23 s: so\n"
        assert line in printed
        first |= {"to_compute_there_s": 0.0, "has_room": True}
        assert "812 tokens, goes to sim-1.0, has waited" in shown(WORKER, queue={"waiting": 3, "next": first})
        assert "first in the queue" not in shown(WORKER)
        assert "index: 1234 entries, 2 retired slots; memory 3 MiB of 8" in shown(WORKER, wide=True, fresh=True)
        at_rest = TRUTH | {"found": 0, "healed": 0, "cause": "", "resyncs": {}}
        for truth, end in ((None, "- +- +- +- +-$"), (at_rest, "0 of 0 +- +-$")):
            assert re.search(end, shown(WORKER | {"truth": truth}, wide=True), re.MULTILINE)

    def test_sessions_have_columns_and_a_line_while_the_caches_are_too_small(self) -> None:
        assert "SESSIONS" not in shown(WORKER, ledger=None)
        held = {"held_s": 12.34, "because": "it is new"}
        ledger = {"running": 5, "idle": 4, "held": 2, "taken_tokens": 31_000, "capacity_tokens": 40_000, "line": [held]}
        places = {"sessions": 9, "idle": 4, "taken_tokens": 31_000, "capacity_tokens": 40_000}
        printed = shown(WORKER | {"places": places}, ledger=ledger)
        line = "9 sessions have a place in the caches (4 idle), 31,000 of 40,000 tokens; "
        assert line + "2 sessions are held, the first for 12.3 s: it is new\n" in printed
        assert re.search(r" SESSIONS +TAKEN\n.* 9, 4 idle +78%\n", printed)
        assert "0 sessions are held\n" in shown(WORKER, ledger=ledger | {"held": 0, "line": []})
        full = places | {"idle": 0, "capacity_tokens": 0}
        assert re.search(r" 9 +-\n", shown(WORKER | {"places": full}, ledger=ledger))
        assert re.search(r" - +-\n", shown(WORKER | {"places": None}, ledger=ledger))

    def test_engines_with_a_role_have_columns_and_each_reason_not_to_pair_a_line(self) -> None:
        assert "ROLE" not in shown(WORKER | {"pairs": None}, pairs=None)
        pairs = {"prefill": 1, "decode": 2, "both": 0, "pairs": 1, "told": "requests are not split"}
        apart = [{"from": ["p.0"], "why": "its policy is fail", "remedy": "set recompute"}]
        told = {"role": "decode", "partners": 1, "of": 1, "apart": []}
        names = (("p.0", told | {"role": "prefill", "of": 2}), ("d1.0", told), ("d2.0", told | {"partners": 0}))
        well: dict[str, Any] = WORKER | {"routable": True, "remedy": ""}
        fleet = [well | {"worker_id": name, "pairs": pairs} for name, pairs in names]
        fleet[0]["pairs"], fleet[2]["pairs"] = ({**one["pairs"], "apart": apart} for one in (fleet[0], fleet[2]))
        printed = shown(*fleet, well, pairs=pairs)
        assert "engines by role: 1 prefill, 2 decode; pairs: 1; requests are not split\n" in printed
        assert re.search(r" ROLE +PAIRS\n", printed)
        assert re.search(
            r"^p\.0 .* prefill +1 of 2\n.* decode +1 of 1\n.* decode +0 of 1\n.* - +-\n", printed, re.MULTILINE
        )
        assert printed.endswith("p.0, d2.0: no pair: its policy is fail\n  -> set recompute")

    def test_it_is_watched_until_ctrl_c_also_while_no_replica_answers(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits = iter([None, None])

        def wait(seconds: float) -> None:
            assert seconds == 5
            if next(waits, "end") == "end":
                raise KeyboardInterrupt
            answers["/workers"] = (500, {"error": {"message": "it stops"}})

        monkeypatch.setattr("warmfleet.cli.terminal.output.time.sleep", wait)
        answers: dict[str, tuple[int, Any]] = {"/workers": (200, FLEET)}
        with replica(answers) as (url, _):
            assert main(["workers", "--url", url, "--watch", "5"]) == 1
        printed = capsys.readouterr().out
        assert printed.count("WORKER  ") == 1
        assert printed.count("answered 500: it stops") == 2

    def test_json_is_passed_through(self, capsys: pytest.CaptureFixture[str]) -> None:
        with replica({"/workers": (200, FLEET)}) as (url, _):
            main(["workers", "--json", "--url", url])
        assert json.loads(capsys.readouterr().out) == FLEET

    def test_an_engine_that_said_goodbye_needs_no_word(self) -> None:
        left = WORKER | {"state": "left", "why": "it said goodbye", "remedy": ""}
        serving = WORKER | {"worker_id": "sim-2.0", "state": "proven", "routable": True, "remedy": ""}
        printed = plain(workers.parts_of({"models": [MODEL | {"workers": [left, serving]}]}))
        assert "1 of 1 workers take requests" in printed
        assert "sim-1.0  left " in printed
        assert "sim-1.0: " not in printed

    def test_a_fleet_without_workers(self) -> None:
        assert "no workers: `warmfleet doctor` says what is missing" in shown()


REPLICA = {
    "replica": "host:9090",
    "url": "http://10.0.0.5:9090",
    "state": "serving",
    "heard_s": 1.2,
    "version": "0.1.0",
    "started": 1_000,
    "pools": {"a#1": "cost", "a#2": "cost", "b": "sticky"},
    **dict.fromkeys(("in_flight", "waiting", "decided", "fallbacks"), 3),
    "prompt_tokens": 200,
    "matched_tokens": 150,
}


class TestReplicas:
    def test_a_row_tells_state_load_and_hits(self) -> None:
        printed = plain(replicas.parts_of({"fresh": True, "replicas": [REPLICA]}, 1_090.0)).splitlines()
        assert printed[1].split() == [
            *("host:9090", "serving", "0.1.0", "90", "s", "cost,", "sticky", "3", "3", "3", "75%"),
            "http://10.0.0.5:9090",
        ]

    def test_a_silent_one_is_told_and_is_the_exit_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        silent = REPLICA | {"state": "silent", "heard_s": 12.3}
        for rows, status in ([REPLICA], 0), ([REPLICA, silent | {"replica": "b:1"}], 1):
            with replica({"/replicas": (200, {"fresh": True, "replicas": rows})}) as (url, _):
                assert main(["replicas", "--url", url]) == status
        assert "b:1: silent: it was last heard 12 s ago; killed, hung" in capsys.readouterr().out

    def test_none_yet_and_redis_away(self) -> None:
        printed = plain(replicas.parts_of({"fresh": False, "replicas": []}, 0.0))
        assert "Redis does not answer" in printed
        assert "no replica has reported itself yet" in printed


class TestExplain:
    def test_a_message_goes_to_the_first_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        with replica({"/explain": (200, EXPLAINED), "/workers": (200, FLEET)}) as (url, requests):
            assert main(["explain", "--message", "Hi", "--url", url]) == 0
        assert json.loads(requests[-1][1]) == {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
        serving = WORKER | {"routable": True, "models": ["served"]}
        pooled = {"models": [MODEL | {"model": "base#pool", "workers": [serving]}]}
        with replica({"/explain": (200, EXPLAINED), "/workers": (200, pooled)}) as (url, requests):
            assert main(["explain", "--message", "Hi", "--url", url]) == 0
        assert json.loads(requests[-1][1])["model"] == "served"
        printed = capsys.readouterr().out
        assert "It would go to sim-1.0" in printed
        row = next(line.split() for line in printed.splitlines() if "->" in line)
        assert row == ["->", "sim-1.0", "32", "-", "8", "15", "3", "1", "12.5", "ms", "chosen"]

    def test_each_engine_is_compared_with_the_chosen_one(self) -> None:
        other = CANDIDATE | {"worker_id": "sim-2.0", "cost_s": 0.0105, "chosen": False, "speculative_tokens": 16}
        third = CANDIDATE | {"worker_id": "sim-3.0", "cost_s": 0.5, "chosen": False}
        printed = plain(explain.parts_of(EXPLAINED | {"candidates": [third, CANDIDATE, other]})).splitlines()
        assert printed[1].split()[:4] == ["WORKER", "CACHED", "SOON", "TO"]
        assert printed[2].split()[0] == "sim-2.0", "the cheapest first"
        assert printed[2].endswith("16           8             15         3          1   10.5 ms  -2.0 ms")
        assert printed[3].split()[0] == "->"
        assert printed[4].endswith("500.0 ms  +487.5 ms")
        assert "CACHED, SOON, TO COMPUTE: tokens of this prompt" in printed[5]

    def test_the_terms_of_a_cost_add_up_to_it(self) -> None:
        printed = plain(explain.parts_of(EXPLAINED | {"moved": "sim-2.0 holds 16 tokens more"})).splitlines()
        at = next(number for number, line in enumerate(printed) if "LEAVE" in line)
        assert printed[at].split() == ["WORKER", *explain.TERMS.values(), "COST"]
        *cells, cost = printed[at + 1].split()
        assert cells[:8] == ["->", "sim-1.0", "2.0", "1.0", "0.0", "4.0", "0.0", "5.5"]
        assert cost == "12.5"
        assert printed[-1] == "It moves: sim-2.0 holds 16 tokens more."
        assert "LEAVE" not in plain(explain.parts_of(EXPLAINED | {"policy": "sticky"})), "other policies ask no price"

    def test_a_request_that_may_be_split_shows_the_best_engine_alone_and_the_best_pair(self) -> None:
        seconds = {"transfer_s": 0.016, "room_s": 1.2, "answer_s": 0.025, "queue_s": 0.0}
        alone = dict.fromkeys(seconds, 0.0) | {"worker_id": "sim-1.0", "partner_id": "", "cost_s": 1.5}
        pair = {"worker_id": "sim-2.0", "partner_id": "sim-3.0", "cost_s": 1.4, **seconds}
        first = CANDIDATE | {"terms": CANDIDATE["terms"] | {"room_s": 0.25, "partner_s": 1.225}}  # type: ignore[operator]
        printed = plain(explain.parts_of(EXPLAINED | {"candidates": [first], "ways": [alone, pair]})).splitlines()
        terms = next(number for number, line in enumerate(printed) if "LEAVE" in line)
        assert printed[terms].split()[-3:] == ["ROOM", "PARTNER", "COST"]
        assert printed[terms + 1].split()[-3:] == ["250.0", "1225.0", "12.5"]
        ways = next(number for number, line in enumerate(printed) if "TRANSFER" in line)
        assert printed[ways].split() == ["WORKER", "PARTNER", "TRANSFER", "ROOM", "ANSWER", "QUEUE", "COST"]
        assert printed[ways + 1].split() == ["sim-1.0", *"-----", "1500.0"]
        assert printed[ways + 2].split() == ["sim-2.0", "sim-3.0", "16.0", "1200.0", "25.0", "0.0", "1400.0"]
        assert "PARTNER" not in plain(explain.parts_of(EXPLAINED)), "most fleets have no pairs"

    def test_explain_says_where_a_worker_holds_the_prompt(self) -> None:
        held = CANDIDATE | {"where_held": "4,096 on the GPU, 12,288 in CPU memory (38 ms)"}
        printed = plain(explain.parts_of(EXPLAINED | {"candidates": [held, CANDIDATE | {"where_held": ""}]}))
        line = f"{CANDIDATE['worker_id']} holds 4,096 on the GPU, 12,288 in CPU memory (38 ms)."
        assert [text for text in printed.splitlines() if " holds " in text] == [line]

    def test_explain_says_that_a_request_would_wait(self, capsys: pytest.CaptureFixture[str]) -> None:
        waits = EXPLAINED | {"waits": True, "waits_for": "sim-2.0", "turn_s": 4.536}
        with replica({"/explain": (200, waits)}) as (url, _):
            assert main(["explain", "--model", "demo", "--message", "Hi", "--url", url]) == 0
        assert "at a price of 4.54 s.\nBy COST alone it would go to sim-1.0" in capsys.readouterr().out
        printed = plain(explain.parts_of(waits | {"queue": {"waiting": 41, "work_s": 22.2, "next": None}}))
        assert "It would wait for its turn at sim-2.0, at a price of 4.54 s. 41 requests wait" in printed
        assert "which the engines need 22.20 s for." in printed
        assert "By COST alone it would go to sim-1.0" in printed
        alone = waits | {"queue": {"waiting": 0, "work_s": 0.0, "next": None}}
        assert "at a price of 4.54 s. No other request waits." in plain(explain.parts_of(alone))
        assert "it would be refused" in plain(explain.parts_of(waits | {"waits_for": ""}))

    def test_while_redis_is_away_the_last_reading_answers(self, capsys: pytest.CaptureFixture[str]) -> None:
        other = CANDIDATE | {"worker_id": "sim-2.0", "chosen": False}
        away = EXPLAINED | {"fresh": False, "view_age_s": 12.4, "candidates": [CANDIDATE, other]}
        with replica({"/explain": (200, away)}) as (url, _):
            assert main(["explain", "--model", "demo", "--message", "Hi", "--url", url]) == 0
        printed = capsys.readouterr().out
        assert "as this replica read them 12 s ago" in printed
        assert "It would go to sim-1.0. Nothing was booked." in printed
        assert "COST" not in printed
        anywhere = away | {"chosen": "", "candidates": [other]}
        assert "It would go to any of them." in plain(explain.parts_of(anywhere))

    def test_a_prompt_shorter_than_a_block_is_never_found_again(self) -> None:
        remark = "shorter than one block of an engine's cache"
        assert remark in plain(explain.parts_of(EXPLAINED | {"blocks": 0}))
        assert remark not in plain(explain.parts_of(EXPLAINED))
        assert remark not in plain(explain.parts_of(EXPLAINED | {"blocks": 0, "identity": "load"})), "nobody knows"

    def test_a_file_and_standard_input_are_sent_unchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        body = b'{"model": "demo",  "prompt": "Hi"}'
        (tmp_path / "request.json").write_bytes(body)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))
        with replica({"/explain": (200, EXPLAINED | {"chosen": ""})}) as (url, requests):
            assert main(["explain", str(tmp_path / "request.json"), "--url", url]) == 1
            assert main(["explain", "-", "--json", "--url", url]) == 1
        assert [sent for _, sent in requests] == [body, body]

    @pytest.mark.parametrize("arguments", [[], ["--message", "a", "--prompt", "b"], ["/nonexistent.json"]])
    def test_exactly_one_request_must_be_given(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", *arguments]) == 2
        assert capsys.readouterr().err.startswith("warmfleet explain: ")

    def test_a_prompt_names_its_model(self) -> None:
        options = build_parser().parse_args(["explain", "--prompt", "Hi", "--model", "m"])
        assert json.loads(explain.body_of(options)) == {"model": "m", "prompt": "Hi"}


class TestAskingAReplica:
    def test_no_replica_answers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["workers", "--url", f"http://127.0.0.1:{ports.free_port()}"]) == 2
        assert "warmfleet up" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            ((404, {"error": {"message": "no model"}}), "answered 404: no model"),
            ((500, ["odd"]), "answered 500"),
            ((200, "<html>"), "not in JSON"),
        ],
    )
    def test_an_answer_that_is_no_replica_s(
        self, answer: tuple[int, Any], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with replica({"/workers": answer}) as (url, _):
            assert main(["workers", "--url", url]) == 2
        assert words in capsys.readouterr().err


class TestPorts:
    def test_several_may_listen_on_a_claimed_port_but_it_is_claimed_once(self) -> None:
        with closing(ports.claim_shared("127.0.0.1", 0)) as claimed:
            port = claimed.getsockname()[1]
            with closing(ports.listen("127.0.0.1", port, shared=True)) as listener:
                listener.listen()
                with closing(ports.listen("127.0.0.1", port, shared=True)):
                    socket.create_connection(("127.0.0.1", port), 2).close()
                with pytest.raises(CommandError, match="choose another"):
                    ports.claim_shared("127.0.0.1", port)


class TestServe:
    def test_options_win_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WARMFLEET_MODELS", "a")
        monkeypatch.setenv("WARMFLEET_HOST", "0.0.0.0")
        monkeypatch.setenv("WARMFLEET_PORT", "1")
        options = build_parser().parse_args(["serve", "--models", "b,c", "--port", "2"])
        settings = serve.settings_of(options)
        assert (settings.models, settings.host, settings.port) == (("b", "c"), "0.0.0.0", 2)

    def test_without_a_model_it_says_so(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("WARMFLEET_MODELS", raising=False)
        monkeypatch.setenv("WARMFLEET_ADMIN_PORT", "0")
        assert main(["serve", "--port", "0"]) == 2
        assert "WARMFLEET_MODELS" in capsys.readouterr().err

    def test_a_decision_log_that_cannot_be_written_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = str(tmp_path / "nowhere" / "log")
        monkeypatch.setenv("WARMFLEET_DECISION_LOG", path)
        monkeypatch.setenv("WARMFLEET_ADMIN_PORT", "0")
        assert main(["serve", "--models", "demo", "--port", "0"]) == 2
        printed = capsys.readouterr().err
        assert printed == f"warmfleet serve: WARMFLEET_DECISION_LOG={path!r}: No such file or directory\n"

    def test_a_second_replica_on_a_machine_is_told_to_choose_a_port_for_operators(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            monkeypatch.setenv("WARMFLEET_ADMIN_PORT", str(port))
            assert main(["serve", "--models", "demo", "--port", "0"]) == 2
        printed = capsys.readouterr().err
        assert f"127.0.0.1:{port} cannot be used" in printed
        assert "choose another with WARMFLEET_ADMIN_PORT" in printed

    def test_a_variable_that_cannot_be_read_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WARMFLEET_PORT", "many")
        with pytest.raises(BadArgument, match="WARMFLEET_PORT"):
            serve.settings_of(build_parser().parse_args(["serve"]))


def test_up_starts_two_real_engines_but_four_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMFLEET_REDIS_URL", raising=False)
    parse = build_parser().parse_args
    assert up.plan_of(parse(["up"])).engines == EngineOptions(count=4)
    assert up.plan_of(parse(["up", "--engine", "vllm"])).engines.count == 2
    assert up.plan_of(parse(["up", "--engine", "vllm"])).engines.served_name == engines.TINY_MODEL.name
    assert up.plan_of(parse(["up", "--worker", "http://a:1/"])).workers == ("http://a:1",)


def test_a_tokenizer_by_name_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "find_spec", lambda _name: None)
    with pytest.raises(CommandError, match="pip install 'transformers>=5'"):
        up.plan_of(build_parser().parse_args(["up", "--tokenizer", "some/model"]))
