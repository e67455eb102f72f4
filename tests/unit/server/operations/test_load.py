"""`GET /load` on a real server: what a gateway reads several times per second to choose between replicas."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from millstream_runtime.server.operations.answered_requests import (
    MOST_ANSWERS,
    AnsweredRequest,
    AnsweredRequests,
    AnswerTokens,
)
from millstream_runtime.server.operations.drain import DrainCutoff
from tests.support.chat_streams import CHAT, chat_body, events_of, in_background
from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

TEXT = "/v1/completions"
DEMO_CHAT = Path(__file__).resolve().parents[4] / "models/demo-chat"
FIXED_BYTES, ANSWER_BYTES = 1024, 160
FIRST_BOOT, SECOND_BOOT = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerThread]:
    with serving(DEMO_CHAT) as server:
        yield server.wait_ready()


def load_of(server: ServerThread, since: str | None = None) -> dict[str, Any]:
    query = "" if since is None else f"?since={since}"
    answer = server.get(f"/load{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    return dict(answer.json())


def hashed(request_id: str) -> str:
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]


def ask(server: ServerThread, request_id: str, path: str = CHAT, **body: Any) -> dict[str, Any]:
    full = chat_body(max_tokens=8) | body if path == CHAT else {"model": "tiny", "max_tokens": 1} | body
    headers = {"X-Request-Id": request_id}
    answer = httpx.post(server.url + path, json=full, headers=headers, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_an_answer_is_found_by_its_request_id_with_the_numbers_of_its_usage(demo: ServerThread) -> None:
    """OpenAI's usage object, which the client of each answer gets, is the oracle."""
    since = load_of(demo)["cursor"]
    turns = [{"role": "user", "content": "What is a river, and where does its water come from? " * 4}]
    usages, walls = [], []
    for number in range(2):
        began = time.monotonic()
        answer = ask(demo, f"turn-{number}", messages=turns)
        walls.append(time.monotonic() - began)
        usages.append(answer["usage"])
        turns += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
    load = load_of(demo, since)
    assert [one["id"] for one in load["answers"]] == [hashed("turn-0"), hashed("turn-1")]
    for entry, usage, wall in zip(load["answers"], usages, walls, strict=True):
        assert entry["prompt_tokens"] == usage["prompt_tokens"]
        assert entry["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert entry["completion_tokens"] == usage["completion_tokens"]
        assert 0 < entry["ttft_seconds"] < wall
    assert load["missed"] == 0


def test_a_stream_is_in_the_ring_before_its_client_knows_that_it_ended(demo: ServerThread) -> None:
    """A stream carries its usage only if asked; here it comes without."""
    since = load_of(demo)["cursor"]
    body = chat_body(max_tokens=5, stream=True)
    headers = {"X-Request-Id": "streamed"}
    with httpx.stream("POST", demo.url + CHAT, json=body, headers=headers, timeout=PATIENCE_SECONDS) as answer:
        for line in answer.iter_lines():
            if '"finish_reason":"length"' in line:
                entries = load_of(demo, since)["answers"]
    assert [(one["id"], one["completion_tokens"]) for one in entries] == [(hashed("streamed"), 5)]


def test_a_request_of_several_prompts_and_choices_is_one_entry(demo: ServerThread) -> None:
    since = load_of(demo)["cursor"]
    prompts = [list(range(40)), list(range(50, 73))]
    usage = ask(demo, "several", TEXT, prompt=prompts, n=2, max_tokens=3, ignore_eos=True)["usage"]
    (entry,) = load_of(demo, since)["answers"]
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (63, 12)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (63, 12)
    assert entry["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_rates_are_those_of_the_warm_up_until_some_were_measured(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        steps = server.get("/ready").json()["step_times"]
        (prompt,) = [one for one in steps if one["new_tokens"] > one["sequences"]]
        decode = next(one for one in steps if one["sequences"] == one["new_tokens"] == 1)
        before = load_of(server)
        timed = prompt["new_tokens"] / (prompt["step_microseconds"] / 1e6)
        assert before["prefill_tokens_per_second"] == pytest.approx(timed, rel=1e-3)
        assert before["itl_seconds"] == pytest.approx(decode["step_microseconds"] / 1e6)
        began = time.monotonic()
        ask(server, "long", TEXT, prompt=[number % 90 for number in range(900)], max_tokens=200, ignore_eos=True)
        wall = time.monotonic() - began
        after = load_of(server)
        assert after["prefill_tokens_per_second"] != before["prefill_tokens_per_second"]
        assert after["prefill_tokens_per_second"] > 900 / wall  # the answer's steps are not part of it
        assert after["itl_seconds"] != before["itl_seconds"]
        assert 0 < after["itl_seconds"] < wall / 20
        idle = load_of(server)
        assert idle["prefill_tokens_per_second"] == after["prefill_tokens_per_second"]


def test_what_waits_is_counted_before_the_engine_has_taken_it(tiny_model: Path) -> None:
    """A long step must not hide what came meanwhile."""
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=1) as server:
        server.wait_ready()
        idle = load_of(server)
        assert (idle["requests"], idle["tokens"]) == ({"queued": 0, "running": 0},) * 2
        assert idle["kv"]["free_blocks"] == idle["kv"]["total_blocks"] > 0
        slow.steps_left = 2  # the first prompt is computed, and one token of the answer
        running = in_background(lambda: ask(server, "a", TEXT, prompt=[*range(40)], max_tokens=4, ignore_eos=True))
        wait_for(lambda: slow.steps_left == 0 and load_of(server)["requests"]["running"] == 1, "the first answer")
        assert load_of(server)["tokens"]["running"] >= 40
        waiting = in_background(lambda: ask(server, "b", TEXT, prompt=[*range(100, 130)]))
        wait_for(lambda: load_of(server)["requests"]["queued"] == 1, "the second request")
        busy = load_of(server)
        assert (busy["tokens"]["queued"], busy["requests"]["running"]) == (30, 1)
        assert 0 < busy["kv"]["free_blocks"] < busy["kv"]["total_blocks"]
        assert busy["answers"] == []
        slow.steps_left = None
        slow.gate.set()
        running.result()
        waiting.result()
        wait_for(lambda: load_of(server)["requests"] == {"queued": 0, "running": 0}, "idle counts")
        assert load_of(server)["tokens"] == {"queued": 0, "running": 0}


def test_an_answer_whose_client_left_is_in_the_ring_and_a_request_that_never_ran_is_not(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=1) as server:
        server.wait_ready()
        slow.steps_left = 4
        with events_of(server, chat_body(max_tokens=400)) as events:
            next(events)
            next(events)
            with events_of(server, chat_body(max_tokens=400)):  # behind it, and gone before it was admitted
                wait_for(lambda: load_of(server)["requests"]["queued"] == 1, "the second request")
        wait_for(lambda: server.server.service.admission.in_flight == 0, "both clients to be gone")
        slow.steps_left = None
        slow.gate.set()
        (entry,) = load_of(server)["answers"]
        assert 0 < entry["completion_tokens"] < 400


def test_a_full_ring_keeps_the_body_within_its_bound_and_a_cursor_says_what_was_missed(tiny_model: Path) -> None:
    with serving(tiny_model) as server, httpx.Client(timeout=PATIENCE_SECONDS) as client:
        server.wait_ready()
        first = load_of(server)
        assert (first["answers"], first["missed"]) == ([], 0)
        cursor = first["cursor"]
        for number in range(MOST_ANSWERS + 4):
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1}
            client.post(server.url + TEXT, json=body, headers={"X-Request-Id": f"{'x' * 120}{number}"})
        answer = server.get("/load")
        full = answer.json()
        assert len(full["answers"]) == MOST_ANSWERS
        assert full["answers"][-1]["id"] == hashed(f"{'x' * 120}{MOST_ANSWERS + 3}")
        assert len(answer.content) <= FIXED_BYTES + MOST_ANSWERS * ANSWER_BYTES
        answers_bytes = len(json.dumps(full["answers"], separators=(",", ":")))
        assert len(answer.content) - answers_bytes <= FIXED_BYTES
        assert load_of(server, cursor)["missed"] == 4
        assert load_of(server, cursor)["answers"] == full["answers"]
        assert "xxx" not in answer.text
        later = load_of(server, full["cursor"])
        assert (later["answers"], later["missed"], later["cursor"]) == ([], 0, full["cursor"])


def test_an_entry_of_the_largest_numbers_is_within_its_bound() -> None:
    entry = AnsweredRequest("f" * 16, 1 << 30, 1 << 30, 1 << 30, 86399.123457)
    assert len(msgspec.json.encode(entry)) < ANSWER_BYTES


TOKENS = AnswerTokens(10, 0, 5, 0.25)


def test_each_reader_sees_each_answer_once() -> None:
    ring = AnsweredRequests()
    ring.begin_boot(FIRST_BOOT)
    readers: dict[str, str | None] = {"early": None, "late": None}
    seen: dict[str, list[str]] = {"early": [], "late": []}
    for number in range(40):
        ring.add(FIRST_BOOT, str(number), TOKENS)
        for name in readers if number % 8 == 7 else ["early"]:
            read = ring.since(readers[name])
            assert read.missed == 0
            readers[name] = read.cursor
            seen[name] += [one.id for one in read.answers]
    assert seen["early"] == seen["late"] == [hashed(str(number)) for number in range(40)]


def test_a_new_boot_forgets_the_answers_of_the_old_and_takes_none_of_them() -> None:
    ring = AnsweredRequests()
    ring.begin_boot(FIRST_BOOT)
    ring.add(FIRST_BOOT, "old", TOKENS)
    cursor = ring.since(None).cursor
    assert cursor == f"{FIRST_BOOT}-1"
    ring.begin_boot(SECOND_BOOT)
    ring.add(FIRST_BOOT, "computed by the engine that died", TOKENS)
    ring.add(SECOND_BOOT, "new", TOKENS)
    read = ring.since(cursor)  # of a reader that knows nothing of this boot
    assert [one.id for one in read.answers] == [hashed("new")]
    assert (read.cursor, read.missed) == (f"{SECOND_BOOT}-1", 0)


@pytest.mark.parametrize(
    ("query", "code", "message"),
    [
        ("since=", "invalid_value", "Invalid 'since': it must be the 'cursor' of an earlier answer of /load; got ''."),
        ("since=7", "invalid_value", "got '7'."),
        ("since=0123456789abcdef-01", "invalid_value", "got '0123456789abcdef-01'."),
        ("since=0123456789ABCDEF-1", "invalid_value", "got '0123456789ABCDEF-1'."),
        ("since=0123456789abcdef-%D9%A1", "invalid_value", "got something else."),
        (f"since={'9' * 5000}", "invalid_value", "got something else."),
        ("since=0123456789abcdef-1&since=0123456789abcdef-2", "invalid_value", "'since' is given 2 times"),
        ("cursor=0123456789abcdef-1", "unknown_parameter", "Unknown parameter of the URL: 'cursor'"),
    ],
)
def test_a_malformed_cursor_is_refused_by_name(server: ServerThread, query: str, code: str, message: str) -> None:
    answer = server.get(f"/load?{query}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["param"] == ("cursor" if code == "unknown_parameter" else "since")
    assert answer.headers["x-millstream-reason"] == code


def test_a_cursor_that_was_never_given_is_refused(server: ServerThread) -> None:
    boot_id, count = load_of(server)["cursor"].split("-")
    answer = server.get(f"/load?since={boot_id}-{int(count) + 1}")
    assert answer.status_code == 400
    assert f"no cursor beyond {boot_id}-{count}" in answer.json()["error"]["message"]


def test_anybody_may_ask_without_a_key_and_reads_no_id(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    with serving(tiny_model, api_keys_file=str(keys)) as server:
        server.wait_ready()
        headers = {"Authorization": "Bearer key-a", "X-Request-Id": "payroll-november"}
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        assert httpx.post(server.url + TEXT, json=body, headers=headers, timeout=60).status_code == 200
        answer = server.get("/load")
        assert answer.status_code == 200
        assert [one["id"] for one in answer.json()["answers"]] == [hashed("payroll-november")]
        for secret in ("payroll", "key-a", hashlib.sha256(b"key-a").hexdigest()[:8]):
            assert secret not in answer.text


def test_a_server_that_loads_says_so_without_numbers(tiny_model: Path) -> None:
    slow = SlowSteps()
    slow.gate.clear()  # holds the first step of the warm-up
    with serving(tiny_model, make_engine=slow.make) as server:
        wait_for(lambda: load_of(server)["phase"] == "WarmingUp", "the warm-up")
        load = load_of(server)
        slow.gate.set()
        server.wait_ready()
        assert {name: load[name] for name in ("requests", "tokens", "kv", "itl_seconds")} == dict.fromkeys(
            ("requests", "tokens", "kv", "itl_seconds")
        )
        assert load["boot_id"] == load_of(server)["boot_id"]


def test_a_drain_is_seen_at_once_and_answers_go_on_being_reported(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowSteps()
    monkeypatch.setattr(DrainCutoff, "seconds_until_close", lambda *_: 0.0)
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        slow.steps_left = 2
        running = in_background(lambda: ask(server, "last", max_tokens=6))
        wait_for(lambda: slow.steps_left == 0, "the answer to begin")
        boot_id = load_of(server)["boot_id"]
        server.begin_drain()
        wait_for(lambda: load_of(server)["phase"] == "Draining", "the drain")
        draining = load_of(server)
        assert (draining["boot_id"], draining["requests"]["running"]) == (boot_id, 1)
        slow.steps_left = 2
        slow.gate.set()
        wait_for(lambda: slow.steps_left == 0, "more of the answer")
        assert load_of(server)["tokens"]["running"] > draining["tokens"]["running"] > 0
        slow.steps_left = None
        slow.gate.set()
        assert running.result()["usage"]["completion_tokens"] == 6
    assert server.failure is None


@pytest.mark.deep
def test_an_engine_of_two_ranks_reports_what_one_does(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a share of every block, and its tokens count once."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loads = {}
    for ranks in (1, 2):
        with serving(tiny_model, tensor_parallel_size=ranks, max_num_seqs=4) as server:
            server.wait_ready()
            ask(server, "a", TEXT, prompt=[*range(40)], max_tokens=20, ignore_eos=True)
            ask(server, "b", TEXT, prompt=[*range(40)], max_tokens=3, ignore_eos=True)
            wait_for(lambda: load_of(server)["requests"] == {"queued": 0, "running": 0}, "idle counts")
            loads[ranks] = load_of(server)
            blocks = server.get("/metrics").text.split('num_gpu_blocks="', 1)[1].split('"', 1)[0]
            assert loads[ranks]["kv"]["total_blocks"] == loads[ranks]["kv"]["free_blocks"] == int(blocks)
    for entries in zip(loads[1]["answers"], loads[2]["answers"], strict=True):
        counted = [[one[name] for name in one if name != "ttft_seconds"] for one in entries]
        assert counted[0] == counted[1]
    assert [one["cached_tokens"] for one in loads[2]["answers"]] == [0, 32]
    assert loads[2]["kv"]["block_size_tokens"] == loads[1]["kv"]["block_size_tokens"]
    assert loads[2]["tokens"] == {"queued": 0, "running": 0}
    assert loads[2]["prefill_tokens_per_second"] > 0
