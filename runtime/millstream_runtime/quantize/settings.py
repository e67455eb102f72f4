"""What `millstream quantize` was asked for. No torch: the command line reads it before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millstream_runtime.errors import InvalidConfigError

GROUP_SIZES = (128, 64, 32)  # tried in this order where the user names none
LEAST_GROUP_SIZE, LARGEST_GROUP_SIZE = 16, 1024


class Method(StrEnum):
    """How weights are rounded."""

    RTN = "rtn"
    AWQ = "awq"
    GPTQ = "gptq"
    INT8 = "int8"
    FP8 = "fp8"
    NF4 = "nf4"
    GGUF = "gguf"


class ActOrder(StrEnum):
    """In which order GPTQ rounds inputs: `NONE` the file's, else the most important first. `GROUP` puts inputs that
    follow one another in that order into one group; the others keep the file's groups."""

    NONE = "none"
    STATIC = "static"
    GROUP = "group"


class ActivationScheme(StrEnum):
    """Where the scales of FP8 activations come from: the server, token by token, or the calibration data."""

    DYNAMIC = "dynamic"
    STATIC = "static"


FOUR_BIT = (Method.RTN, Method.AWQ, Method.GPTQ)
GGUF_TYPES = ("Q4_K", "Q8_0")  # the first one where the user names none
WEIGHTS = (".safetensors", ".gguf")  # of files


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """`group_size` None: the largest of GROUP_SIZES that divides the inputs of every layer."""

    model: Path
    out: Path
    method: Method
    group_size: int | None
    calibration: Path | None
    held_out: Path | None
    sequence_tokens: int
    max_sequences: int
    seed: int
    device: str  # auto | cpu | cuda
    with_quality: bool
    act_order: ActOrder = ActOrder.STATIC
    activation_scheme: ActivationScheme = ActivationScheme.DYNAMIC
    gguf_type: str = GGUF_TYPES[0]
    keep_made: bool = False
    discard_other_work: bool = False
    check_data: Path | None = None  # documents that the result is judged by elsewhere: checked before it is made

    def keeps_what_is_there(self) -> bool:
        """Whether `out` has a model, which `keep_made` leaves as it is. The folder appears whole."""
        return self.keep_made and bool(weights_files(self.out))


def weights_files(folder: Path) -> list[Path]:
    """Return the files of weights of a folder that was made; none where there is no such folder."""
    return [path for path in folder.iterdir() if path.suffix in WEIGHTS] if folder.is_dir() else []


def method_named(name: str) -> Method:
    """Return the method of a name, which may be written as in a spec: AWQ.

    Raises:
        InvalidConfigError: it is unknown; the message says which are known.
    """
    known = ", ".join(Method)
    try:
        return Method(name.lower())
    except ValueError:
        raise InvalidConfigError(f"--method {name!r} is unknown; this version makes: {known}.") from None


def check_group_size(group_size: int | None) -> None:
    """Raises InvalidConfigError: no published format has groups of that size."""
    if group_size is None:
        return
    is_power_of_two = group_size > 0 and group_size & (group_size - 1) == 0
    if not is_power_of_two or not LEAST_GROUP_SIZE <= group_size <= LARGEST_GROUP_SIZE:
        raise InvalidConfigError(
            f"--group-size is {group_size}; it must be a power of two from {LEAST_GROUP_SIZE} to {LARGEST_GROUP_SIZE}."
        )
