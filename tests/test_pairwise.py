"""The cells that every run has: enough of them, few of them, the same ones each time."""

import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from cases import CELLS, COMPILED_CELLS, DEVICE_CELLS, OPTAX_CELLS
from pairwise import covering

TABLES = {
    "battery": CELLS,
    "optax": OPTAX_CELLS,
    "compiled": COMPILED_CELLS,
    "device": DEVICE_CELLS,
    "five axes": list(product(range(4), repeat=5)),
    "axes with the same values": [(0, 1), (1, 0), (1, 1)],
    "one axis": [("a",), ("b",)],
}


def values(table):
    return {value for cell in table for value in enumerate(cell)}


def pairs(table):
    return {pair for cell in table for pair in combinations(enumerate(cell), 2)}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_pair_of_the_table_is_in_a_chosen_cell(table):
    chosen = covering(table)
    assert values(chosen) == values(table)
    assert pairs(chosen) == pairs(table)
    assert set(chosen) <= set(table)
    assert len(set(chosen)) == len(chosen)
    assert covering(table) == chosen


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_value_of_the_table_is_in_a_chosen_cell(table):
    chosen = covering(table, together=1)
    assert values(chosen) == values(table)
    assert len(chosen) <= len(covering(table))


def test_few_cells_are_enough():
    assert len(covering(product(range(2), repeat=10))) <= 12  # of 1024; 6 is the least
    assert len(covering(CELLS)) == len({(region, policy) for region, policy, _ in CELLS})  # the least


def test_cells_of_all_values_are_chosen_alike():
    chosen = covering(CELLS)
    counts = [sum(dtype == each[2] for each in chosen) for dtype in {dtype for _, _, dtype in CELLS}]
    assert min(counts) > 0.9 * max(counts)


TESTS = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_pairs(number, letter, flag):
    print("pair", number, letter, flag)

@pytest.fixture(params="ab")
def letter(request):
    return request.param

@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_values(number, letter):
    print("value", number, letter)

def test_alone():
    print("alone")
"""
FILES = ("pyproject.toml", "tests/conftest.py", "tests/pairwise.py")


@pytest.mark.parametrize(("selection", "ran"), [([], (6, 3, 1)), (["-m", ""], (12, 6, 1))])
def test_make_test_leaves_out_what_make_test_all_has(tmp_path, selection, ran):
    """With the settings of this repository."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((Path(__file__).parents[1] / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "tests" / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-s", "tests", *selection]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tuple(done.stdout.count(word) for word in ("pair ", "value ", "alone\n")) == ran
    assert f"{sum(ran)} passed" in done.stdout
    assert ("deselected" in done.stdout) == (sum(ran) < 19)
