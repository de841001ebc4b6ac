"""Places to write to, tried before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cachecraft_rag.cli.targets import check_file, check_folder


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user who may not write what others own: root may write everywhere."""
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_folder_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    check_folder(tmp_path / "there", "--out")
    check_folder(tmp_path / "new" / "folder", "--out")
    check_file(tmp_path / "new" / "file.json", "--out")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_an_existing_file_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("{}")
    check_file(tmp_path / "file.json", "--out")
    assert (tmp_path / "file.json").read_text() == "{}"


def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out: .*file' is a file; give a folder"):
        check_folder(tmp_path / "file", "--out")
    with pytest.raises(ValueError, match=r"--disk: nothing can be written into .*below"):
        check_folder(tmp_path / "file" / "below", "--disk")
    with pytest.raises(ValueError, match=r"--out: .* is a folder; give a file"):
        check_file(tmp_path, "--out")
    with pytest.raises(ValueError, match=r"--out: .*is a file; give a folder"):
        check_file(tmp_path / "file" / "below.json", "--out")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_a_place_without_permission_is_refused() -> None:
    with TemporaryDirectory() as name:  # not tmp_path: only its owner comes in there
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "locked").mkdir(mode=0o555)
        (folder / "file.json").touch(mode=0o444)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        (folder / "open" / "file.json").touch(mode=0o444)
        with as_nobody():
            with pytest.raises(ValueError, match=r"--out: nothing can be written into .*new"):
                check_folder(folder / "locked" / "new", "--out")
            with pytest.raises(ValueError, match=r"--out: .*file\.json' can't be written"):
                check_file(folder / "open" / "file.json", "--out")
            check_file(folder / "open" / "other.json", "--out")
