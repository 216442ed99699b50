"""Files that somebody else has written become a checkpoint.

`sources` lists them, `merge` decides (pure), `intake` moves or copies them, or commits them where they are.
"""
