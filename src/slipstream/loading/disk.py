"""A disk too small for a download, told in bytes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.core.errors import DownloadError


@contextmanager
def room_for(num_bytes: int, folder: Path) -> Iterator[None]:
    """Raise DownloadError if `num_bytes` more do not fit in `folder`, now or on the way."""
    try:
        if shutil.disk_usage(folder).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(folder).free
        raise DownloadError(
            f"disk full: {num_bytes:,} bytes needed in {folder}, {free:,} free; "
            "free some or set SLIPSTREAM_CACHE to another disk"
        ) from error
