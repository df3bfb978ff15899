"""Attention on packed rows: each position sees its ancestors.

The part has one door. [`enable`] switches a loaded model to attention for packed rows; each forward pass then takes
what [`inputs_for`] makes of the rows of its batch:

```python
previous = enable(model)                # refuses models that would be wrong, by name and reason
probe(model)                            # packed against unpacked logits, on a row of some 50 tokens
visibility = DagVisibility(subtree_end, position_ids)
model(input_ids=input_ids, use_cache=False, **inputs_for(model, visibility))
with ordinary_attention(model, previous):
    model.generate(...)
```

Behind it are several backends, each exact, each tested against the dense mask of [`visible`]: `tile` (CPU; computes
little more than what is visible), `flex` (FlexAttention; CUDA) and `dense` (PyTorch's scaled dot-product attention
under the mask itself; the reference, and for other devices).

Models whose layers call the function registered as `"dagpack"` take the rows themselves; the others take a ready mask
(`ready_mask`), which is dense.

Design: `subtree_end` and `position_ids` say all there is to say about a row, so these two vectors travel and each
backend builds what it needs from them, once per forward and distinct sliding window (`visibility`). `interface` holds
the function that transformers calls, `support` and `probe` keep away the models for which the idea does not hold.

Cost: `dense` keeps `B * T * T` bytes per distinct window, `tile` and `flex` `O(B * T)`; the probe runs once, over
some 110 tokens.
"""

from .interface import BACKENDS, NAME, MissingVisibilityError, register, select_backend
from .probe import probe, probe_head
from .ready_mask import Route, inputs_for, packed_implementation, route_of
from .support import UnsupportedModelError, check_model
from .switch import enable, ordinary_attention, packed_attention
from .visibility import DagVisibility, visible

__all__ = [
    "BACKENDS",
    "NAME",
    "DagVisibility",
    "MissingVisibilityError",
    "Route",
    "UnsupportedModelError",
    "check_model",
    "enable",
    "inputs_for",
    "ordinary_attention",
    "packed_attention",
    "packed_implementation",
    "probe",
    "probe_head",
    "register",
    "route_of",
    "select_backend",
    "visible",
]
