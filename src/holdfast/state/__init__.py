"""Live training state, taken apart and put back together. Torch starts here.

`tree/` takes a state apart, `save/` copies it to where the writer sees it, `load/` reads it back into live objects,
`data/` keeps the position in the data and the random numbers of the data side, and `gradient_order` makes the first
step of DDP like the others. Start with `save/snapshot` and `load/restore`. May import writer and all below it.
"""
