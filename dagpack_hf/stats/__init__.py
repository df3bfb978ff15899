"""The arithmetic of packing: what padding, concatenating, best fit and DAG packing cost, computed and not trained.

`layout_costs` takes lengths, `sequence_costs` tokens; `lognormal_lengths` draws documents and `read_documents` reads a
file of them; `mean_costs` and `cost_table` sum up and print. `python -m dagpack_hf.stats` does it from a shell.
Definitions and a run are in `docs/arithmetic.md`.
"""

from dagpack_hf.stats.costs import LAYOUTS, LayoutCost, dag_cost, layout_costs, sequence_costs
from dagpack_hf.stats.documents import Documents, lognormal_lengths, read_documents
from dagpack_hf.stats.summary import MeanCost, cost_series, cost_table, mean_costs

__all__ = [
    "LAYOUTS",
    "Documents",
    "LayoutCost",
    "MeanCost",
    "cost_series",
    "cost_table",
    "dag_cost",
    "layout_costs",
    "lognormal_lengths",
    "mean_costs",
    "read_documents",
    "sequence_costs",
]
