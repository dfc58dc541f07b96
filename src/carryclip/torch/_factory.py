"""``uclipped``: an optimizer class that clips by itself, and still does after deepcopy, pickle and ZeRO."""

import sys
from typing import Any

from torch.optim import Optimizer

from carryclip.groups import Regions
from carryclip.torch._clipper import UClip, check_arguments


def uclipped(optimizer_class: type[Optimizer], region: Regions, **options: Any) -> type[Any]:
    """A subclass of ``optimizer_class`` whose instances come with ``UClip`` attached.

    Wherever a class is wanted instead of an instance, or the optimizer is copied or pickled, this keeps the clipping.
    The clipper is the instance's attribute ``uclip``.

    Args:
        optimizer_class: any ``torch.optim.Optimizer`` class.
        region: as for ``UClip``.
        **options: as for ``UClip``: ``carry``, ``nonfinite``, ``metrics_every``, ``compile`` and so on.

    >>> import torch, copy
    >>> from carryclip import Norm
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> opt = uclipped(torch.optim.SGD, Norm(1.0), carry=True)([weight], lr=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> opt.step(); weight.data
    tensor([-0.6000, -0.8000])
    >>> twin = copy.deepcopy(opt)
    >>> twin.uclip.carry(0)
    tensor([2.4000, 3.2000])
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        if isinstance(optimizer_class, Optimizer):
            raise TypeError("uclipped needs an optimizer class. This is an instance: write UClip(optimizer, region).")
        raise TypeError(f"uclipped needs an optimizer class such as torch.optim.AdamW, got {optimizer_class!r}.")
    check_arguments("uclipped", region, options)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        optimizer_class.__init__(self, *args, **kwargs)
        self.uclip = UClip(self, region, **{"process_group": _group_of_zero(), **options})

    def __reduce__(self: Any) -> tuple[Any, ...]:
        clipper = self.uclip
        now = {**options, "carry": clipper.carry_policy}  # both may have changed since
        return _rebuild, (optimizer_class, clipper.region, now), (self.__getstate__(), clipper.__reduce__()[1][-1])

    def __setstate__(self: Any, state: Any) -> None:
        if isinstance(state, dict):  # what Optimizer.load_state_dict passes
            optimizer_class.__setstate__(self, state)
            return
        own_state, removed = state
        optimizer_class.__setstate__(self, own_state)
        self.uclip = UClip(self, region, **options)
        if removed:
            self.uclip.remove()

    return type(
        f"UClipped{optimizer_class.__name__}",
        (optimizer_class,),
        {
            "__init__": __init__,
            "__reduce__": __reduce__,
            "__setstate__": __setstate__,
            "__doc__": f"{optimizer_class.__name__} that clips with {region!r}.",
            "__module__": __name__,
        },
    )


def _group_of_zero() -> Any:
    """The process group of the ``ZeroRedundancyOptimizer`` that is making this optimizer, if one is.

    It hands the class a share of the parameters and says nothing of the others, without which a norm would silently be
    that of the share.
    """
    frame = sys._getframe(2)
    while frame is not None:
        names = frame.f_locals
        owner = names.get("self")
        if type(names) is dict and frame.f_code.co_name != "<module>":
            # Before Python 3.13 this is a copy that the frame keeps, and with it whatever the function holds.
            names.clear()
        if type(owner).__name__ == "ZeroRedundancyOptimizer":
            return getattr(owner, "process_group", None)
        frame = frame.f_back
    return None


def _rebuild(optimizer_class: type[Optimizer], region: Any, options: dict[str, Any]) -> Any:
    cls = uclipped(optimizer_class, region, **options)
    return object.__new__(cls)
