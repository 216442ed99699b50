"""Files that somebody else has written become a checkpoint.

`sources` lists them, `merge` decides (pure), `intake` moves or copies them, `in_place` commits them where they are.
"""
