"""Folders of images, decoding and crops, and the stream that training reads."""

import itertools

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
