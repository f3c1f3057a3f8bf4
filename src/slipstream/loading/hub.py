"""Files of the Hugging Face hub, held to the sizes and sha256 that the hub publishes.

The hub's own library downloads: it resumes, and it knows the user's token and endpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import threading
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.core.errors import DownloadError
from slipstream.loading.aliases import HubSource
from slipstream.loading.disk import room_for

_SNAPSHOT_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")  # txt: merges, vocab
_PROBE_SEC = 3.0  # longest wait for a first answer of the hub
_METADATA_SEC = 10.0  # longest wait for its list of files


def fetch_hub(source: HubSource, folder: Path, quiet: bool) -> Path:
    """Download into `folder`, which keeps what an earlier attempt left there.

    Returns:
        The GGUF file, or `folder` as a directory of safetensors; on the disk and checked.

    Raises:
        DownloadError: the hub is out of reach or refuses, a file is wrong, or the disk is full.
    """
    # Half a second to import, and only downloads need it.
    from huggingface_hub import HfApi, constants, errors, snapshot_download, utils

    obstacle = _obstacle(constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    if obstacle is not None:
        raise DownloadError(obstacle)
    try:
        info = HfApi().model_info(source.repo, files_metadata=True, timeout=_METADATA_SEC)
        files = {file.rfilename: file for file in info.siblings or ()}
        wanted = _wanted_files(source, list(files))
        num_missing = sum(files[path].size or 0 for path in wanted if not (folder / path).exists())
        with room_for(num_missing, folder), ExitStack() as stack:
            is_hidden = quiet or not sys.stderr.isatty()
            if is_hidden and not utils.are_progress_bars_disabled():
                utils.disable_progress_bars()  # a setting of the process, hence set back
                stack.callback(utils.enable_progress_bars)
            snapshot_download(
                source.repo, revision=info.sha, local_dir=folder, allow_patterns=wanted
            )
    except DownloadError:
        raise
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{source.repo}"
        raise DownloadError(f"gated; accept the licence at {page} and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError("no such repository; if it is private, set HF_TOKEN") from error
    except Exception as error:  # its HTTP library, hence its exceptions, depend on its version
        reason = str(error).strip().partition("\n")[0]
        raise DownloadError(f"{type(error).__name__}: {reason}") from error
    for path in wanted:
        lfs = files[path].lfs
        _check_file(folder / path, files[path].size, lfs.sha256 if lfs else None)
    if source.file is not None:
        return folder / source.file
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes for resuming
    return folder


def _obstacle(endpoint: str, is_offline: bool) -> str | None:
    """Why the hub cannot be asked now, or None; known within `_PROBE_SEC`.

    The library itself would retry for minutes. Behind a proxy it is the proxy that must answer.
    """
    if is_offline:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(endpoint)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (url.hostname, url.port or (443 if url.scheme == "https" else 80))
    obstacle: str | None = f"{url.hostname} does not answer within {_PROBE_SEC:.0f} s"

    def connect() -> None:
        nonlocal obstacle
        try:
            socket.create_connection(address, timeout=_PROBE_SEC).close()
            obstacle = None
        except OSError as error:
            obstacle = f"{url.hostname} does not answer ({error})"

    # A thread, because the time to look up the host's name cannot be limited.
    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(_PROBE_SEC)
    return obstacle


def _wanted_files(source: HubSource, paths: list[str]) -> list[str]:
    """Which files of the repository make the model."""
    ggufs = [path for path in paths if path.endswith(".gguf")]
    if source.file is not None:
        if source.file in paths:
            return [source.file]
        raise DownloadError(f"no such file; it has {', '.join(ggufs) or 'no GGUF'}")
    # Subfolders hold other formats of the same weights.
    wanted = [path for path in paths if "/" not in path and path.endswith(_SNAPSHOT_SUFFIXES)]
    if any(path.endswith(".safetensors") for path in wanted):
        return wanted
    hint = f"; name one file: hf:{source.repo}/{ggufs[0]}" if ggufs else ""
    raise DownloadError(f"no safetensors in it{hint}")


def _check_file(path: Path, num_bytes: int | None, sha256: str | None) -> None:
    """Flush a downloaded file to the disk and hold it to what the hub publishes, or delete it."""
    if not path.is_file():
        raise DownloadError(f"{path.name} did not arrive")
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if sha256 else None
        os.fsync(file.fileno())
        found_bytes = file.seek(0, os.SEEK_END)
    if digest != sha256 or (num_bytes is not None and found_bytes != num_bytes):
        path.unlink()
        raise DownloadError(
            f"{path.name}: {found_bytes} bytes with sha256 {digest}, "
            f"the hub publishes {num_bytes} and {sha256}"
        )
