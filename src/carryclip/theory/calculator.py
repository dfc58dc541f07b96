"""The command behind ``carryclip bounds``: how large the carry gets, what it costs, and which radius to take."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from carryclip.theory import bounds
from carryclip.theory.bounds import Form
from carryclip.theory.noise import Gaussian, Noise, TwoPoint, Uniform

LAWS: dict[str, type[Noise]] = {"uniform": Uniform, "two-point": TwoPoint, "gaussian": Gaussian}


@dataclass(frozen=True)
class Question:
    """What is known: per coordinate for component clipping, of the whole vector for a norm."""

    noise: float
    law: str
    mean_gradient: float
    margin: float
    dimension: int
    horizon: int
    distance: float
    delta: float
    norm: bool

    @property
    def radius(self) -> float:
        """The clipping radius."""
        return self.mean_gradient + self.margin

    @property
    def noise_law(self) -> Noise:
        """The noise of one coordinate; of a vector only the size counts, which a fair coin has always."""
        kind = TwoPoint if self.norm and self.law != "gaussian" else LAWS[self.law]
        return kind(self.noise)  # pyright: ignore[reportCallIssue]

    @property
    def bounded(self) -> float:
        """The largest noise; infinite for a Gaussian."""
        return float(self.noise_law.bound)

    @property
    def variance(self) -> float:
        """E xi² of one coordinate, or of the whole vector."""
        return float(self.noise_law.variance)

    def average_carry(self, margin: float) -> float:
        """A bound on the mean carry over time; 0 where nothing is ever clipped."""
        if margin >= self.bounded:
            return 0.0
        return float(bounds.second_moment_average(self.horizon, alpha=margin, variance=self.variance))

    @property
    def coordinates(self) -> int:
        """How many carries there are."""
        return 1 if self.norm else self.dimension


def carry_rows(q: Question) -> list[tuple[str, float, float, str]]:
    """(bound, what holds with probability 1 - delta, mean, conditions) for the carry of one coordinate or the norm."""
    rows: list[tuple[str, Any, Any, str]] = []
    bound = q.mean_gradient + q.bounded
    if q.norm and math.isfinite(bound):
        given: dict[str, Any] = {"alpha": q.margin, "noise_bound": q.bounded}
        sharp = bounds.norm_carry_quantile(q.delta, **given), bounds.norm_carry_mean(**given)
        rows.append(("sharp", *sharp, "any dimension"))
        given["form"] = "coth"
        closed = bounds.norm_carry_quantile(q.delta, **given), bounds.norm_carry_mean(**given)
        rows.append(("closed form", *closed, "any dimension"))
    elif not q.norm:
        if math.isfinite(bound):
            given = {"alpha": q.margin, "gradient_bound": bound, "largest_radius": q.radius}
            notes: dict[Form, str] = {"printed": "can be false if alpha > 1", "corrected": ""}
            for form, note in notes.items():
                level, mean = (
                    bounds.corollary_quantile(q.delta, form=form, **given),
                    bounds.carry_mean(form=form, **given),
                )
                rows.append((f"paper, {form}", level, mean, note))
        given = {"alpha": q.margin, "proxy": q.noise_law.proxy}
        walk = bounds.walk_quantile(q.delta, q.horizon + 1, **given), bounds.walk_mean(q.horizon + 1, **given)
        rows.append(("walk, sharp", *walk, "any such noise"))
        rate = bounds.lundberg_rate(alpha=q.margin, noise=q.noise_law)
        lundberg = bounds.lundberg_quantile(q.delta, rate=rate), bounds.lundberg_mean(rate=rate)
        rows.append(("Lundberg, sharp", *lundberg, "independent in time"))
    rows.append(("second moment", math.nan, q.average_carry(q.margin), "mean over time"))
    return [(name, float(level), float(mean), note) for name, level, mean, note in rows]


def regret_of(q: Question, margin: float | None) -> float:
    """E R_T through the shadow, with the second-moment bound on the carry; without carry for None."""
    carry = 0.0 if margin is None else q.average_carry(margin)
    shadow = bounds.shadow_regret(
        steps=q.horizon,
        lr=1.0 / math.sqrt(q.horizon),
        distance=q.distance,
        gradient_square=q.coordinates * (q.mean_gradient**2 + q.variance),
        mean_gradient=q.mean_gradient,
        carry=q.coordinates * carry,
    )
    return float(shadow)


def regret_rows(q: Question) -> list[tuple[str, float]]:
    """(bound, expected average regret) for convex objectives and learning rate 1/sqrt(T)."""
    rows = []
    bound = q.mean_gradient + q.bounded
    if not q.norm and q.radius <= bound < math.inf:
        given: dict[str, Any] = {
            "steps": q.horizon,
            "distance": q.distance,
            "alpha": q.margin,
            "gradient_bound": bound,
            "radius": q.radius,
            "dimension": q.dimension,
        }
        rows += [(f"paper, {form}", float(bounds.convergence(form=form, **given))) for form in ("printed", "corrected")]
    rows.append(("through the shadow, sharp", regret_of(q, q.margin)))
    rows.append(("plain SGD, for comparison", regret_of(q, None)))
    return rows


def mean_carry(q: Question, margin: float) -> float:
    """The smallest bound on the expected carry of one coordinate, or of the norm."""
    if not q.norm:
        return float(bounds.lundberg_mean(rate=bounds.lundberg_rate(alpha=margin, noise=q.noise_law)))
    if math.isfinite(q.bounded):
        return float(bounds.norm_carry_mean(alpha=margin, noise_bound=q.bounded))
    return float(bounds.second_moment_average(alpha=margin, variance=q.variance))


def margin_for(reached: Callable[[float], float], wanted: float, largest: float) -> float | None:
    """The smallest margin at which ``reached(margin)`` is at most ``wanted``; None if not even at ``largest``."""
    if reached(largest) > wanted:
        return None
    low, high = largest * 1e-9, largest
    if reached(low) <= wanted:
        return low
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) <= wanted else (middle, high)
        if high / low < 1 + 1e-12:
            break
    return high


def rounded_up(number: float, digits: int = 4) -> float:
    """The next number above with so many significant digits: a margin must not be rounded away."""
    step = 10.0 ** (math.floor(math.log10(number)) + 1 - digits)
    return float(f"{math.ceil(number / step) * step:.{digits}g}")


def main(q: Question, wanted_carry: float | None, wanted_regret: float | None) -> int:
    """Print the tables and the radii asked for."""
    kind = "norm" if q.norm else "component"
    print(
        f"{kind} clipping, radius {q.radius:g} = mean gradient {q.mean_gradient:g} + margin {q.margin:g}\n"
        f"{q.law} noise {q.noise:g}; dimension {q.dimension}; {q.horizon:,} steps"
    )
    if q.margin >= q.bounded:
        print("The margin exceeds the noise: nothing is ever clipped, and the carry is 0.")
    print("\n" + ("‖carry‖" if q.norm else "|carry| of one coordinate"))
    rows = [["bound", f"{100 * (1 - q.delta):.12g} % below", "mean", "holds for"]]
    for name, level, mean, note in carry_rows(q):
        rows.append([name, "" if math.isnan(level) else f"{level:.3g}", f"{mean:.3g}", note])
    _print_table(rows, numbers=(1, 2))
    print("\naverage regret, convex, learning rate 1/√T")
    _print_table([["bound", "expected"], *([name, f"{regret:.3g}"] for name, regret in regret_rows(q))], numbers=(1,))
    return _radii(q, wanted_carry, wanted_regret)


def _print_table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    """Columns side by side under a ruled head; those of numbers are aligned at their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for place, row in enumerate(rows):
        cells = [
            word.rjust(width) if column in numbers else word.ljust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
        if place == 0:
            print("  " + "-" * (sum(widths) + 2 * len(widths) - 2))


def _radii(q: Question, wanted_carry: float | None, wanted_regret: float | None) -> int:
    """Say which radius achieves what was wanted."""
    largest = q.bounded if math.isfinite(q.bounded) else 100.0 * q.noise
    wishes = (
        ("mean carry", wanted_carry, lambda margin: mean_carry(q, margin)),
        ("average regret", wanted_regret, lambda margin: regret_of(q, margin)),
    )
    missed = False
    for what, wanted, reached in wishes:
        if wanted is None:
            continue
        margin = margin_for(reached, wanted, largest)
        if margin is None:
            missed = True
            print(
                f"No radius is known to keep the {what} at {wanted:g}: at margin {largest:g} it is "
                f"{reached(largest):.3g}." + (" Give more steps (--horizon)." if what == "average regret" else ""),
            )
        else:
            margin = rounded_up(margin)
            print(
                f"To keep the {what} at {wanted:g} take the radius {q.mean_gradient + margin:.12g} "
                f"(margin {margin:g}).",
            )
    return 1 if missed else 0


def ask(
    *,
    noise: float,
    law: str,
    mean_gradient: float,
    radius: float | None,
    alpha: float | None,
    dimension: int,
    horizon: int,
    distance: float,
    delta: float,
    norm: bool,
    carry: float | None,
    regret: float | None,
) -> int:
    """Check the arguments, then answer."""
    problems = [
        (1e-100 < noise < 1e100, f"--noise must be above 0 and not absurdly small or large, got {noise:g}."),
        (0 <= mean_gradient < 1e100, f"--mean-gradient is a size, at least 0 and finite; got {mean_gradient:g}."),
        (radius is None or radius < 1e100, f"--radius must be finite, got {radius}."),
        (alpha is None or alpha < 1e100, f"--alpha must be finite, got {alpha}."),
        (radius is None or alpha is None, "Give --radius or --alpha, not both: radius = mean gradient + alpha."),
        (dimension >= 1, f"--dimension must be at least 1, got {dimension}."),
        (horizon >= 1, f"--horizon must be at least 1, got {horizon}."),
        (0 <= distance < 1e100, f"--distance must be at least 0 and finite, got {distance:g}."),
        (0 < delta < 1, f"--delta must lie between 0 and 1, got {delta:g}."),
        (carry is None or carry > 0, f"--carry must be above 0, got {carry}."),
        (regret is None or regret > 0, f"--regret must be above 0, got {regret}."),
    ]
    for fine, text in problems:
        if not fine:
            print(text, file=sys.stderr)
            return 2
    margin = alpha if alpha is not None else (radius - mean_gradient if radius is not None else 0.1 * noise)
    if not margin > 0:
        print(
            f"The radius must exceed the mean gradient: the margin is {margin:g}. At 0 the carry grows like √t, "
            f"below it winds up without end, and no bound holds. Try --radius {mean_gradient + 0.1 * noise:g} or more.",
            file=sys.stderr,
        )
        return 2
    return main(Question(noise, law, mean_gradient, margin, dimension, horizon, distance, delta, norm), carry, regret)
