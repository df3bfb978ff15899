"""The layouts that packing is compared with, as rows that can be trained: padded, concatenated, best fit.

`placement` says which part of which document goes where, from lengths alone; `rows` writes that as the rows of
`pack_dataset`, so that `DagSFTTrainer` trains them with the same model, loss and attention.
"""

from dagpack_hf.baselines.placement import Placement, place
from dagpack_hf.baselines.rows import BaselineReport, baseline_rows

__all__ = ["BaselineReport", "Placement", "baseline_rows", "place"]
