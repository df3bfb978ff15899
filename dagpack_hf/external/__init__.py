"""Packing of corpora that are larger than memory, in partitions that fit into it.

Paths of all examples are brought in lexicographic order as far as partitions go: sampled *splitters* cut the order,
each path is sent to its partition, and each partition is packed as any forest is. Only along the splitters do
partitions share tokens, so a summary of these is enough to train every target exactly once, with the tally that it has
in the whole corpus, and to give the same bound as if the corpus had been packed in memory.

What it is made of are functions of tables and small summaries that add up in any order, so the same steps run in one
process (`packing`) or as a distributed pipeline, and give the same rows.

`branches`    table -> stretches of tokens, sizes, sampled paths
`splitters`   sampled paths -> splitters
`scatter`     table, splitters -> pieces for each partition, and a summary
`border`      sum of the summaries -> what each partition shares with others
`partitions`  pieces, border -> rows, and the outcome
`reports`     outcomes -> the report, by way of the leaf `lines` of the partitions
`packing`     all of it in one process
`distributed` all of it on a Ray cluster (`cluster`), in `tasks`
"""
