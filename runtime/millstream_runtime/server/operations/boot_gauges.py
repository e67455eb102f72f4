"""The boot ledger, the measured memory and the choice of kernels as Prometheus gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from millstream_runtime.boot import BootSnapshot
from millstream_runtime.engine.kernel_backends import KernelChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse


def boot_gauges(labels: Mapping[str, str], boot: BootSnapshot, memory: MemoryUse | None) -> Iterable[Metric]:
    """For `/metrics`; unknown values are left out."""
    values = [*labels.values()]
    seconds = GaugeMetricFamily(
        "millstream_boot_phase_seconds", "Seconds spent in each phase of the boot", labels=[*labels, "phase"]
    )
    for phase, spent in boot.seconds.items():
        seconds.add_metric([*values, phase.value], spent)
    yield seconds
    num_bytes = GaugeMetricFamily(
        "millstream_boot_phase_bytes", "Bytes that a phase of the boot read or took", labels=[*labels, "phase"]
    )
    for phase, count in boot.num_bytes.items():
        num_bytes.add_metric([*values, phase.value], count)
    yield num_bytes
    if boot.weights is not None and (rate := boot.weights.bytes_per_second) is not None:
        family = GaugeMetricFamily(
            "millstream_weights_load_bytes_per_second", "Mean rate at which the checkpoint was read", labels=[*labels]
        )
        family.add_metric(values, rate)
        yield family
    if memory is not None:
        yield from _memory(labels, memory.measured())


def kernel_gauges(
    labels: Mapping[str, str], kernels: Sequence[KernelChoice], lookups: Mapping[str, int]
) -> Iterable[Metric]:
    """What computes each part of the model, and why; nothing before the model is loaded."""
    if not kernels:
        return
    family = GaugeMetricFamily(
        "millstream_kernel_backend",
        "1 for the code that computes a part of the model: torch or triton",
        labels=[*labels, "part", "backend", "reason"],
    )
    for one in kernels:
        family.add_metric([*labels.values(), one.part, one.backend.value, one.reason], 1)
    yield family
    found = GaugeMetricFamily(
        "millstream_kernel_lookups",
        "Kernels that the boot looked up among those compiled ahead: found, missing, damaged; and compiled",
        labels=[*labels, "result"],
    )
    for result, count in lookups.items():
        found.add_metric([*labels.values(), result], count)
    yield found


def _memory(labels: Mapping[str, str], measured: Mapping[str, int]) -> Iterable[Metric]:
    tokens = GaugeMetricFamily("millstream_kv_cache_tokens", "Tokens that the KV pool holds", labels=[*labels])
    tokens.add_metric([*labels.values()], measured["kv_cache_tokens"])
    yield tokens
    family = GaugeMetricFamily(
        "millstream_memory_bytes",
        "Measured memory of one device by its use: weights, activations, graphs, kv_cache, and those of a draft model",
        labels=[*labels, "use"],
    )
    for name, count in measured.items():
        if name.endswith("_bytes"):
            family.add_metric([*labels.values(), name.removesuffix("_bytes")], count)
    yield family
