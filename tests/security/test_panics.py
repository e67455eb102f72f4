"""Real panics of libraries in Rust: a bad tokenizer is a failure of the pod, a bad prompt an error of the request.

A panic is a BaseException. It passed `except Exception`, so a pod stayed in WarmingUp until its time was over, and a
request had a bare 500 without a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.boot import Phase
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.rust_panics import RustPanic
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.hostile_tokenizers import (
    ALL_WAYS_PROMPT,
    PROMPT,
    TRIES_ALL_WAYS,
    replace_matches,
    template,
    tokenizer_json,
    write_model,
)
from tests.support.server_thread import ServerThread, serving, wait_for

BROKEN: dict[str, dict[str, Any]] = {
    "a compiled map that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a compiled map that points out of itself": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}
    },
    "a special token that is not there": {
        "post_processor": template({"SpecialToken": {"id": "x", "type_id": 0}}, PROMPT)
    },
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a prefix that a merge has not": {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": ["a b"],
            "continuing_subword_prefix": "long",
        }
    },
    "a prefix that ends within a character, which ends the process": {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "\u00e9": 1},
            "merges": [["a", "\u00e9"]],
            "continuing_subword_prefix": "a",
        }
    },
}
# Makes `a` of the bytes that a random model writes, and takes nine from the end of one.
FAILS_ON_ANSWERS = {
    "decoder": {
        "type": "Sequence",
        "decoders": [
            replace_matches("[^Helo1. \u0120]", "a"),
            {"type": "Strip", "content": "a", "start": 0, "stop": 9},
        ],
    }
}


def real_panic() -> BaseException:
    """What the library raises when it panics."""
    fast = FastTokenizer.from_buffer(tokenizer_json(**TRIES_ALL_WAYS))
    try:
        fast.encode(ALL_WAYS_PROMPT)
    except BaseException as error:
        return error
    raise AssertionError("the library does not panic on this prompt any more: find another one")


@pytest.mark.parametrize("name", BROKEN)
def test_a_tokenizer_on_which_the_library_panics_is_refused_with_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(**BROKEN[name]))
    with pytest.raises(RuntimeFailure) as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert str(tmp_path / "tokenizer.json") in caught.value.message


def test_a_pod_with_such_a_tokenizer_fails_and_does_not_wait_for_its_time(tmp_path: Path) -> None:
    with serving(write_model(tmp_path / "m", **BROKEN["a compiled map that is none"])) as server:
        wait_for(lambda: not server.running, "the end of the server")
    assert isinstance(server.failure, RuntimeFailure)
    assert server.failure.reason is FailureReason.CHECKPOINT_INVALID
    assert "tokenizer.json is not a tokenizer" in server.failure.message
    assert server.ledger.snapshot().phase is Phase.FAILED


@pytest.fixture(scope="module")
def all_ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with serving(write_model(tmp_path_factory.mktemp("panics") / "m", **TRIES_ALL_WAYS)) as server:
        yield server.wait_ready()


def failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.getMessage() == "request_failed"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", ["short, on the event loop", "long, in a thread"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_prompt_on_which_the_library_panics_is_an_error_with_a_line_in_the_log(
    all_ways: ServerThread, caplog: pytest.LogCaptureFixture, route: str, length: str
) -> None:
    prompt = ALL_WAYS_PROMPT if length.startswith("short") else " " * 3000 + ALL_WAYS_PROMPT
    asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in route else {"prompt": prompt}
    body = {"model": "tiny", **asked, **({} if route == "/tokenize" else {"max_tokens": 1})}
    with caplog.at_level(logging.ERROR, "millstream"):
        answer = all_ways.post(route, body)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("tokenizer_failed", "server_error")
    (line,) = failures(caplog)
    assert (line["code"], line["request_id"]) == ("tokenizer_failed", answer.headers["x-request-id"])
    assert "PanicException at " in line["cause"]
    assert ALL_WAYS_PROMPT not in str(line), "no prompt is logged"
    served = all_ways.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 1})
    assert served.status_code == 200


@pytest.mark.parametrize(
    "model",
    [
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
        },
        {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None},
    ],
    ids=["WordPiece", "Unigram"],
)
def test_a_prompt_for_which_a_vocabulary_has_no_token_is_a_failure_of_the_tokenizer(
    model: dict[str, Any], tmp_path: Path
) -> None:
    """The library raises a plain Exception; it was an internal error, with a traceback in the log."""
    content = tokenizer_json(model=model)
    with pytest.raises(Exception, match=r"(?i)unk") as caught:
        FastTokenizer.from_buffer(content).encode("b")
    assert type(caught.value) is Exception
    (tmp_path / "tokenizer.json").write_bytes(content)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RustPanic):
        tokenizer.encode("b")


def test_tokens_on_which_the_library_panics_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 20, "ignore_eos": True}
    with (
        serving(write_model(tmp_path / "m", **FAILS_ON_ANSWERS)) as server,
        caplog.at_level(logging.ERROR, "millstream"),
    ):
        server.wait_ready()
        whole = server.post("/v1/completions", body)
        stream = server.post("/v1/completions", {**body, "stream": True})
        text = server.post("/detokenize", {"model": "tiny", "tokens": [0, 1, 2, 3]})
        assert server.get("/ready").status_code == 200
        tokens = server.post("/tokenize", {"model": "tiny", "prompt": "hi"})
    for answer in (whole, text):
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "tokenizer_failed")
    assert '"code":"tokenizer_failed"' in stream.text
    assert [line["code"] for line in failures(caplog)] == ["tokenizer_failed"] * 3
    assert tokens.status_code == 200


def test_a_panic_in_a_request_beyond_the_tokenizer_is_an_error_with_a_line_in_the_log(
    all_ways: ServerThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that reads bodies is written in Rust, too. No input is known on which it panics."""

    async def panics(_: object) -> bytes:
        raise real_panic()

    monkeypatch.setattr(all_ways.server.service.prompts, "tokenize", panics)
    with caplog.at_level(logging.ERROR, "millstream"):
        answer = all_ways.post("/tokenize", {"model": "tiny", "prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    wait_for(lambda: len(failures(caplog)) == 1, "the line behind the answer")


def test_a_panic_while_weights_are_read_is_a_broken_checkpoint(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is known on which this library panics."""
    checkpoint = Checkpoint(tiny_model)

    class Panicking:
        def get_tensor(self, _: str) -> None:
            raise real_panic()

    for path in checkpoint._files:
        monkeypatch.setitem(checkpoint._files, path, Panicking())
    with pytest.raises(RuntimeFailure, match=r"model\.safetensors: tensor lm_head\.weight cannot be read") as caught:
        checkpoint.read("lm_head.weight")
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")
