"""Recurrent layers on packed rows: each position goes on from the state of its parent.

[`packed_states`] replaces the functions that carry state in a model's modeling file inside a `with` block;
`dagpack_hf.attention.packed_attention` enters it. Given `dag_visibility` or `dag_states`, the stand-ins compute packed
rows (`functions`): short convolutions (`convolution`), gated delta rule and Kimi delta attention (`delta_rule`), and
Mamba-2 scans (`mamba2`), each by calls of the function itself on positions that a [`StatePlan`] lays out. `modules`
finds the layers and says what stands in the way, `check` sees that each is reached; the numbers are compared by
`dagpack_hf.attention.probe`.

Design: the functions of transformers stay as they are, so kernels, adapters and gradient checkpointing do too. Nothing
is replaced by an import.

Cost: see `docs/hybrid.md`; a step on a tree takes what one on a plain row of as many tokens takes.
"""

from .functions import TESTED
from .modules import RecurrentModule, obstacles, recurrent_modules
from .plan import StatePlan
from .states import KEYWORD, DagStates, plan_of
from .switch import install, packed_states, states_for

__all__ = [
    "KEYWORD",
    "TESTED",
    "DagStates",
    "RecurrentModule",
    "StatePlan",
    "install",
    "obstacles",
    "packed_states",
    "plan_of",
    "recurrent_modules",
    "states_for",
]
