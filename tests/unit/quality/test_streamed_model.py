"""A model of which memory holds one layer computes what it computes whole, and holds one layer."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_runtime.config import Device, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.host_limits import resident_bytes
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.job_memory.judging import CHUNK_TOKENS, GROUP_TOKENS
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.model_parts import ModelParts, part_bytes
from millstream_runtime.models.registry import expected_weights, load_model_config
from millstream_runtime.quality import comparison, streamed_scores
from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.quality.slice_figures import by_slice
from millstream_runtime.quality.streamed_model import ComputedDocument, StreamedModel
from millstream_runtime.quality.streamed_scores import Room, room_for, stream_scores
from millstream_runtime.quality.token_scores import DocumentScores, score
from tests.support.family_cases import CASES, Models
from tests.support.quantized_checkpoints import awq, gptq, quantized
from tests.support.tiny_model import write_tiny_model
from tests.unit.quality.conftest import noise

pytestmark = pytest.mark.deep

LENGTHS = (2, 21, 40, 33)
COPIES = 1 << 30
FORMATS: dict[str, Callable[[Path, Path], object]] = {
    "awq": lambda folder, packed: quantized(
        folder, packed, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq(32),
    ),
    "gptq-act-order": lambda folder, packed: quantized(
        folder, packed,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False,
         "checkpoint_format": "gptq"},
        gptq(4, 32, act_order=True),
    ),
}  # fmt: skip


def config(folder: Path, longest: int = 64, stored: KVCacheDType = KVCacheDType.AUTO) -> RuntimeConfig:
    return RuntimeConfig(
        model=str(folder), served_model_name="m", device=Device.CPU, max_model_len=longest, kv_cache_dtype=stored
    )


def documents(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[TokenizedDocument]:
    """The first has one token to judge, the others have prompts of several lengths."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [TokenizedDocument(line, "all", one, max(1, line * 3), False) for line, one in enumerate(ids)]


def whole_logits(one: RuntimeConfig, given: list[TokenizedDocument]) -> list[Tensor]:
    model = ScoredModel(one)
    return [joined(model.logits(each.token_ids, each.num_prompt_tokens)) for each in given]


def streamed_logits(one: RuntimeConfig, given: list[TokenizedDocument]) -> list[Tensor]:
    model = StreamedModel(one)
    hidden, head = model.hidden_states(given, COPIES, lambda share: None), model.head()
    return [
        joined(ComputedDocument(head, states).logits(each.token_ids, each.num_prompt_tokens))
        for each, states in zip(given, hidden, strict=True)
    ]


def joined(slabs: Iterator[Any]) -> Tensor:
    return torch.cat([slab.logits.clone() for slab in slabs])


def require_equal(one: RuntimeConfig, lengths: tuple[int, ...] = LENGTHS) -> None:
    given = documents(load_model_config(Path(one.model)).vocab_size, lengths)
    for ours, theirs in zip(streamed_logits(one, given), whole_logits(one, given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_whole_model(families: Models, name: str) -> None:
    require_equal(config(families.folder(name), 48))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tied", [False, True])
def test_so_are_those_of_quantized_layers(name: str, tied: bool, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", tie_word_embeddings=tied)
    FORMATS[name](plain, tmp_path / "packed")
    require_equal(config(tmp_path / "packed"))


@pytest.mark.parametrize("stored", [KVCacheDType.INT8, KVCacheDType.FP8])
def test_so_are_those_of_a_quantized_kv_cache(base: Path, stored: KVCacheDType) -> None:
    require_equal(config(base, stored=stored))


@pytest.mark.quick
def test_so_are_those_of_documents_of_several_chunks(base: Path) -> None:
    require_equal(config(base, 3 * CHUNK_TOKENS), (CHUNK_TOKENS + 1, CHUNK_TOKENS + 2, 2 * CHUNK_TOKENS + 7))


def scores_of(base: Path, candidate: Path, given: list[TokenizedDocument], group_tokens: int) -> list[DocumentScores]:
    models = StreamedModel(config(base)), StreamedModel(config(candidate))
    return stream_scores(*models, given, Room(group_tokens, COPIES), lambda done, total: None)


def test_figures_are_those_of_two_whole_models_and_groups_change_none(base: Path, changed: Any) -> None:
    candidate, given = changed(noise(0.1)), documents(272, (30, 41, 64, 17, 50))
    together, alone = (scores_of(base, candidate, given, tokens) for tokens in (GROUP_TOKENS, 1))
    models = ScoredModel(config(base)), ScoredModel(config(candidate))
    (ours,), (theirs,) = by_slice(together), by_slice([score(*models, one) for one in given])
    for name in ("mean_kl", "p99_kl", "top1_agreement_percent", "flip_percent", "perplexity_ratio"):
        assert getattr(ours, name).value == pytest.approx(getattr(theirs, name).value, rel=1e-4), name
    assert ours.mean_kl.value > 0.01
    for one, other in zip(together, alone, strict=True):
        assert one.document is other.document
        for name in ("kl", "base_nll", "candidate_nll", "agrees", "flips"):
            assert (getattr(one, name) == getattr(other, name)).all(), name


def test_progress_grows_to_the_end(base: Path) -> None:
    seen: list[tuple[int, int]] = []
    given, model = documents(272), StreamedModel(config(base))
    stream_scores(model, model, given, Room(50, COPIES), lambda done, total: seen.append((done, total)))
    assert [one for one, _ in seen] == sorted(one for one, _ in seen)
    assert seen[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert len({one for one, _ in seen}) > len(LENGTHS)


@pytest.mark.quick
def test_one_layer_is_alive_at_a_time(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Decoder] = weakref.WeakSet()
    most, load = [0], ModelParts._load

    def counted(self: ModelParts, *given: Any) -> Decoder:
        gc.collect()
        most[0] = max(most[0], len(alive))
        made = load(self, *given)
        alive.add(made)
        return made

    monkeypatch.setattr(ModelParts, "_load", counted)
    StreamedModel(config(base)).hidden_states(documents(272), COPIES, lambda share: None)
    assert most == [0]


PEAKS = """
import sys
from pathlib import Path
from millstream_runtime.quality.streamed_model import StreamedModel
from tests.unit.quality.test_streamed_model import COPIES, config, documents

def status_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def peak_bytes(folder):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    StreamedModel(config(Path(folder))).hidden_states(documents(272), COPIES, lambda share: None)
    return status_bytes("VmHWM")

peak_bytes(sys.argv[1])  # what is made once per process
before = status_bytes("VmRSS")
print(*[peak_bytes(folder) - before for folder in sys.argv[1:]])
"""


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    """In a process of its own, where no other test has told malloc to keep what is freed."""
    size = {"hidden_size": 512, "intermediate_size": 2560, "head_dim": 64}
    folders = [write_tiny_model(tmp_path / str(n), num_hidden_layers=n, **size) for n in (2, 8)]
    layer_bytes = part_bytes(load_model_config(folders[0]), torch.float32).layer
    argv = [sys.executable, "-c", PEAKS, *map(str, folders)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    few, many = map(int, ended.stdout.split())
    assert layer_bytes // 2 < few, "nothing was measured"
    assert many < few + layer_bytes
    assert many < 4 * layer_bytes


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_parts_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    shape = load_model_config(folder)
    found, norm_bytes = part_bytes(shape, torch.float32), 4 * 64
    assert found.embedding == 272 * 64 * 4
    assert found.head == found.embedding + norm_bytes
    assert found.whole == expected_weights(shape, torch.float32).num_bytes
    assert 2 * found.layer + found.embedding + norm_bytes + (0 if tied else found.embedding) == found.whole


@pytest.mark.quick
def test_too_little_memory_is_refused_with_what_is_needed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = StreamedModel(config(base)), StreamedModel(config(base))
    assert room_for(*models, 100).group_tokens > GROUP_TOKENS
    monkeypatch.setattr(streamed_scores, "memory_limit_bytes", lambda: resident_bytes() + (1 << 20))
    with pytest.raises(RuntimeFailure, match=r"Judging needs 1\d\.\d MiB for one layer.* 1\.0 MiB of memory is usable"):
        room_for(*models, 100)


def test_a_document_that_is_too_long_for_the_memory_is_refused_before_it_is_read(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden states are in memory at once: the process would be killed without a word, perhaps after hours."""
    models, longest = (StreamedModel(config(base)), StreamedModel(config(base))), 100 * GROUP_TOKENS
    monkeypatch.setattr(streamed_scores, "memory_limit_bytes", lambda: resident_bytes() + (128 << 20))
    assert room_for(*models, GROUP_TOKENS)
    with pytest.raises(RuntimeFailure, match=r"needs 0\.79 GiB .* smaller --max-tokens \(a document has 1638400\)"):
        room_for(*models, longest)


def test_answers_are_left_out_where_the_whole_model_does_not_fit(
    base: Path, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = scores_of(base, changed(noise(0.1)), documents(272), GROUP_TOKENS)[:1]
    streamed, prompts = StreamedModel(config(base)), [comparison._prompt(one) for one in worst]
    (answer,) = comparison._answers(config(base), streamed, prompts)
    assert answer
    monkeypatch.setattr(comparison, "memory_limit_bytes", lambda: resident_bytes() + (1 << 10))
    assert comparison._answers(config(base), streamed, prompts) == [None]
