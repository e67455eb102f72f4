"""A drafter that gives NaN again and again is not asked again: each request would have its prompt read for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.draft_model import DraftModelDrafter
from millstream_runtime.engine.speculation.drafting import MOST_NOT_FINITE_REQUESTS
from millstream_runtime.engine.speculation.skip import Skip
from tests.support.drafting_engines import MakeDrafting, counts
from tests.support.embedding import embedding_weight
from tests.support.engines import MakeEngine, WriteModel, generate, greedy

pytestmark = pytest.mark.usefixtures("one_thread")
NEW_TOKENS = 10


class Sick:
    """Gives NaN for some requests, and a draft for all others."""

    def __init__(self, *healthy: str) -> None:
        self._healthy, self.asked, self.held = healthy, list[str](), set[Sequence]()

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        self.asked += [one.request.request_id for one in wanted]
        self.held |= {*wanted}
        return {one: [3] if one.request.request_id in self._healthy else Skip.DRAFT_NOT_FINITE for one in wanted}

    def forget(self, sequence: Sequence) -> None:
        self.held.discard(sequence)


def numbered(*numbers: int) -> list[Request]:
    return [Request(str(number), [3 + number] * 20, greedy(NEW_TOKENS)) for number in numbers]


def test_requests_one_after_another(
    write_model: WriteModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    plain, drafter = make_engine(write_model()), Sick()
    engine = make_engine(write_model(), drafter=drafter)
    for number in range(6):
        assert generate(engine, numbered(number)) == generate(plain, numbered(number))
    assert drafter.asked == [str(number) for number in range(MOST_NOT_FINITE_REQUESTS)], "each once, and no more"
    decodes = NEW_TOKENS - 2  # the first token comes with the prompt, and behind the last but one there is no draft
    assert counts(engine).skipped["drafter_failed"] >= 3 * decodes
    (failed,) = (one for one in caplog.records if one.getMessage() == "drafter_failed")
    assert failed.fields == {"error": "DraftNotFinite"}  # type: ignore[attr-defined]


def test_requests_at_once(write_model: WriteModel, make_engine: MakeEngine) -> None:
    plain, drafter = make_engine(write_model()), Sick()
    engine = make_engine(write_model(), drafter=drafter)
    assert generate(engine, numbered(*range(4))) == generate(plain, numbered(*range(4)))
    assert 3 <= len(drafter.asked) <= 4, "the last comes a step later"
    assert counts(engine).skipped["drafter_failed"] > 0
    assert not drafter.held, "it holds no request that has ended"
    assert engine._drafting is not None
    assert not engine._drafting.needs_last_tokens


def test_some_requests_with_nan_among_others_do_not_end_it(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """A damaged token that few requests have."""
    healthy = [str(number) for number in range(2, 18, 3)]
    drafter = Sick(*healthy)
    engine = make_engine(write_model(), drafter=drafter)
    for number in range(18):
        generate(engine, numbered(number))
    assert {*drafter.asked} == {str(number) for number in range(18)}
    assert counts(engine).skipped["drafter_failed"] == 0
    assert counts(engine).skipped["draft_not_finite"] >= 12


def test_a_damaged_draft_model_stops_reading_prompts(write_model: WriteModel, drafted: MakeDrafting) -> None:
    engine = drafted(write_model())
    drafter = engine._drafting._drafter if engine._drafting is not None else None
    assert isinstance(drafter, DraftModelDrafter)
    embedding_weight(drafter._forward.model)[:] = torch.nan
    for number in range(6):
        assert len(generate(engine, numbered(number))[str(number)]) == NEW_TOKENS
    assert counts(engine).skipped["drafter_failed"] > 0
    passes, compute = list[Any](), drafter._forward.residual

    def counted(*args: Any, **named: Any) -> torch.Tensor:
        passes.append(args)
        return compute(*args, **named)

    drafter._forward.residual = counted  # type: ignore[method-assign]
    generate(engine, numbered(7))
    assert passes == []
