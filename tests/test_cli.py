"""The command line, run as a person runs it."""

import csv
import subprocess
import sys

import pytest

from carryclip import __version__


def run(*arguments, cwd=None):
    command = [sys.executable, "-c", "from carryclip.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_help_names_the_commands():
    done = run("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "doctor" in done.stdout


def test_version():
    assert run("--version").stdout.strip() == __version__


def test_doctor_reports_what_works():
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    assert f"carryclip {__version__}" in done.stdout
    assert "works on cpu" in done.stdout


def test_demo_makes_its_table_figure_and_numbers(tmp_path):
    done = run("demo", "--epochs", "2", "--seeds", "1", "--out", "result", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SGD + U-Clip" in done.stdout
    assert (tmp_path / "result" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "result" / "demo.svg").stat().st_size > 1000
    with (tmp_path / "result" / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["SGD"] * 2 + ["SGD + clipping"] * 2 + ["SGD + U-Clip"] * 2
    assert all(float(row["loss"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--epochs", "0"], "epochs and seeds must be at least 1"),
        (["demo", "--out", "file"], "Cannot write to file"),
        (["demo", "--epoch", "3"], "epoch"),
        (["dmeo"], "dmeo"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message, tmp_path):
    (tmp_path / "file").write_text("")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
