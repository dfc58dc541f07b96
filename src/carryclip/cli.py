"""The command line: ``doctor``, ``bounds``, ``playground`` by themselves, everything else by the laboratory."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from carryclip import __version__

LABORATORY = (
    "demo", "studies", "reproduce", "plan", "status", "report", "replay", "bench", "data", "evaluate", "export",
    "merge", "backup",
)  # fmt: skip
"""Commands of the distribution ``carryclip-lab``; a test compares them with those it has."""
_INSTALL = 'pip install ./lab    (in a clone of the repository; "make demo" sets up everything by itself)'


def main() -> None:
    """Entry point of the ``carryclip`` command."""
    if importlib.util.find_spec("carryclip_lab") is not None:
        from carryclip_lab.cli import main as all_commands

        all_commands()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """The commands that need nothing but the library."""
    if arguments and arguments[0] in LABORATORY:
        print(
            f'"carryclip {arguments[0]}" belongs to the laboratory, a distribution of its own:\n\n    {_INSTALL}',
            file=sys.stderr,
        )
        return 2
    chosen = vars(_parser().parse_args(arguments))
    command = chosen.pop("command")
    if command == "doctor":
        from carryclip.doctor import main as examine

        return examine(as_json=chosen["json"])
    if command == "playground":
        from carryclip.playground import main as play

        return play(chosen["out"], show=not chosen["no_show"])
    from carryclip.theory.calculator import ask

    return ask(**chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="carryclip",
        description="Gradient clipping that does not bias training.",
        epilog=f"The laboratory adds {', '.join(LABORATORY)}: {_INSTALL}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = "say what is installed here and what works with it: the first thing to paste into a bug report"
    doctor = commands.add_parser("doctor", help=about, description=about.capitalize() + ".")
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs")
    _add_bounds(commands)
    about = "open the playground: one offline page with sliders for radius, noise, learning rate and policy"
    playground = commands.add_parser("playground", help=about, description=about.capitalize() + ".")
    playground.add_argument("--out", help="file or folder for the page; a temporary folder by default")
    playground.add_argument("--no-show", action="store_true", help="write it, and open no browser")
    return parser


def _add_bounds(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = "calculate how large the carry can get, what it costs in regret, and which radius to take"
    bounds = commands.add_parser(
        "bounds",
        help=about,
        description=f"{about.capitalize()}. Sizes are per coordinate for component clipping (the default) and of the "
        "whole vector with --norm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = bounds.add_argument
    add("--noise", type=float, default=1.0, help="half width (uniform), size (two-point) or deviation (gaussian)")
    add(
        "--law", choices=("uniform", "two-point", "gaussian"), default="uniform", help="of the noise; a norm needs none"
    )
    add("--mean-gradient", type=float, default=1.0, help="bound on the size of the mean gradient")
    add("--radius", type=float, help="clipping radius")
    add("--alpha", type=float, help="margin of the radius above the mean gradient, instead of --radius (noise / 10)")
    add("--dimension", type=int, default=1, help="number of coordinates")
    add("--horizon", type=int, default=10_000, help="number of steps")
    add("--distance", type=float, default=1.0, help="from the start to the optimum")
    add("--delta", type=float, default=0.01, help="probability with which the carry may exceed its level")
    add("--norm", action="store_true", help="norm clipping")
    add("--carry", type=float, help="find the radius for this mean carry")
    add("--regret", type=float, help="find the radius for this average regret")


if __name__ == "__main__":
    main()
