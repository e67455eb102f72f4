"""What tensor-parallel ranks keep of a model, and that together they compute what one computes alone.

Ranks are threads here, so that sizes beyond two cost nothing; the engine runs on real processes in
tests/unit/engine/test_every_family.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.linear.shares import even_share, kv_head_share, rank_config, vocabulary_share
from millstream_runtime.models.linear.tensor_parallel import PlannedRanks, Ranks
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.weights import LoadedWeights
from millstream_runtime.models.registry import expected_weights, family_code, load_model_config
from tests.support.family_cases import CASES, UNEVEN_HEADS, Models, dense
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import model_logits, prompts_of, with_fields, write_family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_logits_of_one(name: str, models: Models) -> None:
    """Vocabulary 97 divides by nothing. Where heads do not divide, the size is refused by the field's name."""
    folder, [prompt] = models.folder(name), prompts_of([41])
    if name in UNEVEN_HEADS:
        with pytest.raises(InvalidConfigError, match="must divide num_attention_heads"):
            on_ranks(2, lambda ranks: model_logits(folder, prompt, 23, ranks=ranks))
        return
    shared = on_ranks(2, lambda ranks: model_logits(folder, prompt, 23, ranks=ranks))
    torch.testing.assert_close(shared, model_logits(folder, prompt, 23), rtol=1e-6, atol=1e-6)


@pytest.mark.matrix("family")
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "deepseek_v3"])
def test_more_ranks_than_key_value_heads(family: str, size: int, tmp_path: Path) -> None:
    """Neighbours keep copies of a key and value head; a latent is on every rank."""
    fields = dense(family, num_attention_heads=8, num_key_value_heads=2, head_dim=6)
    if family == "deepseek_v3":
        fields |= CASES["deepseek-v3"].config | {"num_attention_heads": 8, "num_key_value_heads": 8}
    if family == "mixtral":
        fields |= {"num_local_experts": 5}
    write_family(tmp_path / "model", **fields)
    [prompt] = prompts_of([30])
    shared = on_ranks(size, lambda ranks: model_logits(tmp_path / "model", prompt, 17, ranks=ranks))
    torch.testing.assert_close(shared, model_logits(tmp_path / "model", prompt, 17), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3-moe", "deepseek-v2"])
def test_a_rank_reads_its_share_and_nothing_else(name: str, models: Models) -> None:
    """float32 files into float32 weights: every byte that is read is a byte that is kept."""
    folder = models.folder(name)
    config = load_model_config(folder)
    read = []
    for rank in range(2):
        place = PlannedRanks(rank, 2)
        with Checkpoint(folder) as checkpoint:
            weights = LoadedWeights(checkpoint, torch.float32, torch.device("cpu"), place)
            family_code(config.architecture).build(config, weights)
            assert (
                checkpoint.bytes_read == weights.num_bytes == expected_weights(config, torch.float32, place).num_bytes
            )
            read.append(checkpoint.bytes_read)
    together = expected_weights(config, torch.float32).num_bytes
    assert together <= sum(read) < 1.4 * together  # norms, routers and latents are on both
    assert max(read) < 0.7 * together


def test_the_cache_of_a_rank_holds_its_heads(models: Models) -> None:
    config = load_model_config(models.folder("llama"))
    assert config.kv_shape == (4, 12)
    assert rank_config(config, PlannedRanks(1, 2)).kv_shape == (2, 12)
    assert rank_config(config, PlannedRanks(3, 4)).kv_shape == (2, 12)  # a copy
    latent = load_model_config(models.folder("deepseek-v3"))
    assert rank_config(latent, PlannedRanks(1, 2)).kv_shape == latent.kv_shape


@pytest.mark.parametrize(
    ("name", "fields", "size", "field"),
    [
        ("llama", {}, 3, "num_attention_heads, which is 4"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads, which is 3"),
        ("llama", {"intermediate_size": 41}, 2, "intermediate_size, which is 41"),
        ("phi3", {"intermediate_size": 41}, 2, "intermediate_size, which is 41"),
        ("mixtral", {"intermediate_size": 41}, 2, "intermediate_size, which is 41"),
        ("qwen3-moe", {"moe_intermediate_size": 15}, 2, "moe_intermediate_size, which is 15"),
        ("deepseek-v3", {"moe_intermediate_size": 15}, 2, "moe_intermediate_size, which is 15"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_the_name_of_the_field(
    name: str, fields: dict[str, Any], size: int, field: str, models: Models, tmp_path: Path
) -> None:
    config = load_model_config(with_fields(models.folder(name), tmp_path / "model", **fields))
    with pytest.raises(InvalidConfigError) as caught:
        expected_weights(config, torch.float32, PlannedRanks(0, size))
    assert caught.value.message == f"--tensor-parallel-size is {size}; it must divide {field} in this model."


@pytest.mark.parametrize(("total", "size"), [(1, 1), (97, 2), (97, 4), (3, 4), (128, 8)])
def test_every_token_has_exactly_one_rank(total: int, size: int) -> None:
    shares = [vocabulary_share(total, PlannedRanks(rank, size)) for rank in range(size)]
    assert [token for share in shares for token in share] == list(range(total))


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1)] * 2),
    ],
)
def test_key_value_heads_stay_with_their_queries(num_kv_heads: int, size: int, expected: list[tuple[int, int]]) -> None:
    shares = [kv_head_share(num_kv_heads, PlannedRanks(rank, size)) for rank in range(size)]
    assert [(share.start, share.stop) for share in shares] == expected


def test_shares_are_equal_or_refused() -> None:
    ranks: Ranks = PlannedRanks(1, 4)
    assert even_share(8, ranks, "heads") == range(2, 4)
    with pytest.raises(InvalidConfigError, match=r"tensor-parallel-size is 4; it must divide heads.* 6"):
        even_share(6, ranks, "heads")
