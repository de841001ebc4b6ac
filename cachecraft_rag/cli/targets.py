"""Places that a command writes to: tried before anything is measured, which may take hours."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile


def check_folder(folder: Path, option: str) -> None:
    """Make sure that files can be written into a folder, which need not exist; nothing of the trial is left.

    Args:
        folder: The folder.
        option: The option that names it, for the message.

    Raises:
        ValueError: They can't.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):  # unlike those of Path, they raise nothing
        raise ValueError(f"{option}: {str(folder)!r} is a file; give a folder")
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: nothing can be written into {str(folder)!r}: {error}; give another") from error
    finally:
        for one in missing:
            with suppress(OSError):  # it was never made, or somebody else put something there meanwhile
                one.rmdir()


def check_file(path: Path, option: str) -> None:
    """Make sure that a file can be written; an existing one stays as it is, and nothing of the trial is left.

    Raises:
        ValueError: It can't.
    """
    if os.path.isdir(path):
        raise ValueError(f"{option}: {str(path)!r} is a folder; give a file")
    check_folder(path.parent, option)
    by_effective_ids = os.access in os.supports_effective_ids  # by these files are opened; Windows has none
    if os.path.exists(path) and not os.access(path, os.W_OK, effective_ids=by_effective_ids):
        raise ValueError(f"{option}: {str(path)!r} can't be written; give another")
