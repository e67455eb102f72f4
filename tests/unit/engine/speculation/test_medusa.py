"""Medusa heads draft what their definition says, and change no token; what are no such heads is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from millstream_runtime.config import CAPABILITIES
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.speculation.medusa import MedusaDrafter
from millstream_runtime.errors import FailureReason, RuntimeFailure
from tests.support.drafting_engines import MakeDrafting, counts, medusa_heads_of, requests_of
from tests.support.eagle_heads import save_head
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, dense
from tests.support.medusa_heads import HEADS, write_medusa_heads
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import write_family

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


class Reference:
    """What the heads of a Llama draft behind known tokens, from transformers' hidden states."""

    def __init__(self, target: Path, heads: Path, prefix: str = "") -> None:
        self._target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        tensors = load_file(heads / "model.safetensors")
        self._tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        self._layers = json.loads((heads / "config.json").read_text())["medusa_num_layers"]

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        decoder = self._target.get_decoder()
        state = decoder(input_ids=torch.tensor([token_ids[:-1]])).last_hidden_state[0, -1]
        return [self._token(head, state) for head in range(count)]

    def _token(self, head: int, x: Tensor) -> int:
        for block in range(self._layers):
            name = f"{head}.{block}.linear"
            x = x + F.silu(F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]))
        return int((self._tensors[f"{head}.{self._layers}.weight"] @ x).argmax())


def drafter_of(engine: Engine) -> MedusaDrafter:
    assert engine._drafting is not None
    drafter = engine._drafting._drafter
    assert isinstance(drafter, MedusaDrafter)
    return drafter


def watch(engine: Engine, reference: Reference) -> list[str]:
    """Compare all proposals from now on; what differs is added to the list."""
    drafter, wrong = drafter_of(engine), list[str]()
    propose = drafter.propose

    def compared(wanted: Any) -> Any:
        answer = propose(wanted)
        for sequence, drafts in answer.items():
            if isinstance(drafts, list):
                expected = reference.drafts(sequence.token_ids, min(wanted[sequence], HEADS))
                if drafts != expected:
                    wrong.append(f"{sequence.request.request_id}: {drafts}, not {expected}")
        return answer

    drafter.propose = compared  # type: ignore[method-assign]
    return wrong


@pytest.mark.parametrize(("layers", "prefix"), [(1, ""), (2, "medusa_head.")])
def test_heads_draft_what_they_are_defined_to(
    layers: int,
    prefix: str,
    tmp_path: Path,
    write_model: WriteModel,
    medusa_headed: MakeDrafting,
    make_engine: MakeEngine,
) -> None:
    folder = write_model()
    heads = write_medusa_heads(tmp_path, layers=layers, prefix=prefix)
    engine = medusa_headed(folder, heads)
    wrong = watch(engine, Reference(folder, heads, prefix))
    for sampling in (greedy(20), SamplingParams(20, temperature=1.0, seed=3)):
        asked = requests_of((21, 1, 40), sampling)
        assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert wrong == []
    found = counts(engine)
    assert found.num_draft_tokens > 150
    assert not any(found.accepted_per_position[HEADS:]), "three heads give three drafts"


def test_preemptions_and_cached_prefixes_keep_the_states(
    tmp_path: Path, write_model: WriteModel, medusa_headed: MakeDrafting
) -> None:
    heads = write_medusa_heads(tmp_path)
    engine = medusa_headed(write_model(), heads)
    shrink_pool(engine, 17, enable_prefix_caching=True)
    wrong = watch(engine, Reference(write_model(), heads))
    asked = requests_of((30, 61, 45, 12, 77, 30), greedy(20))
    for turn in range(2):
        generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
    assert engine.stats().num_preemptions_total > 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    assert wrong == []


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_and_groups_of_layers(
    family: str, tmp_path: Path, medusa_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    config = dense("mistral", sliding_window=24, vocab_size=199) if family == "mistral" else CASES["gemma3"].config
    write_family(tmp_path, **config)
    heads = medusa_heads_of(tmp_path, tmp_path / "heads")
    more = {"enable_hybrid_kv_cache_manager": True} if family == "gemma3" else {}
    engine = medusa_headed(tmp_path, heads, block_size_tokens=8, **more)
    asked = [Request(str(size), [3 + place % 60 for place in range(size)], greedy(30)) for size in (3, 30, 60)]
    assert generate(engine, asked) == generate(make_engine(tmp_path, block_size_tokens=8), asked)
    assert counts(engine).num_draft_tokens > 100


def test_the_states_are_counted_and_nan_ends_the_drafts_of_its_request(
    tmp_path: Path, write_model: WriteModel, medusa_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    asked = requests_of((21, 40), greedy(20))
    engine = medusa_headed(write_model(), write_medusa_heads(tmp_path))
    use, forward = engine.memory_use, drafter_of(engine)._forward
    assert use.draft_kv_cache_bytes == use.kv_cache_tokens * 48 * 4
    assert use.draft_weights_bytes is not None
    assert use.draft_weights_bytes >= HEADS * (48 * 48 + 48 + 199 * 48) * 4
    states, passes = forward.target_states, 0

    def spoil_one(slots: list[int]) -> Tensor:
        nonlocal passes
        passes += 1
        found = states(slots)
        if passes == 4:
            found[0] = torch.nan
        return found

    forward.target_states = spoil_one  # type: ignore[method-assign]
    assert generate(engine, asked) == generate(make_engine(write_model()), asked)
    assert counts(engine).skipped["draft_not_finite"] > 5
    assert counts(engine).num_draft_tokens > 20, "of the other request"


@pytest.fixture
def refuse(tmp_path: Path, write_model: WriteModel, medusa_headed: MakeDrafting) -> Callable[..., str]:
    """`refuse(change, reason)`: the message, of a folder whose config.json and tensors are changed."""

    def message(change: Change, reason: FailureReason = FailureReason.CHECKPOINT_INVALID, **more: Any) -> str:
        heads = write_medusa_heads(tmp_path)
        config, tensors = json.loads((heads / "config.json").read_text()), load_file(heads / "model.safetensors")
        change(config, tensors)
        save_head(heads, config, tensors)
        with pytest.raises(RuntimeFailure) as found:
            medusa_headed(write_model(), heads, **more)
        assert "\n" not in found.value.message
        assert found.value.reason is reason
        return found.value.message

    return message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, tensors: config.pop("medusa_num_heads"), "medusa_num_heads is missing; name the folder"),
        (lambda config, tensors: config.update(medusa_num_heads=17), "medusa_num_heads is 17; it must be a positive"),
        (lambda config, tensors: config.update(medusa_num_heads=4), "tensor 3.0.linear.bias [48] is missing"),
        (lambda config, tensors: config.update(medusa_num_heads=2), "tensor 2.0.linear.bias is no part of the Medusa"),
        (
            lambda config, tensors: tensors.update({"medusa_head.0.1.weight": torch.ones(199, 48)}),
            "tensor medusa_head.0.1.weight is no part of the Medusa",
        ),
        (lambda config, tensors: tensors.pop("1.1.weight"), "tensor 1.1.weight [199, 48] is missing"),
        (
            lambda config, tensors: tensors.update({"0.1.weight": torch.ones(64, 48)}),
            "tensor 0.1.weight has shape [64, 48]; config.json asks for [199, 48]",
        ),
        (lambda config, tensors: tensors["0.0.linear.bias"].fill_(torch.inf), "model.safetensors holds NaN or"),
    ],
)
def test_a_folder_without_such_heads(change: Change, said: str, refuse: Callable[..., str]) -> None:
    assert said in refuse(change)


def test_heads_of_another_target_and_devices_without_them(refuse: Callable[..., str]) -> None:
    text = refuse(lambda config, tensors: config.update(hidden_size=64), FailureReason.INVALID_CONFIG)
    assert "whose hidden_size is 64, and that of" in text
    assert "Medusa heads serve only the model that they were trained with" in text
    assert "Medusa" not in CAPABILITIES.speculation_methods, "a GPU has none"
