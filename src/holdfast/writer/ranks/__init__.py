"""How the writers of many ranks agree.

On a step, and on the saves that they make, upload or rescue together, `agreement` decides (pure); `server` and `member`
carry its messages over `link`. `holdfast.writer.distributed` puts them together.
"""
