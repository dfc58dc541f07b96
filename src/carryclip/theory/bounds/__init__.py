"""How large the carry gets and what it costs, one function per result.

| result | functions |
|---|---|
| first carry bound | ``carry_tail``, ``carry_quantile``, ``carry_mean`` |
| its corollary | ``corollary_tail``, ``corollary_quantile`` |
| second carry bound (adaptive) | ``adaptive_carry_tail``, ``adaptive_carry_quantile``, ``adaptive_carry_mean`` |
| gradient-transformation lemma | ``transformation_mean``, ``transformation_quantile`` |
| convergence theorems | ``convergence``, ``adaptive_convergence`` |
| random walk (sharper) | ``walk_tail``, ``walk_quantile``, ``walk_mean`` |
| Lundberg (sharper) | ``lundberg_rate``, ``lundberg_tail``, ``lundberg_quantile``, ``lundberg_mean`` |
| second moment (sharper, any dimension) | ``second_moment_mean``, ``second_moment_average`` |
| regret through the shadow (sharper) | ``shadow_regret``, ``sharp_convergence`` |
| norm clipping (open in the paper) | ``norm_carry_tail``, ``norm_carry_quantile``, ``norm_carry_mean`` |
| U-Sign and ``Leaky`` | ``sign_carry_bound``, ``sign_carry_average``, ``leak_bias`` |
| ``Gated`` | ``gated_carry_bound``, ``gated_growth_steps``, ``gate_open``, ``gate_shut``, ``gated_bias`` |

Those of the paper take ``form="printed"`` (its formula as it stands) or ``"corrected"`` (default). Arguments may be
arrays and broadcast. Outside a bound's conditions ``OutsideConditionsError`` names the condition.
"""

from carryclip.theory.bounds._adaptive import adaptive_carry_mean, adaptive_carry_quantile, adaptive_carry_tail
from carryclip.theory.bounds._carry import (
    carry_mean,
    carry_quantile,
    carry_tail,
    corollary_quantile,
    corollary_tail,
)
from carryclip.theory.bounds._conditions import Form, OutsideConditionsError
from carryclip.theory.bounds._gate import gate_open, gate_shut, gated_bias, gated_carry_bound, gated_growth_steps
from carryclip.theory.bounds._moment import (
    leak_bias,
    second_moment_average,
    second_moment_mean,
    sign_carry_average,
    sign_carry_bound,
)
from carryclip.theory.bounds._norm import norm_carry_mean, norm_carry_quantile, norm_carry_tail
from carryclip.theory.bounds._regret import (
    adaptive_convergence,
    convergence,
    shadow_regret,
    sharp_convergence,
    transformation_mean,
    transformation_quantile,
)
from carryclip.theory.bounds._walk import (
    lundberg_mean,
    lundberg_quantile,
    lundberg_rate,
    lundberg_tail,
    walk_mean,
    walk_quantile,
    walk_tail,
)

__all__ = [
    "Form",
    "OutsideConditionsError",
    "adaptive_carry_mean",
    "adaptive_carry_quantile",
    "adaptive_carry_tail",
    "adaptive_convergence",
    "carry_mean",
    "carry_quantile",
    "carry_tail",
    "convergence",
    "corollary_quantile",
    "corollary_tail",
    "gate_open",
    "gate_shut",
    "gated_bias",
    "gated_carry_bound",
    "gated_growth_steps",
    "leak_bias",
    "lundberg_mean",
    "lundberg_quantile",
    "lundberg_rate",
    "lundberg_tail",
    "norm_carry_mean",
    "norm_carry_quantile",
    "norm_carry_tail",
    "second_moment_average",
    "second_moment_mean",
    "shadow_regret",
    "sharp_convergence",
    "sign_carry_average",
    "sign_carry_bound",
    "transformation_mean",
    "transformation_quantile",
    "walk_mean",
    "walk_quantile",
    "walk_tail",
]
