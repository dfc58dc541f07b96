"""Folders of images, decoding and crops, and the stream that training reads."""

import io
import itertools
import os
import zlib

import numpy as np
import pytest
from PIL import Image

from carryclip_lab.data.unpack import DataError
from carryclip_lab.imagenet import images, made
from carryclip_lab.imagenet.folder import look_through
from carryclip_lab.imagenet.stream import Cut, Order, Reader, evaluation, training
from pictures import folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("images") / "data")


# ---------------------------------------------------------------------- folders


def test_a_folder_is_listed_by_sorted_names(root):
    found = look_through(root)
    assert found.classes == ("class-0", "class-1", "class-2")
    assert (len(found.train), len(found.val)) == (27, 12)
    assert found.train.labels == (0,) * 9 + (1,) * 9 + (2,) * 9
    assert "3 classes, 27 + 12 images" in str(found)


def test_a_fingerprint_knows_the_files_and_not_the_place(root, tmp_path):
    same = folder(tmp_path / "elsewhere")
    assert look_through(same).fingerprint == look_through(root).fingerprint
    (same / "val" / "class-1" / "more.png").write_bytes(b"")
    assert look_through(same).fingerprint != look_through(root).fingerprint


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(DataError, match=r"There is no folder .+nowhere"):
        look_through(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no folder train and no folder val"):
        look_through(tmp_path)
    data = folder(tmp_path / "data")
    (data / "val" / "class-9").mkdir()
    with pytest.raises(DataError, match="val has class-9, train has not"):
        look_through(data)
    (data / "train" / "class-9").mkdir()
    with pytest.raises(DataError, match="class-9 has no images"):
        look_through(data)
    empty = tmp_path / "empty"
    for part in ("train", "val"):
        (empty / part).mkdir(parents=True)
    with pytest.raises(DataError, match="has no folders, one for each class"):
        look_through(empty)


@pytest.mark.skipif(os.name != "posix", reason="needs links of POSIX")
@pytest.mark.parametrize("place", ["train/class-1/more.jpeg", "val/class-9"])
def test_links_to_nothing_are_named(tmp_path, place):
    data = folder(tmp_path / "data")
    (data / place).symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=f"{place} is a link to nothing"):
        look_through(data)


def test_folders_that_cannot_be_looked_at_are_named(tmp_path):
    for root in (tmp_path / ("x" * 300), "~nobody-of-that-name/data"):
        with pytest.raises(DataError, match="There is no folder"):
            look_through(root)


def test_a_folder_that_is_called_like_an_image_is_none(root, tmp_path):
    data = folder(tmp_path / "data")
    (data / "train" / "class-1" / "more.jpeg").mkdir()
    assert look_through(data).train.names == look_through(root).train.names


# ---------------------------------------------------------------------- decoding and crops


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "P", "1", "RGBA"])
def test_every_kind_of_image_becomes_three_colours(tmp_path, mode):
    pixels = np.arange(20 * 16 * 3, dtype=np.uint8).reshape(20, 16, 3)
    name = tmp_path / ("image.jpeg" if mode in ("L", "RGB", "CMYK") else "image.png")
    Image.fromarray(pixels).convert(mode).save(name)
    found = images.decoded(name)
    assert (found.mode, found.size) == ("RGB", (16, 20))


def test_a_file_that_is_cut_off_is_broken(tmp_path):
    name = tmp_path / "image.jpeg"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(name)
    name.write_bytes(name.read_bytes()[:300])
    with pytest.raises(images.BrokenImageError, match=r"image\.jpeg cannot be read"):
        images.decoded(name)
    name.write_bytes(b"no image at all")
    with pytest.raises(images.BrokenImageError, match="cannot be read"):
        images.decoded(name)


def saved(kind, mode="RGB", **options):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.skipif(os.name != "posix", reason="needs scripts of POSIX")
def test_no_other_program_is_started_for_an_image(tmp_path, monkeypatch):
    script = tmp_path / "gs"
    script.write_text("#!/bin/sh\ntouch sprung\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    name = tmp_path / "image.jpeg"
    name.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(images.BrokenImageError, match=r"image\.jpeg cannot be read"):
        images.decoded(name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "DDS", "BMP"])
def test_other_kinds_of_images_are_refused_by_their_content(tmp_path, kind):
    name = tmp_path / "image.jpeg"
    name.write_bytes(saved(kind))
    with pytest.raises(images.BrokenImageError, match=r"image\.jpeg cannot be read"):
        images.decoded(name)


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path):
    name = tmp_path / "image.png"
    Image.new("1", (9000, 9000)).save(name)
    assert name.stat().st_size < 50_000
    with pytest.raises(images.BrokenImageError, match="9000 x 9000 pixels are more than 67,108,864"):
        images.decoded(name)


def mutated(content, generator):
    """The same with one or two places flipped, overwritten, cut out or repeated, mostly near the beginning."""
    changed = bytearray(content)
    for _ in range(generator.integers(1, 3)):
        end = len(changed) if generator.random() < 0.5 else min(len(changed), 200)
        at, length = int(generator.integers(end)), int(generator.integers(1, 9))
        new = (
            bytes([changed[at] ^ 1 << int(generator.integers(8))]),
            int(generator.choice([0, 1, 255, 65_535, 2**31 - 1, 2**32 - 1])).to_bytes(4, "big"),
            b"",
            bytes(changed[at : at + length]) * 2,
        )[generator.integers(4)]
        changed[at : at + max(1, min(length, len(new)))] = new
    return bytes(changed)


def with_checksums(content):
    """A PNG whose chunks have the checksums that a decoder wants to see before it looks into them."""
    fixed, at = bytearray(content[:8]), 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        if end + 4 > len(content):
            break
        fixed += content[at:end] + zlib.crc32(content[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(fixed) + content[at:]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of odd metadata, as outside of tests
def test_damaged_files_are_read_or_called_broken_and_nothing_else(tmp_path):
    """DDS among them: what Pillow raises of those it does not raise of others."""
    kinds = [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "P"), ("PNG", "1"), ("DDS", "RGB")]
    contents = [(kind, saved(kind, mode)) for kind, mode in kinds]
    contents.append(("JPEG", saved("JPEG", progressive=True, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0")))
    generator = np.random.default_rng(0)
    name, read, broken = tmp_path / "image.jpeg", 0, []
    for k in range(1400):
        kind, content = contents[k % len(contents)]
        bad = mutated(content, generator)
        if kind == "PNG" and generator.random() < 0.8:
            bad = with_checksums(bad)
        name.write_bytes(bad)
        try:
            image = images.decoded(name)
        except images.BrokenImageError as error:
            broken.append(str(error))
            continue
        assert images.for_training(image, 8, generator).shape == images.for_evaluation(image, 8).shape == (8, 8, 3)
        read += 1
    assert min(read, len(broken)) > 200
    assert all(said.startswith(f"{name} cannot be read: ") for said in broken)


def test_random_crops_have_the_shares_and_proportions_they_should():
    generator = np.random.default_rng(0)
    left, top, right, bottom = np.array([images.random_box(400, 400, generator) for _ in range(4000)]).T
    assert min(left.min(), top.min()) == 0
    assert max(right.max(), bottom.max()) == 400
    shares = (right - left) * (bottom - top) / 400**2
    ratios = (right - left) / (bottom - top)
    assert shares.min() == pytest.approx(0.08, abs=0.005)
    assert shares.max() > 0.9
    assert ratios.min() == pytest.approx(0.75, abs=0.02)
    assert ratios.max() == pytest.approx(4 / 3, abs=0.02)
    always = shares[shares < 0.75]  # these fit whatever their proportions, so that none was drawn again
    assert np.mean(always < (0.08 + 0.75) / 2) == pytest.approx(0.5, abs=0.03)


def test_a_shape_that_no_crop_fits_is_cut_in_the_middle():
    assert images.random_box(1000, 4, np.random.default_rng(0)) == images.middle_box(1000, 4)
    assert images.middle_box(500, 375) == (86, 24, 414, 352)
    assert images.middle_box(256, 256) == (16, 16, 240, 240)


def test_transforms_are_what_they_were():
    """Stored pixels of noise, which every other interpolation, crop or flip would change by more than rounding."""
    noise = np.random.default_rng(3).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    image, places = Image.fromarray(noise), ((0, 9, 31), (5, 16, 31))
    shown = images.for_evaluation(image, 32)
    assert (shown.shape, shown.dtype) == ((32, 32, 3), np.uint8)
    stored = [[127, 151, 136], [116, 183, 168], [154, 124, 87]]
    np.testing.assert_allclose(shown[places].astype(int), stored, atol=1)
    for seed, box, flipped, stored in (
        (0, (15, 40, 46, 81), False, [[206, 105, 111], [54, 137, 148], [224, 202, 89]]),
        (4, (25, 4, 105, 90), True, [[92, 128, 134], [164, 110, 137], [114, 110, 114]]),
    ):
        assert images.random_box(120, 90, np.random.default_rng(seed)) == box
        trained = images.for_training(image, 32, np.random.default_rng(seed))
        np.testing.assert_allclose(trained[places].astype(int), stored, atol=1)
        plain = np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC, box=box))
        assert np.array_equal(trained, plain[:, ::-1] if flipped else plain)
    image = Image.fromarray(np.tile(np.arange(120, dtype=np.uint8), (90, 1))).convert("RGB")
    rows = [images.for_training(image, 8, np.random.default_rng(k))[4, :, 0] for k in range(200)]
    assert np.mean([row[0] > row[-1] for row in rows]) == pytest.approx(0.5, abs=0.1)


# ---------------------------------------------------------------------- the stream


def all_of(stream):
    return [{name: array.copy() for name, array in batch.items()} for batch in stream]


def same(one, other):
    return len(one) == len(other) and all(
        np.array_equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a
    )


@pytest.mark.parametrize("threads", [0, 3])
def test_any_step_can_be_reached_and_ranks_share_the_work(root, threads):
    part = look_through(root).train
    reader, order = Reader(part, 16, strict=True), Order(len(part), 8, 3, 5)
    whole = all_of(training(reader, order, Cut(8, 2), first=0, threads=1))
    assert len(whole) == 3 * 3 * 4
    for first in (1, 4, 8):
        assert same(all_of(training(reader, order, Cut(8, 2), first=first, threads=threads)), whole[4 * first :])
    for rank in range(2):
        mine = all_of(training(reader, order, Cut(8, 2, rank, 2), first=2, threads=threads))
        assert same(mine, whole[8 + rank :: 2])
    assert not same(whole[:12], whole[12:24])


class Drawn:
    """In a reader's place: what it would have been told, and the crop that it would have drawn."""

    def for_training(self, number, generator):
        return {"number": np.int64(number), "box": np.array(images.random_box(120, 90, generator))}


def test_a_step_draws_what_it_drew():
    """Stored order and crops of the second step of a run: other ones would be another run of the same name."""
    order = Order(27, 4, 3, 5)
    first, second = itertools.islice(training(Drawn(), order, Cut(4, 2), first=1, threads=0), 2)
    assert [*first["number"], *second["number"]] == [9, 6, 11, 3]
    assert first["box"].tolist() == [[35, 14, 88, 71], [0, 5, 97, 86]]
    assert second["box"].tolist() == [[64, 11, 114, 53], [0, 0, 113, 85]]


def test_an_epoch_has_every_image_once_but_for_the_last_partial_batch():
    order = Order(27, 8, 2, 0)
    assert len(order) == 48
    first, second = [order[k] for k in range(24)], [order[k] for k in range(24, 48)]
    assert len(set(first)) == len(set(second)) == 24
    assert first != second
    with pytest.raises(ValueError, match="more than the 27 training images"):
        Order(27, 32, 1, 0)
    with pytest.raises(ValueError, match="cannot be cut into micro-batches of 4 on 3 processes"):
        Cut(8, 4, 0, 3)


def test_a_broken_file_is_named_and_replaced(root, tmp_path):
    data = folder(tmp_path / "data")
    (data / "train" / "class-1" / "3.jpeg").write_bytes(b"broken")
    (data / "val" / "class-2" / "1.jpeg").write_bytes(b"broken")
    found = look_through(data)
    order, bad = Order(len(found.train), 9, 1, 0), found.train.names.index("class-1/3.jpeg")
    batches = all_of(training(Reader(found.train, 16, strict=False), order, Cut(9, 9), first=0, threads=1))
    broken = np.concatenate([batch["broken"] for batch in batches])
    assert broken[broken >= 0].tolist() == [bad]
    assert np.concatenate([batch["label"] for batch in batches]).min() >= 0
    batches = all_of(evaluation(Reader(found.val, 16, strict=False), Cut(5, 5), threads=1))
    assert np.concatenate([batch["label"] for batch in batches]).tolist() == [0] * 4 + [1] * 4 + [2, -1, 2, 2]
    with pytest.raises(images.BrokenImageError, match="class-1"):
        all_of(training(Reader(found.train, 16, strict=True), order, Cut(9, 9), first=0, threads=1))


def test_images_can_be_made_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path))
    found = look_through(made.make())
    assert (len(found.classes), len(found.train), len(found.val)) == (10, 320, 80)
    before = found.fingerprint
    assert look_through(made.make()).fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == [made.made_folder().name]


def test_images_that_cannot_be_made_are_told_of(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        monkeypatch.setenv("CARRYCLIP_DATA", str(place))
        with pytest.raises(DataError, match=r"cannot be made in .+CARRYCLIP_DATA"):
            made.make()
