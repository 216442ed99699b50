"""A state on its way into the arena.

`plan` says where each tensor goes and which rank writes what all hold, `staging` and `cuda` copy, `snapshot` puts them
together. `torch_file` writes torch's own format.
"""
