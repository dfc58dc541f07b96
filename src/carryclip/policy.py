"""What the algorithm asks of a carry policy, and the records that go to and fro between them."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple


class Sums(NamedTuple):
    """Partial sums of one array, or the totals of each scope; None where the rule does not need them."""

    bad: Any = None
    total_sq: Any = None
    """Of what is clipped first: of g + carry, or of g alone under a policy that mixes."""
    carry_sq: Any = None
    dot: Any = None
    """<g, carry> under a norm; of what is clipped coordinate by coordinate <g, g - clip(g)>."""
    cut_sq: Any = None
    """Of g - clip(g), coordinate by coordinate."""
    grad_sq: Any = None
    """Of g, where a rule follows it and ``total_sq`` is of something else."""
    weight_sq: Any = None
    """Of the weights, where a rule looks at them; added by whoever has them."""


class Memory(NamedTuple):
    """What a policy remembers of each scope: of each vector of a ``Norm``, or of all coordinates of a rule."""

    average: Any
    """Raw exponential average of what the policy follows."""
    count: Any
    """Number of steps in it."""
    noise: Any = None
    """Under ``Shrunk``: how large the carry would be if it were noise alone; None otherwise."""

    def known(self) -> list[Any]:
        """The columns that there are."""
        return [column for column in self if column is not None]

    @staticmethod
    def each(function: Callable[..., Any], *memories: "Memory") -> "Memory":
        """The memory with ``function`` applied column by column."""
        columns = zip(*memories, strict=True)
        return Memory(*(None if column[0] is None else function(*column) for column in columns))


class Scaling(NamedTuple):
    """Scalars of each scope: what its vector is multiplied with, and what becomes of the rest.

    The vector is g + carry, or what a policy mixes from both with ``base``, ``taken`` and ``back``. Of what is clipped
    coordinate by coordinate only ``taken`` and ``back`` have a meaning.
    """

    scale: Any = None
    keep: Any = None
    """The part of the rest that is carried; None: all of it."""
    dropped: Any = None
    """Norm of what is not."""
    clipped: Any = None
    base: Any = None
    """What plain clipping multiplies the gradient with."""
    taken: Any = None
    """The gradient's part in the new carry; of coordinates the factor that is usual."""
    back: Any = None
    """The carry's part in the vector, where it is not a constant of the policy."""
    held: Any = None
    """The old carry's part in the new one, where it is not all of it."""


class Mixing(NamedTuple):
    """What a policy that mixes sees of an array that is clipped coordinate by coordinate."""

    gradient: Any
    carry: Any
    radius: Any
    project: Callable[[Any], Any]
    """Puts values into the region."""
    round: Callable[[Any], Any]
    """Rounds values to the gradient's type, and gives them in the carry's."""
    hold: Callable[[Any], Any]
    """Keeps values within the finite range."""
    scaling: Scaling | None
    """Of the rule; None if the policy has no memory."""


class Clipped(NamedTuple):
    """One array, clipped."""

    total: Any
    """What was clipped."""
    aim: Any
    update: Any
    """``aim``, rounded to the gradient's type."""
    kept: Any
    """The new carry."""
    dropped: Any = None
    """What is neither sent nor kept; None where nothing is lost, or the scaling says how much."""
    feed: Any = None
    """The new feed average of each coordinate."""


class Policy:
    """What the algorithm asks of a carry policy.

    A policy sees the *rest*, what clipping has cut off, and says how much of it is kept: a fraction of it, or as much
    as fits within a limit. Limits are norms under a ``Norm`` and absolute values of coordinates otherwise. One that
    *mixes* says itself what becomes of gradient and carry.
    """

    carries: ClassVar[bool] = True
    """False if nothing is kept, so that there is no buffer."""
    follows: ClassVar[Any] = None
    """What it keeps a running average of, with ``decay``: the ``"feed"`` of the carry, for each norm or for each
    coordinate; or the ``"deficit"``, the part that plain clipping cuts off, for each norm or for all coordinates of a
    rule together. None if it needs no past."""
    noisy: ClassVar[bool] = False
    """True if it keeps ``noise`` as well."""
    decay: Any
    gated: ClassVar[bool] = False
    """True if its gate is closed while the average feed is at or above ``threshold``."""
    threshold: Any
    reach: ClassVar[Any] = math.inf
    """How many radii of a coordinate count, where coordinates are summed up: what one spike may do is bounded."""
    idle: ClassVar[float] = 1.0
    """What ``Scaling.taken`` is where nothing is ever clipped, so that a carry of 0 stays 0."""
    mixes: ClassVar[Any] = False
    """True if it clips the gradient by itself and mixes the carry into it: ``weigh``, ``mix``, ``left`` and
    ``mix_coordinates`` are then asked, and nothing else."""
    bounded: ClassVar[bool] = False
    """True if the carry cannot grow without end, so that there is nothing to warn of."""

    limited: ClassVar[bool] = False
    """True if there is a ``limit``."""

    @property
    def hasty(self) -> bool:
        """Whether all that is owed is paid as fast as the radius allows, which optimizers with momentum suffer from."""
        return self.carries and not self.mixes and self.fraction != 0.0

    fraction: ClassVar[Any] = None
    """The part of the rest that is kept, if there is no limit; None for all of it."""

    def limit(self, xp: Any, radius: Any, owed: Any, closed: Any) -> Any:
        """The largest carry there may be; asked for only if the policy is ``limited``.

        Args:
            xp: the array namespace.
            radius: of the region at this step.
            owed: size of the carry before the step; None if the policy is not gated.
            closed: whether the gate is closed, so that the carry must not grow; None likewise.
        """
        raise NotImplementedError

    def weigh(
        self, xp: Any, sums: Sums, radius: Any, memory: Memory | None, rounding: Any, unit: Any
    ) -> tuple[Scaling, Memory | None]:
        """The scalars of each scope, and the memory that follows, from |g|², |carry|² and <g, carry> alone.

        Args:
            xp: the array namespace.
            sums: of each scope, in units of ``unit``.
            radius: likewise.
            memory: of the steps before.
            rounding: how far rounding may move an update, relative to its size.
            unit: see ``carryclip.algorithm.unit_of``; memory is kept without it.
        """
        raise NotImplementedError

    def mix(self, xp: Any, gradient: Any, carry: Any, scaling: Scaling) -> tuple[Any, Any]:
        """(the update, what is owed) of one array under a norm; with a scale of 1 the first is the vector itself."""
        raise NotImplementedError

    def left(self, xp: Any, owed: Any, update: Any, scaling: Scaling) -> Any:
        """The carry after the update under a norm."""
        raise NotImplementedError

    def weigh_coordinates(self, xp: Any, sums: Sums, memory: Memory | None) -> tuple[Scaling, Memory | None]:
        """The scalars of a rule that clips coordinate by coordinate, and the memory that follows."""
        raise NotImplementedError

    def mix_coordinates(self, xp: Any, mixing: Mixing) -> Clipped:
        """One step of an array clipped coordinate by coordinate."""
        raise NotImplementedError


def share_within(xp: Any, limit: Any, rest: Any) -> Any:
    """The factor that brings a vector of norm ``rest`` within ``limit``."""
    over = rest > limit
    return xp.where(over, limit / xp.where(over, rest, 1.0), 1.0)
