"""How the writers of many ranks agree.

On a step (`steps`), and on the saves that they make, upload or rescue together (`saves`): these decide; `server` and
`member` carry their messages over `link`. `holdfast.writer.distributed` puts them together.
"""
