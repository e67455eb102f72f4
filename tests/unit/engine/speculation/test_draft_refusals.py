"""Draft models that cannot serve are refused at boot: one sentence that names the flag, the value and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.config import BootConfig, SpeculationMethod
from millstream_runtime.engine.execution import draft_shard
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure
from millstream_runtime.models.registry import expected_weights, load_model_config
from tests.support.engines import MakeEngine, WriteModel
from tests.support.runtime_args import from_args
from tests.support.word_tokenizer import write_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"num_hidden_layers": 1, "intermediate_size": 16}
Refuse = Callable[..., str]


@pytest.fixture
def refuse(make_engine: MakeEngine) -> Refuse:
    """`refuse(folder, draft, **config)`: the message."""

    def message(folder: Path, draft: Path, **config: Any) -> str:
        with pytest.raises(RuntimeFailure) as found:
            make_engine(folder, speculation_method=SpeculationMethod.DRAFT_MODEL, draft_model=str(draft), **config)
        text = found.value.message
        assert "\n" not in text
        assert str(draft) in text or "draft model" in text
        return text

    return message


def test_a_missing_folder(refuse: Refuse, write_model: WriteModel, tmp_path: Path) -> None:
    text = refuse(write_model(), tmp_path / "none")
    assert text.startswith("--draft-model is '")
    assert "is no folder; name a folder with config.json" in text


def test_an_empty_folder(refuse: Refuse, write_model: WriteModel, tmp_path: Path) -> None:
    assert "config.json" in refuse(write_model(), tmp_path)


def test_another_size_of_vocabulary(refuse: Refuse, write_model: WriteModel) -> None:
    text = refuse(write_model(), write_model(**SMALL, vocab_size=150))
    assert "its vocab_size is 150, the target's 199; name a draft model with the target's tokenizer" in text


def test_another_content_of_the_same_size(refuse: Refuse, write_model: WriteModel) -> None:
    target, draft = write_model(pad_token_id=3), write_model(**SMALL, pad_token_id=3)
    write_tokenizer(target, 199)
    assert "only the target has a tokenizer" in refuse(target, draft)
    write_tokenizer(draft, 199, w7=8, w8=7)
    assert "token 'w7' has the id 7 in the target and has the id 8 in the draft model" in refuse(target, draft)
    write_tokenizer(draft, 198, other=198)
    assert "token 'w198' has the id 198 in the target and is missing in the draft model" in refuse(target, draft)


def test_a_larger_model(refuse: Refuse, write_model: WriteModel) -> None:
    text = refuse(write_model(), write_model(num_hidden_layers=3))
    assert "are larger than those of" in text
    assert text.endswith("name a smaller one.")


def test_no_memory_for_its_weights(refuse: Refuse, write_model: WriteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_model(**SMALL)
    needed = sum(expected_weights(load_model_config(one), torch.float32).num_bytes for one in (small, write_model()))
    monkeypatch.setattr(draft_shard, "memory_limit_bytes", lambda: needed - (110 << 10))
    text = refuse(write_model(), small)
    flags = "--speculation-method and --draft-model"
    assert f"0.1 MiB are missing; give more memory, or leave {flags} out (spec.speculation)." in text


def test_no_memory_for_its_keys(refuse: Refuse, write_model: WriteModel) -> None:
    """What the model alone has room for is too little for both."""
    folder = write_model(max_position_embeddings=4096)
    text = refuse(folder, folder, max_model_len=2500)
    assert "The KV cache for one request of 2500 tokens needs" in text
    assert "The draft model takes 0." in text
    assert "384 bytes per token of this; leave --speculation-method and --draft-model out" in text


def test_an_architecture_that_the_runtime_does_not_run(refuse: Refuse, write_model: WriteModel, tmp_path: Path) -> None:
    config = json.loads((write_model(**SMALL) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel" in refuse(write_model(), tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculation-method", "DraftModel"], "--speculation-method is DraftModel, but --draft-model is missing"),
        (["--draft-model", "d"], "--draft-model is 'd', but --speculation-method is Disabled; set it to DraftModel"),
        (["--speculation-method", "NGram", "--draft-model", "d"], "--draft-model is 'd', but --speculation-method is"),
        (["--speculation-method", "DraftModel", "--draft-model", ""], "but --draft-model is missing"),
        (
            ["--speculation-method", "NGram", "--speculation-acceptance", "Distribution"],
            "--speculation-acceptance is Distribution, but --speculation-method is NGram; set it to DraftModel",
        ),
        *(
            (
                ["--speculation-method", "DraftModel", "--draft-model", "d", "--max-draft-tokens", str(count)],
                f"--max-draft-tokens is {count}; it must be between 1 and 16",
            )
            for count in (0, -1, 17)
        ),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidConfigError) as found:
        from_args(["--model", "m", *flags])
    assert message in found.value.message


def test_flags_and_what_is_left_out_of_the_boot_file() -> None:
    config = from_args(["--model", "m", "--speculation-method", "DraftModel", "--draft-model", "d"])
    assert (config.draft_tokens, config.draft_model) == (5, "d")
    assert config.boot.as_dict()["draft_model"] == "d"
    assert "draft_model" not in BootConfig(model="m", served_model_name="m").as_dict()
