"""Message lists of trained turns -> the rows of the conversational data set: the maximal lists.

`source`: each source (a session file) is read on its own, in any process, into a `SourcePart`: the nodes of the
message lists of its turns in flat arrays, and their texts in a spill file. `merging`: over all parts in order, which
turns repeat an earlier one, which lists are a prefix of another with the same tools, and in which row each target is
flagged: the first that holds it. `writing`: the rows, streamed to an Arrow file. So the rows do not depend on how many
processes read, and memory does not depend on how long the texts are.

Two lists are equal if their digests are: 128 bits of XXH3 over tools and messages, with a seed that is drawn anew for
each load, so that no file can be made to look like another.

Cost: 20 bytes for each message of a list and about 40 for each turn in memory, texts once for each source on disk.
"""

from dagpack_hf.maximal.merging import Rows, merge
from dagpack_hf.maximal.source import BackgroundFile, PartDetails, Provenance, SourcePart, SourceWriter
from dagpack_hf.maximal.writing import row_tables, write_rows

__all__ = [
    "BackgroundFile",
    "PartDetails",
    "Provenance",
    "Rows",
    "SourcePart",
    "SourceWriter",
    "merge",
    "row_tables",
    "write_rows",
]
