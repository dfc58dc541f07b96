"""The command line, run as a person runs it."""

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


def test_demo_goes_from_theory_to_the_report(tmp_path):
    done = run("demo", "--quick", "--out", "result", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Shrunk (default), norm 0.5" in done.stdout
    assert (tmp_path / "result" / "report.html").as_uri() in done.stdout
    page = (tmp_path / "result" / "report.html").read_text(encoding="utf-8")
    assert "digits" in page
    assert (tmp_path / "result" / "theory" / "aliasing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--out", "file"], "Cannot write to file"),
        (["demo", "--quik"], "quick"),
        (["dmeo"], "dmeo"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message, tmp_path):
    (tmp_path / "file").write_text("")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
