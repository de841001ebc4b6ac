"""Places to write to, tried before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachecraft_rag.cli.targets import check_file, check_folder

as_user = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")


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


@as_user
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"--out: nothing can be written"):
        check_folder(tmp_path / "locked" / "new", "--out")
    (tmp_path / "file.json").touch(mode=0o400)
    with pytest.raises(ValueError, match=r"--out: .*file\.json' can't be written"):
        check_file(tmp_path / "file.json", "--out")
