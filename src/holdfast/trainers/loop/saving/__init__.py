"""The checkpoints of the loop trainer.

`saver` decides when to save and under which name. `saves` hands the state to the run session, and follows what is
durable (link, upload, retention). `saver_group` is what the savers of a trainer do together, from the checkpoint that
training goes on from to its end. `folder` is where they save, `finder` the names there and what lies under them,
`layout` a checkpoint as dictionaries, `files` as one file. `load` is the way back, `uploads` a copy elsewhere. Each of
them knows only those it is made of: group -> savers -> saves -> folder -> finder -> files -> layout.
"""
