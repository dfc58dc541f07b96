"""Disks that lie, fill up or lose files, and clocks that jump: what was seen is kept, or its loss is noticed and said."""

import random
import warnings

import pytest

import torch
from carryclip_lab.spec import Spec
from carryclip_lab.store import checkpoints

GIVEN = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 3}


def spec(seed=0):
    return Spec(**GIVEN, seed=seed)


def flip(path, where, bit=0):
    content = bytearray(path.read_bytes())
    content[where] ^= 1 << bit
    path.write_bytes(content)


# ---------------------------------------------------------------------- checkpoints


def saved(path, number):
    state = {"weights": torch.full((50, 20), float(number)), "epoch": number}
    checkpoints.save(path, spec(), "cpu", state)


def test_no_flipped_bit_of_a_checkpoint_gives_other_numbers(tmp_path):
    path, luck, back = tmp_path / "run.pt", random.Random(0), 0
    saved(path, 1)
    saved(path, 2)
    whole = path.read_bytes()
    for _ in range(300):
        path.write_bytes(whole)
        flip(path, luck.randrange(len(whole)), luck.randrange(8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = checkpoints.read(path, spec(), "cpu")
        assert state is not None
        assert torch.equal(state["weights"], torch.full((50, 20), float(state["epoch"])))
        back += state["epoch"] == 1
        (path.with_name("run.pt.aside")).unlink(missing_ok=True)
    assert back > 100  # not all of it is numbers: names, padding


def test_a_damaged_checkpoint_costs_one_generation(tmp_path):
    path = tmp_path / "run.pt"
    for number in (1, 2, 3):
        saved(path, number)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cannot be used"):
        assert checkpoints.read(path, spec(), "cpu")["epoch"] == 2
    path.unlink()  # a kill between putting the old one away and the new one in its place
    assert checkpoints.read(path, spec(), "cpu")["epoch"] == 2
    checkpoints.before(path).write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert checkpoints.read(path, spec(), "cpu") is None


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    done = []
    fsync, replace = checkpoints.os.fsync, checkpoints.os.replace
    monkeypatch.setattr(checkpoints.os, "fsync", lambda file: (done.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(checkpoints.os, "replace", lambda *names: (done.append("replace"), replace(*names))[1])
    saved(tmp_path / "run.pt", 1)
    saved(tmp_path / "run.pt", 2)
    assert done == ["fsync", "replace", "fsync", "fsync", "replace", "replace", "fsync"]
