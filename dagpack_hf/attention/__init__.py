"""Attention on packed rows: each position sees its ancestors.

The part has one door. [`enable`] switches a loaded model to the attention function registered as `"dagpack"`; each
forward pass then takes the rows of its batch as one keyword argument:

```python
previous = enable(model)                # refuses models that would be wrong, by name and reason
probe(model)                            # packed against unpacked logits, on a row of some 50 tokens
visibility = DagVisibility(subtree_end, position_ids)
model(input_ids=input_ids, position_ids=position_ids, dag_visibility=visibility, use_cache=False)
with ordinary_attention(model, previous):
    model.generate(...)
```

Behind it are several backends, each exact, each tested against the dense mask of [`visible`]: `dense` (PyTorch's
scaled dot-product attention; CPU, and the reference) and `flex` (FlexAttention; CUDA).

Design: `subtree_end` and `position_ids` say all there is to say about a row, so these two vectors travel and each
backend builds what it needs from them, once per forward and distinct sliding window (`visibility`). `interface` holds
the function that transformers calls, `support` and `probe` keep away the models for which the idea does not hold.

Cost: `dense` keeps `B * T * T` bytes per distinct window, `flex` `O(B * T)`; the probe runs once, over some 110
tokens.
"""

from .interface import BACKENDS, NAME, MissingVisibilityError, register, select_backend
from .probe import probe
from .support import UnsupportedModelError, check_model
from .switch import enable, ordinary_attention, packed_attention
from .visibility import DagVisibility, visible

__all__ = [
    "BACKENDS",
    "NAME",
    "DagVisibility",
    "MissingVisibilityError",
    "UnsupportedModelError",
    "check_model",
    "enable",
    "ordinary_attention",
    "packed_attention",
    "probe",
    "register",
    "select_backend",
    "visible",
]
