"""A stored checkpoint on its way into a live state.

`stored` opens it, `match` lays it over the state without touching it, `reader` reads and checks the bytes, `restore`
does all of it in order. Ranks of one machine read each byte once (`shared_reads`).
"""
