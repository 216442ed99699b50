"""A state on its way into the arena.

`plan` says where each tensor goes and which rank writes what all hold, `staging` and `device_copies` copy, the
latter with checksums that tell whether late copies are those of the end of the step, `snapshot` puts them together.
`torch_file` writes torch's own format.
"""
