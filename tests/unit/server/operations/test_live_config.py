"""The live half: applied while the server runs; a bad file changes nothing and is reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream_runtime.boot import BootLedger
from millstream_runtime.config import BootConfig, Device, GovernorMode, LiveConfig, LogLevel, RuntimeConfig
from millstream_runtime.config_files import dump
from millstream_runtime.engine_process.messages import Command, SetTargetItl
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.server.engine.client import EngineClient
from millstream_runtime.server.http.sockets import bind
from millstream_runtime.server.model_server import ModelServer
from millstream_runtime.server.operations.live_config import LiveConfigFile
from tests.support.command_line import config_from_command_line
from tests.support.engine_thread import EngineThreads
from tests.support.server_thread import serving, wait_for
from tests.support.slow_steps import SlowSteps


@pytest.fixture(autouse=True)
def log_level_is_restored() -> Iterator[None]:
    log = logging.getLogger("millstream")
    before = log.level
    yield
    log.setLevel(before)


def write(file: Path, live: LiveConfig | str) -> None:
    """As the kubelet does: a new file takes the old one's place at once."""
    fresh = file.with_suffix(".new")
    fresh.write_text(live if isinstance(live, str) else dump(live))
    fresh.replace(file)


def watching(file: Path, **options: float) -> tuple[LiveConfigFile, list[LiveConfig]]:
    applied: list[LiveConfig] = []
    return LiveConfigFile(file, applied.append, labels={"model_name": "tiny"}, **options), applied


def metrics(watched: LiveConfigFile) -> dict[str, float]:
    return {sample.name: sample.value for family in watched.collect() for sample in family.samples}


def test_a_change_is_applied_once(tmp_path: Path) -> None:
    file = tmp_path / "live.json"
    write(file, LiveConfig())
    watched, applied = watching(file)
    for _ in range(3):
        watched.reload()
    write(file, LiveConfig(heartbeat_interval_seconds=5))
    for _ in range(3):
        watched.reload()
    assert [live.heartbeat_interval_seconds for live in applied] == [30, 5]
    assert metrics(watched) == {"millstream_live_config_bad": 0.0, "millstream_live_config_loads_total": 2.0}


@pytest.mark.parametrize("bad", ["", "{", '{"heartbeat_interval_seconds": 100000}', '{"log_level": "loud"}', None])
def test_a_bad_file_keeps_the_last_good_values_and_says_so_once(
    bad: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "live.json"
    write(file, LiveConfig(heartbeat_interval_seconds=5))
    watched, applied = watching(file)
    watched.reload()
    if bad is None:
        file.unlink()
    else:
        write(file, bad)
    with caplog.at_level(logging.WARNING, logger="millstream"):
        for _ in range(3):
            watched.reload()
    assert [live.heartbeat_interval_seconds for live in applied] == [5]
    assert [record.message for record in caplog.records] == ["live_config_bad"]
    assert metrics(watched)["millstream_live_config_bad"] == 1.0
    write(file, LiveConfig(heartbeat_interval_seconds=6))
    watched.reload()
    assert [live.heartbeat_interval_seconds for live in applied] == [5, 6]
    assert not watched.is_bad


def test_the_thread_looks_again_and_ends_when_told(tmp_path: Path) -> None:
    file = tmp_path / "live.json"
    write(file, LiveConfig())
    watched, applied = watching(file, poll_seconds=0.01)
    watched.start()
    wait_for(lambda: len(applied) == 1, "the first look")
    write(file, LiveConfig(heartbeat_interval_seconds=5))
    wait_for(lambda: len(applied) == 2, "the change")
    watched.stop()


async def test_a_server_takes_heartbeats_and_log_level_over_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "live.json"
    write(file, LiveConfig(heartbeat_interval_seconds=7, log_level=LogLevel.INFO))
    config = RuntimeConfig(model=str(tmp_path), served_model_name="tiny", device=Device.CPU, host="127.0.0.1", port=0)
    listener = bind(config.host, config.port)
    server = ModelServer(config, listener, BootLedger(0.0), EngineThreads(config), live_config=file)
    try:
        assert server.service.engine.heartbeat_interval_seconds == 7, "the file wins over what was begun with"
        assert server.live_config is not None
        write(file, LiveConfig(heartbeat_interval_seconds=0, log_level=LogLevel.ERROR))
        server.live_config.reload()
        assert server.service.engine.heartbeat_interval_seconds == 0
        assert logging.getLogger("millstream").level == logging.ERROR
        exposed = server.service.metrics.exposition().decode()
        assert 'millstream_live_config_loads_total{engine="0",model_name="tiny"} 2.0' in exposed
        assert 'millstream_heartbeat_interval_seconds{engine="0",model_name="tiny"} 0.0' in exposed
    finally:
        server.service.close()
        listener.close()


async def test_without_a_log_level_in_the_file_that_of_the_start_holds_again(tmp_path: Path) -> None:
    """To make a server quiet again, its level is left out: it stayed at debug until the next restart."""
    log = logging.getLogger("millstream")
    log.setLevel(logging.ERROR)  # as a flag or the environment says
    file = tmp_path / "live.json"
    write(file, LiveConfig())
    config = RuntimeConfig(model=str(tmp_path), served_model_name="tiny", device=Device.CPU, host="127.0.0.1", port=0)
    listener = bind(config.host, config.port)
    server = ModelServer(config, listener, BootLedger(0.0), EngineThreads(config), live_config=file)
    try:
        assert server.live_config is not None
        for level, found in ((LogLevel.DEBUG, logging.DEBUG), (None, logging.ERROR), (LogLevel.INFO, logging.INFO)):
            write(file, LiveConfig(log_level=level))
            server.live_config.reload()
            assert log.level == found
    finally:
        server.service.close()
        listener.close()


def test_a_target_of_the_itl_is_taken_over_without_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    """While the file has one it holds; without it what the engine was started with, by a flag or by default."""
    file = tmp_path / "live.json"
    write(file, LiveConfig(target_itl_milliseconds=20))
    slow = SlowSteps()

    def target() -> object:
        return slow.engine.target_itl_milliseconds  # type: ignore[attr-defined]

    with serving(tiny_model, make_engine=slow.make, live_config=file, target_itl_milliseconds=40) as server:
        server.wait_ready()
        wait_for(lambda: target() == 20, "the target of the file")
        for live, wanted in ((80, 80), (None, 40), (5, 5)):
            write(file, LiveConfig(target_itl_milliseconds=live))
            server.reload_live_config()
            wait_for(lambda wanted=wanted: target() == wanted, f"{wanted} ms")  # type: ignore[misc]
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200


def test_an_engine_that_is_started_again_begins_with_the_target_of_the_file() -> None:
    sent: list[Command] = []

    class Recorder:
        def send(self, command: Command) -> None:
            sent.append(command)

    client = EngineClient(
        lambda on_event, on_end: Recorder(),  # type: ignore[arg-type]
        BootLedger(0.0),
        on_failure=lambda failure: None,
        heartbeat_interval_seconds=0.0,
    )
    client.set_target_itl(20)
    client.start()
    assert SetTargetItl(20) in sent
    client.set_target_itl(None)
    assert sent[-1] == SetTargetItl(None)
    sent.clear()
    client.start()
    assert not [one for one in sent if isinstance(one, SetTargetItl)], "an engine begins with its own"


@pytest.mark.parametrize(("flag", "live", "found"), [(40, 20, 20), (40, None, 40), (None, 20, 20), (None, None, None)])
def test_a_target_of_the_live_half_wins_over_that_of_the_boot_half(
    flag: int | None, live: int | None, found: int | None
) -> None:
    boot = BootConfig(model="/models/x", served_model_name="x", target_itl_milliseconds=flag)
    assert RuntimeConfig.of(boot, LiveConfig(target_itl_milliseconds=live)).target_itl_milliseconds == found


def test_a_file_without_a_target_is_written_as_before() -> None:
    assert set(LiveConfig().as_dict()) == {"heartbeat_interval_seconds", "log_level"}
    assert LiveConfig(speculation_governor=GovernorMode.OBSERVE).as_dict()["speculation_governor"] == "Observe"
    assert LiveConfig(target_itl_milliseconds=20).as_dict()["target_itl_milliseconds"] == 20
    with pytest.raises(InvalidConfigError, match="target-itl-milliseconds is 0; it must be between 1 and 60000"):
        LiveConfig(target_itl_milliseconds=0)


def test_a_pods_command_line_is_a_file_and_flags_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "boot.json"
    boot = BootConfig(model="/models/x", served_model_name="x", max_num_seqs=4)
    file.write_text(dump(boot))
    assert config_from_command_line([f"--config={file}"]).boot == boot
    changed = config_from_command_line([f"--config={file}", "--max-num-seqs=5", "--log-level=debug"])
    assert (changed.max_num_seqs, changed.log_level) == (5, LogLevel.DEBUG)


MANIFEST = """
apiVersion: millstream.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: {local: {path: tiny}}}
  accelerator: {type: CPU}
  warmup: {heartbeatInterval: 5s}
"""


def test_a_manifest_on_a_laptop_brings_its_live_half_along(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(MANIFEST)
    config = config_from_command_line([str(file)])
    assert (config.heartbeat_interval_seconds, config.log_level) == (5, None)
    file.write_text(f"{MANIFEST}  runtime: {{logLevel: Warning}}\n")
    assert config_from_command_line([str(file)]).log_level is LogLevel.WARNING


@pytest.mark.parametrize("other", ["models/x", "--model=/models/x"])
def test_a_file_and_a_model_are_not_both_given(other: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="not both"):
        config_from_command_line([f"--config={tmp_path / 'boot.json'}", other])


def test_an_idle_engine_begins_to_beat_when_it_is_told_to(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, heartbeat_interval_seconds=0) as server:
        server.wait_ready()
        steps_of_warm_up = slow.engine.stats().steps_total
        server.server._on_loop(lambda: server.server.service.engine.set_heartbeat_interval(0.01))
        wait_for(lambda: slow.engine.stats().steps_total >= steps_of_warm_up + 2, "two heartbeats")
