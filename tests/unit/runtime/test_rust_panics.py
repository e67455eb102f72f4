"""A real panic of a library in Rust becomes an Exception, and all else stays what it is."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer

from millstream_runtime.rust_panics import RustPanic, is_panic, panics_as_errors, tokenizers_errors
from millstream_runtime.server.http.failure_log import cause_of
from tests.support.hostile_tokenizers import ALL_WAYS_PROMPT, TRIES_ALL_WAYS, tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tokenizer_json(**TRIES_ALL_WAYS))


@panics_as_errors
def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def test_a_panic_becomes_an_exception_that_does_not_quote_it() -> None:
    with pytest.raises(RustPanic) as caught:
        encode(ALL_WAYS_PROMPT)
    panic = caught.value.__cause__
    assert panic is not None
    assert is_panic(panic)
    assert not isinstance(panic, Exception), "the library raises an Exception now: the module can go"
    assert caught.value.detail == str(panic) != ""
    assert str(panic) not in str(caught.value)
    assert cause_of(caught.value).startswith("PanicException at "), "the line that called the library"
    assert "test_rust_panics.py" in cause_of(caught.value)
    assert len(encode("ab")) == 2


OTHERS = [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit, ValueError]


@pytest.mark.parametrize("error", [*OTHERS, Exception])
def test_what_is_no_panic_passes(error: type[BaseException]) -> None:
    with pytest.raises(error) as caught, panics_as_errors:
        raise error
    assert type(caught.value) is error


@pytest.mark.parametrize("error", OTHERS)
def test_of_a_tokenizers_errors_only_those_without_a_class_are_taken(error: type[BaseException]) -> None:
    with pytest.raises(error) as caught, tokenizers_errors:
        raise error
    assert type(caught.value) is error
    with pytest.raises(RustPanic) as failed, tokenizers_errors:
        raise Exception("a prompt")
    assert failed.value.detail == "a prompt"
    assert "a prompt" not in failed.value.message


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    async def waits() -> None:
        with panics_as_errors:
            await asyncio.sleep(3600)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
