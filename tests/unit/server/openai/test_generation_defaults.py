"""What the server does with generation_config.json, and what its log says of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from millstream_runtime.server.openai.sampling import SamplingDefaults


def test_what_is_not_applied_of_generation_config_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "generation_config.json"
    # As published: nothing here asks for what the server does not do.
    quiet = GenerationConfig(temperature=0.6, top_p=0.9, do_sample=True, eos_token_id=[2], num_beams=1).to_dict()
    path.write_text(json.dumps(quiet | {"no_repeat_ngram_size": 0, "typical_p": 1.0, "output_scores": True}))
    assert SamplingDefaults.from_folder(tmp_path).temperature == 0.6
    assert not caplog.records
    loud = {"no_repeat_ngram_size": 3, "temperature": 7, "max_length": 4096, "event": "x", "a\nb": "c\nd"}
    path.write_text(json.dumps(quiet | loud | {"suppress_tokens": [1], "min_length": None}))
    SamplingDefaults.from_folder(tmp_path)
    (record,) = caplog.records
    assert record.message == "generation_config_not_applied"
    assert getattr(record, "fields", {})["values"] == (
        'a\\nb: "c\\nd", event: "x", max_length: 4096, no_repeat_ngram_size: 3, suppress_tokens: [1], temperature: 7'
    )
