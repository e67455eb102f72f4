"""Every family tells, tensor by tensor, how much of its share of the checkpoint is read, and ends at the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, PlannedRanks, Ranks
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.family_cases import CASES, Models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


SHARED = [name for name, case in CASES.items() if case.config["num_attention_heads"] % 2 == 0]


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, SINGLE_PROCESS) for name in CASES), *((name, PlannedRanks(1, 2)) for name in SHARED)]
)
def test_progress_ends_at_the_whole(name: str, ranks: Ranks, models: Models) -> None:
    told: list[tuple[int, int]] = []
    folder, cpu = models.folder(name), torch.device("cpu")
    load_model(
        load_model_config(folder), folder, torch.bfloat16, cpu, ranks, lambda done, total: told.append((done, total))
    )
    done, totals = [one for one, _ in told], {total for _, total in told}
    assert done[0] == 0
    assert len(totals) == 1
    assert done[-1] == totals.pop()
    assert all(before < after for before, after in pairwise(done))
    in_files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert done[-1] <= in_files if ranks is not SINGLE_PROCESS else 0.5 * in_files < done[-1] <= in_files
