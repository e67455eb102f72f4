"""`fetch` from a hub: a local stand-in for the Hugging Face Hub and its CDN, over real sockets."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources import transfer
from millstream_runtime.sources.client import HTTPStatus, RetryPolicy
from millstream_runtime.sources.fetch import FetchOptions, FetchResult, fetch
from millstream_runtime.sources.folder import MARKER_NAME, PARTIAL_NAME
from millstream_runtime.sources.hugging_face import HuggingFace
from millstream_runtime.sources.lock import LOCK_NAME
from tests.support.local_hub import COMMIT, LocalCDN, LocalHub, sha256
from tests.support.local_web import Fault
from tests.support.model_files import SHARDS, WANTED, Naps, safetensors

SECRET = "hf_a-secret-token"


class Fetching:
    """`fetching(revision=…)` with the local hub; `said` is what a person would read."""

    def __init__(self, hub: LocalHub, into: Path, policy: RetryPolicy, options: FetchOptions) -> None:
        self.hub, self.into, self.policy, self.options = hub, into, policy, options
        self.said: list[str] = []

    def __call__(self, revision: str = "main", *, token: str | None = None, verify: bool = False) -> FetchResult:
        source = HuggingFace("org/tiny", revision, endpoint=self.hub.url, token=token, policy=self.policy)
        return fetch(source, self.into, self.said.append, replace(self.options, verify=verify))

    def failure(self, **how: str) -> RuntimeFailure:
        with pytest.raises(RuntimeFailure) as caught:
            self(**how)  # type: ignore[arg-type]
        assert "\n" not in caught.value.message
        return caught.value

    def visible(self) -> set[str]:
        return {path.name for path in self.into.iterdir() if not path.name.startswith(".")}

    def complete(self) -> bool:
        return (self.into / MARKER_NAME).exists()


@pytest.fixture
def fetching(hub: LocalHub, tmp_path: Path, policy: RetryPolicy, options: FetchOptions) -> Fetching:
    return Fetching(hub, tmp_path / "models" / "tiny", policy, options)


def test_a_model_arrives_verified_and_nothing_else_does(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    result = fetching()
    assert fetching.visible() == WANTED
    assert all((fetching.into / name).read_bytes() == hub.files[name] for name in WANTED)
    marker = json.loads((fetching.into / MARKER_NAME).read_text())
    assert marker["revision"] == COMMIT
    assert marker["requested_revision"] == "main"
    assert marker["source"] == {"kind": "huggingFace", "repository": "org/tiny"}
    assert {file["name"]: file["digest"] for file in marker["files"]} == {
        name: f"sha256:{sha256(hub.files[name])}" for name in WANTED
    }
    total_bytes = sum(len(hub.files[name]) for name in WANTED)
    assert result.as_json()["total_bytes"] == result.downloaded_bytes == marker["total_bytes"] == total_bytes
    for never in ("pytorch_model.bin", "modeling_evil.py", "consolidated", "README"):
        assert hub.gets(never) == 0
    assert hub.sent("/resolve/") + cdn.sent("/blobs/") == total_bytes
    assert not (fetching.into / PARTIAL_NAME).exists()
    assert not (fetching.into / LOCK_NAME).exists()


TEMPLATES = {
    "additional_chat_templates/default.jinja": b"{{ 1 }}",
    "additional_chat_templates/tool_use.jinja": b"{{ 2 }}",
}


def test_named_chat_templates_arrive_and_no_other_file_in_a_folder(fetching: Fetching, hub: LocalHub) -> None:
    hub.files |= TEMPLATES
    hub.files |= dict.fromkeys(("additional_chat_templates/x.json", "additional_chat_templates/a/b.jinja"), b"{}")
    hub.files |= dict.fromkeys(("other/default.jinja", "additional_chat_templates/.hidden.jinja"), b"x")
    fetching()
    below = {str(path.relative_to(fetching.into)): path for path in fetching.into.rglob("*") if path.is_file()}
    assert {name for name in below if not name.startswith(".")} == WANTED | {*TEMPLATES}
    assert {name: below[name].read_bytes() for name in TEMPLATES} == TEMPLATES
    hub.requests.clear()
    assert fetching().kept
    below["additional_chat_templates/default.jinja"].write_bytes(b"{{ 3 }}{{ 3 }}")
    assert not fetching().kept
    assert below["additional_chat_templates/default.jinja"].read_bytes() == b"{{ 1 }}"


def test_a_named_chat_template_is_not_written_through_a_link(fetching: Fetching, hub: LocalHub, tmp_path: Path) -> None:
    hub.files |= TEMPLATES
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fetching.into.mkdir(parents=True)
    (fetching.into / "additional_chat_templates").symlink_to(elsewhere)
    assert "additional_chat_templates is a link or a file" in fetching.failure().message
    assert not [*elsewhere.iterdir()]
    assert not fetching.complete()


def test_a_named_chat_template_of_another_model_is_refused(fetching: Fetching) -> None:
    (fetching.into / "additional_chat_templates").mkdir(parents=True)
    (fetching.into / "additional_chat_templates" / "default.jinja").write_text("{{ 1 }}")
    assert "additional_chat_templates/default.jinja, which is not part of this model" in fetching.failure().message


def test_a_second_run_asks_nobody(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    fetching()
    hub.requests.clear()
    cdn.requests.clear()
    hub.commits["main"] = "f" * 40  # the branch moved on: a folder that is complete stays what it is
    before = {path: path.stat().st_mtime_ns for path in fetching.into.iterdir()}
    result = fetching()
    assert (result.kept, result.downloaded_bytes, result.marker.revision) == (True, 0, COMMIT)
    assert fetching(revision=COMMIT).kept
    assert not hub.requests + cdn.requests
    assert {path: path.stat().st_mtime_ns for path in fetching.into.iterdir()} == before


def test_a_cut_download_resumes_where_it_was_cut(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    cdn.faults.append(Fault("/blobs/", times=2, cut_after_bytes=500_000))
    result = fetching()
    weights_bytes = sum(len(hub.files[name]) for name in SHARDS)
    assert cdn.sent("/blobs/") == weights_bytes, "no byte came twice"
    assert result.downloaded_bytes == result.marker.total_bytes
    assert any("cut after" in line for line in fetching.said)


def test_the_next_process_resumes_what_the_last_one_left(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    cdn.faults.append(Fault("/blobs/", times=8, cut_after_bytes=100_000))
    fetching.policy = replace(fetching.policy, attempts=1)
    fetching.options = replace(fetching.options, parallel=1)  # what others had in flight would come again
    assert fetching.failure().reason is FailureReason.DOWNLOAD_FAILED
    assert not fetching.complete()
    assert fetching.visible() == set(), "nothing looks like a model before all of it is right"
    cdn.faults.clear()
    fetching()
    assert cdn.sent("/blobs/") == sum(len(hub.files[name]) for name in SHARDS)


def test_a_server_that_ignores_ranges_is_read_from_the_start(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    cdn.faults += [Fault("/blobs/", times=2, cut_after_bytes=500_000), Fault("/blobs/", times=2, ignore_range=True)]
    fetching()
    assert all((fetching.into / name).read_bytes() == hub.files[name] for name in SHARDS)


def test_content_that_is_wrong_once_is_fetched_again(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    cdn.faults.append(Fault("/blobs/", garble=True))
    fetching()
    assert all((fetching.into / name).read_bytes() == hub.files[name] for name in SHARDS)


@pytest.mark.parametrize("where", ["/blobs/", "tokenizer.json"])
def test_content_that_stays_wrong_is_refused_and_leaves_nothing(
    fetching: Fetching, hub: LocalHub, cdn: LocalCDN, where: str
) -> None:
    for server in (hub, cdn):
        server.faults.append(Fault(where, times=100, garble=True))
    failure = fetching.failure()
    assert failure.reason is FailureReason.DOWNLOAD_FAILED
    assert "its source promised" in failure.message
    assert not fetching.complete()
    assert fetching.visible() == set()


def test_a_damaged_partial_on_disk_is_noticed(fetching: Fetching, hub: LocalHub) -> None:
    key = sha256(hub.files[SHARDS[0]])
    (fetching.into / PARTIAL_NAME).mkdir(parents=True)
    (fetching.into / PARTIAL_NAME / f"sha256-{key}.part").write_bytes(b"x" * 1000)
    fetching()
    assert (fetching.into / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry-After": "7"}), (503, {}), (500, {})])
def test_a_busy_hub_is_asked_again_when_it_says(
    fetching: Fetching, hub: LocalHub, naps: Naps, status: int, headers: dict[str, str]
) -> None:
    hub.faults += [
        Fault("/api/models", status=status, headers=headers),
        Fault(SHARDS[1], status=status, headers=headers),
    ]
    fetching()
    assert len(naps.seconds) == 2
    if headers:
        assert all(seconds >= 7 for seconds in naps.seconds)


def test_a_hub_that_stays_broken_is_named_with_its_code(fetching: Fetching, hub: LocalHub, naps: Naps) -> None:
    hub.faults.append(Fault("/api/models", times=100, status=502))
    failure = fetching.failure()
    assert failure.reason is FailureReason.DOWNLOAD_FAILED
    assert "HTTP 502" in failure.message
    assert len(naps.seconds) == 3, "four attempts"


def test_nobody_at_the_endpoint(fetching: Fetching) -> None:
    source = HuggingFace("org/tiny", endpoint="http://127.0.0.1:9", policy=fetching.policy)
    with pytest.raises(RuntimeFailure, match=r"does not answer.*; check the network, HTTPS_PROXY and HF_E") as caught:
        fetch(source, fetching.into, fetching.said.append, fetching.options)
    assert caught.value.reason is FailureReason.DOWNLOAD_FAILED


def test_tokens(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    hub.token = SECRET
    for token, says in ((None, "no token was given"), ("hf_wrong-one", "The token was refused")):
        failure = fetching.failure(**({"token": token} if token else {}))
        assert failure.reason is FailureReason.DOWNLOAD_UNAUTHORIZED
        assert says in failure.message
        assert "HTTP 401" in failure.message
        assert "wrong-one" not in failure.message
    fetching(token=SECRET)
    seen_by_cdn = {given for path, all_given in cdn.authorizations.items() for given in all_given}
    assert seen_by_cdn == {""}, "the token goes to the hub alone"
    everything = " ".join(fetching.said) + "".join(
        path.read_text(errors="replace") for path in fetching.into.iterdir() if path.is_file()
    )
    assert SECRET not in everything
    assert "signature=" not in everything


def test_a_gated_repository_says_what_to_do(fetching: Fetching, hub: LocalHub) -> None:
    hub.gated = True
    failure = fetching.failure(token=SECRET)
    assert failure.reason is FailureReason.DOWNLOAD_UNAUTHORIZED
    assert "is gated (HTTP 403): accept its conditions on its page" in failure.message
    assert json.loads(failure.termination_message())["reason"] == "DownloadUnauthorized"


def test_a_gated_repository_of_the_default_hub_is_named_with_its_page() -> None:
    refused = HTTPStatus("the hub", 403, {"x-error-code": "GatedRepo"}, b"")
    message = HuggingFace("org/tiny", token=SECRET).explain(refused, "config.json").message
    assert "accept its conditions at https://huggingface.co/org/tiny with the account of the token" in message


def test_an_unknown_revision_and_an_unknown_repository(fetching: Fetching, hub: LocalHub) -> None:
    assert "has no revision 'v9'" in fetching.failure(revision="v9").message
    source = HuggingFace("org/other", endpoint=hub.url, policy=fetching.policy)
    with pytest.raises(RuntimeFailure, match="There is no org/other at main"):
        fetch(source, fetching.into, fetching.said.append, fetching.options)


def test_a_branch_that_moves_during_the_download_gives_one_commit(fetching: Fetching, hub: LocalHub) -> None:
    fetching()
    assert hub.gets("/resolve/main/") == 0
    assert hub.gets(f"/resolve/{COMMIT}/") == len(WANTED)


def test_a_mirror_without_sizes_is_asked_file_by_file(fetching: Fetching, hub: LocalHub) -> None:
    hub.plain_listing = True
    fetching()
    marker = json.loads((fetching.into / MARKER_NAME).read_text())
    assert {file["name"] for file in marker["files"]} == WANTED
    assert hub.requests[f"HEAD /org/tiny/resolve/{COMMIT}/{SHARDS[0]}"] == 1


def test_a_disk_that_is_too_small_is_told_before_the_weights(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    """The free space is the fake here: the edge of the world."""
    fetching.options = replace(fetching.options, free_space=lambda _: 65 << 20)
    hub.files[SHARDS[0]] = safetensors({"model.a.weight": ("BF16", [2 << 20], 4 << 20)})
    failure = fetching.failure()
    assert failure.reason is FailureReason.DISK_FULL
    assert "0.07 GB free" in failure.message
    assert cdn.sent("/blobs/") == 0


def test_a_disk_that_fills_up_while_writing(fetching: Fetching, hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake at the edge: the kernel says ENOSPC to the second shard's first write. What arrived before is kept."""
    write = transfer._Arrival.append

    def full(arrival: transfer._Arrival, data: bytes) -> None:
        if arrival.file.name == SHARDS[1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(arrival, data)

    fetching.options = replace(fetching.options, parallel=1)
    with monkeypatch.context() as patched:
        patched.setattr(transfer._Arrival, "append", full)
        failure = fetching.failure()
    assert failure.reason is FailureReason.DISK_FULL
    assert "No space is left in" in failure.message
    assert not fetching.complete()
    assert fetching().downloaded_bytes < fetching().marker.total_bytes - len(hub.files[SHARDS[0]]) + 1


def test_a_folder_that_cannot_be_one(fetching: Fetching, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for into in (tmp_path / "file", tmp_path / "file" / "below"):
        fetching.into = into
        with pytest.raises(InvalidConfigError, match="give a folder"):
            fetching()


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[::", "//[x/"])
def test_a_redirect_to_something_else_is_not_followed(fetching: Fetching, hub: LocalHub, target: str) -> None:
    hub.faults.append(Fault("tokenizer.json", times=9, status=302, headers={"Location": target}))
    failure = fetching.failure()
    assert failure.reason is FailureReason.DOWNLOAD_FAILED
    assert "redirects to" in failure.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config.json": None}, "has no config.json"),
        (
            {"model.safetensors.index.json": None, SHARDS[0]: None, SHARDS[1]: None, "consolidated.safetensors": None},
            "pickled",
        ),
        ({SHARDS[1]: None}, f"names {SHARDS[1]}, which is not there"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'}, "'../../x.safetensors'"),
        ({SHARDS[0]: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "git-lfs pointer"),
        ({SHARDS[0]: safetensors({"a": ("F32", [100], 400)})[:-9]}, "is cut"),
    ],
)
def test_a_checkpoint_that_no_server_can_use(
    fetching: Fetching, hub: LocalHub, change: dict[str, bytes | None], says: str
) -> None:
    for name, content in change.items():
        if content is None:
            del hub.files[name]
        else:
            hub.files[name] = content
    failure = fetching.failure()
    assert failure.reason is FailureReason.CHECKPOINT_INVALID
    assert says in failure.message
    assert not fetching.complete()


def test_a_folder_of_another_model_is_left_alone(fetching: Fetching, hub: LocalHub) -> None:
    fetching()
    before = (fetching.into / MARKER_NAME).read_bytes()
    hub.commits["v2"] = "a" * 40
    with pytest.raises(InvalidConfigError, match=r"holds huggingFace org/tiny at main, not org/tiny at v2"):
        fetching(revision="v2")
    assert (fetching.into / MARKER_NAME).read_bytes() == before


def test_a_folder_with_strange_model_files_is_not_mixed_with(fetching: Fetching) -> None:
    fetching.into.mkdir(parents=True)
    (fetching.into / "adapter_model.safetensors").write_bytes(b"mine")
    with pytest.raises(InvalidConfigError, match=r"holds adapter_model\.safetensors"):
        fetching()
    assert fetching.visible() == {"adapter_model.safetensors"}


def test_a_damaged_complete_folder_is_mended(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    fetching()
    (fetching.into / SHARDS[1]).write_bytes(b"short")
    hub.requests.clear()
    cdn.requests.clear()
    hub.commits["main"] = "f" * 40
    result = fetching()
    assert (result.kept, result.marker.revision, result.marker.requested_revision) == (False, COMMIT, "main")
    assert (fetching.into / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert cdn.gets("/blobs/") == 1, "only what was wrong"
    flipped = bytearray(hub.files[SHARDS[0]])
    flipped[-1] ^= 1
    (fetching.into / SHARDS[0]).write_bytes(flipped)
    assert fetching().kept, "the same size: only --verify reads it"
    assert not fetching(verify=True).kept
    assert (fetching.into / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]


def test_two_fetches_at_once_download_once(fetching: Fetching, hub: LocalHub, cdn: LocalCDN) -> None:
    hold = threading.Event()
    cdn.faults.append(Fault("/blobs/", hold=hold))
    results: list[FetchResult] = []
    first, second = (threading.Thread(target=lambda: results.append(fetching())) for _ in range(2))
    first.start()
    assert cdn.sent_half.wait(120)
    second.start()
    while not any("waiting for process" in line for line in fetching.said):
        second.join(0.01)
        assert second.is_alive()
    hold.set()
    first.join(60)
    second.join(60)
    assert sorted(result.kept for result in results) == [False, True]
    assert cdn.sent("/blobs/") == sum(len(hub.files[name]) for name in SHARDS)


def test_the_stand_in_is_a_hub_to_the_hubs_own_client(
    hub: LocalHub, fetching: Fetching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`huggingface_hub` reads the same files from it as we do: so what we are tested against speaks the hub's API."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    info = huggingface_hub.HfApi(endpoint=hub.url, token=False).model_info("org/tiny", files_metadata=True)
    assert info.sha == fetching().marker.revision
    theirs = {sibling.rfilename: sibling for sibling in info.siblings}
    for name in sorted(WANTED):
        folder = tmp_path / "theirs"
        how = {"endpoint": hub.url, "local_dir": folder, "token": False}
        path = Path(huggingface_hub.hf_hub_download("org/tiny", name, **how))
        assert path.read_bytes() == (fetching.into / name).read_bytes()
        assert theirs[name].size == path.stat().st_size


@pytest.mark.parametrize("repository", ["", "../etc", "a/b/c", "org/..", "org/x y", "org/x?y", "-x/y"])
def test_a_repository_that_cannot_be_one(repository: str) -> None:
    with pytest.raises(InvalidConfigError, match="--hugging-face is"):
        HuggingFace(repository)


@pytest.mark.parametrize("endpoint", ["file:///etc", "huggingface.co", "http://"])
def test_an_endpoint_that_cannot_be_one(endpoint: str) -> None:
    with pytest.raises(InvalidConfigError, match="HF_ENDPOINT is"):
        HuggingFace("org/tiny", endpoint=endpoint)
