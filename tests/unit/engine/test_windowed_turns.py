"""A conversation longer than the window: its next turn is found in the cache, though its beginning was evicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import dense
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import prompts_of, write_family

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOW_TOKENS, NEW_TOKENS, NUM_BLOCKS = 24, 8, 9
EXECUTIONS: dict[str, Callable[[], Execution]] = {
    "plain": Execution,
    "overlapped": lambda: Execution(overlapped=True),
    "replayed and overlapped": lambda: Execution(EagerRecorder(), overlapped=True),
}


@pytest.mark.parametrize("chunk_tokens", [256, 19])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_next_turn_gives_the_same_tokens_from_what_is_left_of_it(
    execution: str, chunk_tokens: int, make_engine: MakeEngine, tmp_path: Path
) -> None:
    write_family(tmp_path, **dense("mistral", sliding_window=WINDOW_TOKENS))
    conversation, other, more = prompts_of([90, 100, 5])
    settings = {"max_num_batched_tokens": chunk_tokens, "max_num_seqs": 2}
    plain = make_engine(tmp_path, enable_prefix_caching=False, **settings)
    cached = make_engine(tmp_path, execution=EXECUTIONS[execution](), **settings)
    shrink_pool(cached, NUM_BLOCKS, enable_prefix_caching=True)
    first = [Request("first", conversation, greedy(NEW_TOKENS))]
    [answer] = generate(plain, first).values()
    assert generate(cached, first) == {"first": answer}
    generate(cached, [Request("other", other, greedy(NEW_TOKENS))])
    turn = [*conversation, *answer, *more]
    next_turn = [Request("next", turn, greedy(NEW_TOKENS))]
    hits_before = cached.stats().prefix_cache_hit_tokens_total
    assert generate(cached, next_turn) == generate(plain, next_turn)
    assert cached.stats().prefix_cache_hit_tokens_total - hits_before == 96
