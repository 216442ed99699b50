"""How the writers of many ranks agree.

On a step (`steps`), on the saves they make together (`saves`), on what goes to the remote (`uploads`): these three are
pure objects; `server` and `member` carry their messages over `link`. `holdfast.writer.distributed` puts them together.
"""
