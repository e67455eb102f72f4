"""A sample of the random schedules (`python -m tests.soak schedules` runs 10,000), and that they find what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millstream_runtime.engine.accepting import Accepting
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager, Table
from millstream_runtime.engine.scheduling.prefix_cache import PrefixCache
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.models.registry import load_model, load_model_config
from tests.soak.schedules.findings import Difference, Kind
from tests.soak.schedules.rounding import Rounding
from tests.soak.schedules.schedule import Schedule, draw
from tests.soak.schedules.tiny_models import MODELS, write_model
from tests.soak.schedules.worker import Worker
from tests.support.tiny_families import logits_of

pytestmark = pytest.mark.usefixtures("one_thread")
SEED, SAMPLE = 20, 2  # schedules of each model


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("models"), SEED)
    yield worker
    worker.close()


def schedules_of(model: str, count: int) -> list[Schedule]:
    drawn = (draw(SEED, number) for number in range(10_000))
    wanted = (one for one in drawn if one.settings.model == model and one.settings.execution != "on two ranks")
    return [next(wanted) for _ in range(count)]


@pytest.mark.matrix
@pytest.mark.parametrize("model", MODELS)
def test_every_request_is_answered_as_if_it_were_alone_and_nothing_is_left(model: str, worker: Worker) -> None:
    num_compared = 0
    for schedule in schedules_of(model, SAMPLE):
        findings = worker.run(schedule)
        assert findings.wrong == [], f"python -m tests.soak schedules --seed {SEED} --only {schedule.number}"
        num_compared += findings.counts["compared tokens"]
    assert num_compared > 0


# Defects that the engine had, or could have --------------------------------------------------------------------------


def publish_what_a_window_has_passed(patch: pytest.MonkeyPatch) -> None:
    """Issue 14: after a prompt in chunks, freed blocks were cached and free at once."""

    def publish(self: BlockManager, table: Table, hashes: list[bytes], num_full_blocks: int) -> None:
        if self._cache is not None:
            for index in range(num_full_blocks):
                self._cache.insert(hashes[index], table.block_table[index])
        table.num_published_blocks = num_full_blocks

    patch.setattr(BlockManager, "_publish", publish)


def free_a_block_too_early(patch: pytest.MonkeyPatch) -> None:
    num_passed = BlockManager.num_passed
    patch.setattr(
        BlockManager, "num_passed", lambda self, tokens: max(0, num_passed(self, tokens + self.block_size_tokens))
    )


def find_the_block_of_another_prefix(patch: pytest.MonkeyPatch) -> None:
    def find(self: PrefixCache, block_hash: bytes) -> int | None:
        block = self._block_of.get(block_hash)
        return None if block is None else next(iter(self._hash_of))

    patch.setattr(PrefixCache, "find", find)


def keep_those_who_are_gone(patch: pytest.MonkeyPatch) -> None:
    gone: list[Sequence] = []
    end = Accepting.end

    def keep(self: Accepting, sequence: Sequence) -> None:
        gone.append(sequence)
        end(self, sequence)

    patch.setattr(Accepting, "end", keep)


def keep_stale_keys(patch: pytest.MonkeyPatch) -> None:
    """Keys of a sequence that has grown long stay at the angles of a short one (longrope)."""
    patch.setattr(Scheduler, "recompute", lambda self, sequence: None)


# Each with the kinds of findings of which one must come up.
DEFECTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, set[Kind]]] = {
    "blocks behind a window are published": (
        publish_what_a_window_has_passed,
        "mistral, window 11",
        {Kind.CRASH, Kind.CONTENTS},
    ),
    "a window frees a block too early": (
        free_a_block_too_early,
        "mistral, window 24",
        {Kind.CRASH, Kind.TOKEN, Kind.CONTENTS},
    ),
    "a hit is another prefix": (find_the_block_of_another_prefix, "qwen3", {Kind.TOKEN, Kind.CONTENTS}),
    "requests are never forgotten": (keep_those_who_are_gone, "qwen3", {Kind.LEAK}),
    "stale keys are kept": (keep_stale_keys, "phi4, longrope", {Kind.TOKEN}),
}


@pytest.mark.deep
@pytest.mark.matrix
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in, model, kinds = DEFECTS[defect]
    few = schedules_of(model, 8)
    assert all(worker.run(one).wrong == [] for one in few)  # what is computed alone is computed without the defect
    put_in(monkeypatch)
    found: set[Kind] = set()
    for schedule in few:
        found |= {one.kind for one in worker.run(schedule).wrong}
    assert kinds & found


# Near-ties -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_only_rounding_excuses_another_token(tmp_path: Path) -> None:
    _, folder = write_model("qwen3", tmp_path)
    config = load_model_config(folder)
    prompt = [5, 9, 33, 60, 2]
    model = load_model(config, folder, torch.float64, torch.device("cpu"))
    logits = logits_of(model, config, prompt, len(prompt), torch.float64)[-1]
    (best, next_best), (first, second) = (one.tolist() for one in logits.topk(2))
    clear = Request("clear", prompt, SamplingParams(4, temperature=0.0))
    rounding = Rounding(folder)
    assert best - next_best > 1e-3
    assert not rounding.explains(Difference(0, 0, found=second, expected=first), clear, [first])
    tied = replace(clear, sampling=replace(clear.sampling, logit_bias=((second, best - next_best),)))
    assert rounding.explains(Difference(0, 0, found=second, expected=first), tied, [first])
    third = next(token for token in range(90) if token not in (first, second))
    assert not rounding.explains(Difference(0, 0, found=third, expected=first), tied, [first])
