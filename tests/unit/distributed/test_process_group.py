"""What gloo and NCCL say of an error names variables, and not their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_runtime.distributed.process_group import join, without_values
from millstream_runtime.errors import FailureReason, RuntimeFailure

SECRET = "s3cretmarker"


@pytest.mark.parametrize("value", [SECRET, f"={SECRET}", f"{SECRET}:1,{SECRET}2"])
def test_an_interface_that_is_not_there_is_named_by_its_variable(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    with pytest.raises(RuntimeFailure) as caught:
        join(0, 1, torch.device("cpu"), tmp_path / "store", 10.0)
    assert caught.value.reason is FailureReason.NCCL_FAILED
    assert SECRET not in caught.value.message
    assert "$GLOO_SOCKET_IFNAME" in caught.value.message


def test_words_that_are_no_values_stay() -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "22", "GLOO_SOCKET_IFNAME": "lo", "HOME": "ncclSystemError"}
    said = "NCCL WARN ncclSystemError: 22 lo"
    assert without_values(said, environment) == said
    assert without_values("no mlx5_0 here", {"NCCL_IB_HCA": "^mlx5_0:1"}) == "no $NCCL_IB_HCA here"
