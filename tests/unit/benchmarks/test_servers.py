"""What would make the comparison of servers unfair, or leave servers behind, if it were wrong."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.gguf_llama import read_vocabulary
from benchmarks.servers import peers, tables
from benchmarks.servers.__main__ import CASES
from benchmarks.servers.comparison import Comparison, far_behind
from benchmarks.servers.goals import judge
from benchmarks.servers.load import Case, planned
from benchmarks.servers.models import AUTO, DEMO_MODEL, FLOAT32, Lengths, Model, prepare
from benchmarks.servers.process import ServerFailedError, ServerProcess
from benchmarks.servers.vocabulary import first_word_id, write_tokenizer
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

DEADLINE_SECONDS = 120.0
# A child in a session of its own and a parent, both deaf to SIGTERM; each writes its process id.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], start_new_session=True)
open(os.path.join(sys.argv[1], f"{len(sys.argv)}.tmp"), "w").write(str(os.getpid()))
os.rename(os.path.join(sys.argv[1], f"{len(sys.argv)}.tmp"), os.path.join(sys.argv[1], f"{len(sys.argv)}.pid"))
time.sleep(600)
"""


@pytest.mark.deep
def test_ending_a_server_ends_every_process_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.servers.process.TERMINATE_SECONDS", 0.5)
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    server = ServerProcess([sys.executable, str(script), str(tmp_path)], {}, tmp_path / "log")
    files = [tmp_path / "2.pid", tmp_path / "3.pid"]
    server.wait_until_ready(lambda: all(file.exists() for file in files), DEADLINE_SECONDS)
    pids = [int(file.read_text()) for file in files]
    server.pause()  # a stopped server must end as well
    server.end()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_ends_early_leaves_its_own_error(tmp_path: Path) -> None:
    program = "print('loading'); raise ValueError('no such model')"
    server = ServerProcess([sys.executable, "-c", program], {}, tmp_path / "log")
    with pytest.raises(ServerFailedError, match="ended with status 1: ValueError: no such model"):
        server.wait_until_ready(lambda: False, DEADLINE_SECONDS)
    server.end()


def test_the_text_of_made_up_words_has_the_same_token_ids_again(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 49152)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [first_word_id(), 49151, first_word_id() + 200, 12_000, 361 + 105, 40_000, 40_000]
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text).ids == ids
    assert len(text.split()) == len(ids)  # each token can be seen
    with pytest.raises(ValueError, match="no vocabulary of 300 tokens"):
        write_tokenizer(tmp_path, 300)


def test_llama_cpp_gets_every_token_and_merge_of_a_tokenizer(tmp_path: Path) -> None:
    tokens, merges, special = read_vocabulary(DEMO_MODEL / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    assert [tokenizer.id_to_token(id_) for id_ in range(len(tokens))] == tokens
    assert special == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert all(len(merge.split(" ")) == 2 for merge in merges)
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps({"model": {"type": "Unigram", "vocab": {}, "merges": []}}))
    with pytest.raises(ValueError, match="not a BPE vocabulary"):
        read_vocabulary(other)


def test_every_round_asks_for_the_same_lengths_and_a_warm_up_for_one_answer_per_client(tmp_path: Path) -> None:
    model, case = prepare("demo", AUTO, tmp_path), Case(16, "mixed")
    requests = planned(case, model)
    assert len(requests) == 24
    assert len({request.output_tokens for request in requests}) > 10
    assert all(16 <= (request.input_tokens or 0) <= 256 for request in requests)
    longest = max((request.input_tokens or 0) + request.output_tokens for request in requests)
    assert longest <= model.max_model_len
    warm_up = planned(case, model, warm_up=True)
    assert len(warm_up) == 16
    assert max(request.output_tokens for request in warm_up) <= 48


def test_goals_are_judged_in_their_own_direction() -> None:
    def figures(rate: float, milliseconds: float) -> dict[str, float]:
        return {"tokens_per_second": rate, **dict.fromkeys(("ttft_p50_ms", "ttft_p95_ms", "itl_p99_ms"), milliseconds)}

    medians = {
        "16-mixed": {"millstream": figures(1500.0, 20.0), "vllm": figures(1000.0, 10.0)},
        "64-mixed": {"millstream": figures(1400.0, 10.0), "vllm": figures(1400.0, 10.0)},
    }
    found = {
        (goal["case"], goal["what"]): goal["reached"]
        for goal in judge("demo", FLOAT32, medians, {"millstream": 3, "vllm": 2})
    }
    assert found["16-mixed", "tokens/s over vllm"]
    assert not found["64-mixed", "tokens/s over vllm"]
    assert not found["16-mixed", "TTFT p50 over vllm"]
    assert found["64-mixed", "ITL p99 over vllm"]
    assert not found["64-mixed", "our tokens/s over 16-mixed"]
    assert not found["all", "memory over vllm"]


def test_more_clients_are_compared_with_the_next_fewer() -> None:
    rates = {"16-mixed": 1000.0, "32-mixed": 1100.0, "64-mixed": 900.0, "128-mixed": 1000.0}
    medians = {case: {"millstream": {"tokens_per_second": rate}} for case, rate in rates.items()}
    assert [(goal["case"], goal["what"], goal["reached"]) for goal in judge("demo", FLOAT32, medians, {})] == [
        ("32-mixed", "our tokens/s over 16-mixed", True),
        ("64-mixed", "our tokens/s over 32-mixed", False),
        ("128-mixed", "our tokens/s over 64-mixed", True),
    ]
    assert set(rates) <= {case.name for case in CASES}


def test_a_case_of_ours_alone_takes_no_time_of_peers(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peers.SERVERS, peers.VLLM, lambda *given: replace(peers.millstream(*given), name=peers.VLLM))
    compared = Comparison(tiny, tmp_path, tmp_path / "servers_demo_auto.json", threads=1, rounds=1)
    compared.run([peers.OURS, peers.VLLM], [Case(4, "mixed", ours_alone=True), Case(1, "equal")], minutes=30)
    cases = compared.report["cases"]
    assert {name: sorted(case["medians"]) for name, case in cases.items()} == {
        "4-mixed": ["millstream"],
        "1-equal": ["millstream", "vllm"],
    }
    assert not cases["4-mixed"]["dropped"]


def test_only_a_peer_far_behind_is_left_out_after_the_warm_up() -> None:
    rates = {"millstream": 10.0, "vllm": 100.0, "llama.cpp": 20.0, "transformers": 5.0}
    assert far_behind(rates) == {"transformers": "20 × slower than the fastest in the warm-up"}


def test_a_server_that_ends_between_rounds_is_left_out_with_a_reason(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours under another name, whose processes are ended once it is ready."""
    compared = Comparison(tiny, tmp_path, tmp_path / "servers_demo_auto.json", threads=1, rounds=1)
    monkeypatch.setitem(peers.SERVERS, peers.VLLM, lambda *given: replace(peers.millstream(*given), name=peers.VLLM))
    monkeypatch.setattr(
        compared,
        "_find_idle_use",
        lambda running: [one.process.end() for one in running if one.target.server.name == peers.VLLM],
    )
    compared.run([peers.OURS, peers.VLLM], [Case(1, "equal")], minutes=30)
    case = compared.report["cases"]["1-equal"]
    assert list(case["medians"]) == ["millstream"]
    assert case["dropped"]["vllm"].startswith("failed: No server answers at")


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    folder = write_tiny_model(tmp_path / "tiny")
    lengths = dict.fromkeys(("equal", "mixed"), Lengths("4:8", "3:6"))
    return Model("demo", "tiny", folder, 64, first_id=16, lengths=lengths)


@pytest.mark.deep
def test_a_server_is_measured_where_its_peer_is_not_installed(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TOOLS", tmp_path / "tools")
    output = tmp_path / "servers_demo_auto.json"
    Comparison(tiny, tmp_path, output, threads=1, rounds=2).run(
        [peers.OURS, peers.VLLM], [Case(1, "equal"), Case(4, "mixed")], minutes=30
    )
    report: dict[str, Any] = json.loads(output.read_text())
    assert report["absent"] == {"vllm": "not installed (`make peers`)"}
    assert report["servers"]["millstream"]["same_greedy_answers"] == [True] * 4
    case = report["cases"]["4-mixed"]
    assert not case["dropped"]
    assert [one["requests"] for one in case["rounds"]["millstream"]] == [6, 6]
    assert case["rounds"]["millstream"][0]["completion_tokens"] == case["rounds"]["millstream"][1]["completion_tokens"]
    assert case["medians"]["millstream"]["tokens_per_second"] > 0
    assert str(tmp_path) not in output.read_text()
    assert not [one for one in Path("/proc").glob("[0-9]*") if serves(one, tiny.folder)]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.write(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "vLLM: not measured, not installed (`make peers`)." in text


def serves(process: Path, folder: Path) -> bool:
    try:
        return str(folder) in (process / "cmdline").read_text()
    except OSError:
        return False
