"""What runs under gptqmodel's Python (`make packers`): it packs the tiny Llama and computes what a folder holds.

python -m tests.packers.gptqmodel_side pack FOLDER        a folder and expected logits per entry of `SETTINGS`
python -m tests.packers.gptqmodel_side logits FOLDER FILE  a folder's logits of `tiny_llama.prompts`
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# It starts two threads that load models and allows as many as half the cores: on two cores that is an error.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

from tests.packers import tiny_llama

SETTINGS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "desc_act": False},
    "int4-act-order": {"bits": 4, "desc_act": True},
    "int4-v2-zeros": {"bits": 4, "desc_act": False, "sym": False, "format": "gptq_v2"},
    "awq": {"bits": 4, "method": "awq", "format": "gemm"},
    "int8": {"bits": 8, "desc_act": False},
    "int8-v2-zeros-act-order": {"bits": 8, "desc_act": True, "sym": False, "format": "gptq_v2"},
}
# It searches AWQ's clips for 64 outputs at a time.
AWQ_SIZES = {"num_key_value_heads": 4, "intermediate_size": 64}


def pack(root: Path, name: str) -> None:
    """Write `root/NAME` and `root/NAME.expected.safetensors`, as `SETTINGS` says."""
    torch.manual_seed(0)
    sequences = [{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in tiny_llama.calibration()]
    is_awq = name == "awq"
    backend = BACKEND.AWQ_TORCH if is_awq else BACKEND.GPTQ_TORCH  # by itself it takes an AWQ kernel for CUDA
    with tempfile.TemporaryDirectory() as scratch:
        plain = tiny_llama.write_model(Path(scratch) / "plain", torch.float16, **(AWQ_SIZES if is_awq else {}))
        settings = QuantizeConfig(group_size=32, **SETTINGS[name])
        model = GPTQModel.load(str(plain), settings, device="cpu", dtype=torch.float16)
        with contextlib.chdir(scratch):  # it writes logs
            model.quantize(sequences, batch_size=1, backend=backend)
        model.save(f"{scratch}/packed")
        tiny_llama.keep_weights_and_config(Path(scratch) / "packed", root / name)
    tiny_llama.write_expected(root / f"{name}.expected.safetensors", logits(root / name))


def logits(folder: Path) -> list[torch.Tensor]:
    """Logits of a GPTQ or AWQ folder: weights dequantized by gptqmodel, scales and products in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = tiny_llama.with_tokenizer(folder, Path(scratch) / "copy")
        is_awq = tiny_llama.quant_method(folder) == "awq"
        backend = BACKEND.AWQ_TORCH if is_awq else BACKEND.GPTQ_TORCH
        # float16: it reads scales in the type of the model, and bfloat16 would round them.
        model = GPTQModel.load(str(copy), device="cpu", backend=backend, dtype=torch.float16).model.eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, (TorchLinear, AwqTorchLinear)):
            model.set_submodule(name, _dequantized(module))
    model.float()
    return [tiny_llama.logits_of(model, prompt) for prompt in tiny_llama.prompts()]


def _dequantized(module: Any) -> torch.nn.Linear:
    module.scales = module.scales.float()  # what gptqmodel multiplies codes in: 16 bits would round each weight
    if isinstance(module, AwqTorchLinear):
        weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
    else:
        weight = module.dequantize_weight()
    linear = torch.nn.Linear(weight.shape[0], weight.shape[1], bias=False)
    linear.weight.data = weight.float().t().contiguous()
    return linear


if __name__ == "__main__":
    action, folder, *file = sys.argv[1:]
    if action == "pack":
        for name in SETTINGS:
            pack(Path(folder), name)
    else:
        tiny_llama.write_expected(Path(file[0]), logits(Path(folder)))
