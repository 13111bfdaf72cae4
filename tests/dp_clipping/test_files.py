"""Files are there whole or not at all, and a reader sees the old one or the new one."""

import stat

import pytest

from dp_clipping.files import write_atomically, written_whole


def test_an_error_names_the_file_that_was_meant(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        write_atomically(tmp_path / "no" / "r.html", b"1")
    assert raised.value.filename == str(tmp_path / "no" / "r.html")
    with pytest.raises(IsADirectoryError) as raised:
        write_atomically(tmp_path, b"1")
    assert raised.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_write_atomically_has_ordinary_permissions(tmp_path):
    path = tmp_path / "picture.png"
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    write_atomically(path, b"1")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_failed_writer_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write_half():
        with written_whole(path) as temporary:
            temporary.write_text("half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_reader_of_the_old_file_is_not_disturbed(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with path.open() as reader:
        with written_whole(path) as temporary:
            temporary.write_text("new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
