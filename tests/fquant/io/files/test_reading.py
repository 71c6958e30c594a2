"""Files of strangers' folders: links, pipes, devices and folders in their places, sizes, and texts that are none."""

import os
from pathlib import Path

import pytest

from fquant.io.files.reading import content, inside, json_object, read_text


@pytest.fixture
def folder(tmp_path):
    """A folder, a private file beside it, and a snapshot of a Hugging Face cache with its blobs."""
    (tmp_path / "private").write_text("secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own").write_text("{}")
    (tmp_path / "cache" / "blobs").mkdir(parents=True)
    (tmp_path / "cache" / "blobs" / "1f").write_text("{}")
    (tmp_path / "cache" / "snapshots" / "rev" / "inner").mkdir(parents=True)
    return tmp_path


def link(path, target):
    path.symlink_to(target)
    return path


ALLOWED = {
    "missing": lambda f: f / "model" / "none",
    "its own": lambda f: f / "model" / "own",
    "a link inside": lambda f: link(f / "model" / "a", "own"),
    "a link to a link inside": lambda f: link(link(f / "model" / "a", "own").with_name("b"), f / "model" / "a"),
    "the cache": lambda f: link(f / "cache" / "snapshots" / "rev" / "a", "../../blobs/1f"),
    "a folder of the cache": lambda f: link(f / "cache" / "snapshots" / "rev" / "inner" / "a", "../../../blobs/1f"),
    "a link to the folder": lambda f: link(f / "named", f / "model") / "own",
    "a link to a snapshot": lambda f: (
        link(f / "cache" / "snapshots" / "rev" / "a", "../../blobs/1f"),
        link(f / "named", f / "cache" / "snapshots" / "rev") / "a",
    )[1],
}
REFUSED = {
    "outside": (lambda f: link(f / "model" / "a", f / "private"), "got a link to .*private, wanted a file of its"),
    "outside, relative": (lambda f: link(f / "model" / "a", "../private"), "got a link to .*private"),
    "outside by a link": (
        lambda f: link(link(f / "model" / "b", f / "private").with_name("a"), "b"),
        "got a link to .*private",
    ),
    "a neighbour with the same beginning": (
        lambda f: ((f / "model2").write_text(""), link(f / "model" / "a", "../model2"))[1],
        "got a link to .*model2",
    ),
    "out of the cache": (lambda f: link(f / "cache" / "snapshots" / "rev" / "a", "../../../private"), "got a link to"),
    "out of the blobs": (
        lambda f: (
            link(f / "cache" / "blobs" / "2a", f / "private"),
            link(f / "cache" / "snapshots" / "rev" / "a", "../../blobs/2a"),
        )[1],
        "got a link to .*private",
    ),
    "blobs without snapshots": (lambda f: link(f / "model" / "a", "../cache/blobs/1f"), "got a link to .*blobs"),
    "a folder": (lambda f: ((f / "model" / "a").mkdir(), f / "model" / "a")[1], "got a folder, a pipe, a device"),
    "a pipe": (lambda f: (os.mkfifo(f / "model" / "a"), f / "model" / "a")[1], "got a folder, a pipe, a device"),
    "a device": (lambda f: link(f / "model" / "a", "/dev/zero"), "got a folder, a pipe, a device"),
    "a link to nothing": (lambda f: link(f / "model" / "a", "none"), "got a folder, a pipe, a device or a link to no"),
    "a link to itself": (lambda f: link(f / "model" / "a", "a"), "got a folder, a pipe, a device or a link to nothing"),
}


@pytest.mark.parametrize("make", ALLOWED.values(), ids=ALLOWED)
def test_files_of_a_folder_are_found(folder, make):
    path = make(folder)
    assert inside(path) == path and (path.name == "none" or content(inside(path)) == b"{}")


@pytest.mark.parametrize("make, fault", REFUSED.values(), ids=REFUSED)
def test_what_leaves_a_folder_is_refused_by_name(folder, make, fault):
    path = make(folder)
    for read in (inside, json_object):
        with pytest.raises(ValueError, match=f"^{path}: {fault}"):
            read(path)


def test_a_folder_inside_may_not_lead_out(folder):
    """A file two folders below is judged by the folder that the user named."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "a.jinja").write_text("secret")
    link(folder / "model" / "more", folder / "elsewhere")
    with pytest.raises(ValueError, match="got a link to .*elsewhere/a.jinja"):
        inside(folder / "model" / "more" / "a.jinja", folder / "model")


def test_a_hard_link_is_a_file(folder):
    """As package managers make of all that they install."""
    os.link(folder / "private", folder / "model" / "a")
    assert content(inside(folder / "model" / "a")) == b"secret"


def test_sizes_and_texts(tmp_path):
    path = Path(tmp_path / "a.json")
    with pytest.raises(ValueError, match=f"^{path}: no such file; fetch"):
        content(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ValueError, match=f"^{path}: got more than 33554432 bytes, wanted at most as many"):
        content(path)
    path.write_bytes(b"\xff{}")
    for read in (read_text, json_object):
        with pytest.raises(ValueError, match=f"^{path}: got bytes that are no UTF-8"):
            read(path)
    for text in ("", "[1]", "{", "[" * 100_000, '{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{path}: got "):
            json_object(path)
