"""A state taken apart: its tensors by name, and a tree of typed values for everything else.

Start with `flatten`. `names` are names that survive wrappers, `values` and `arrays` the kinds of value, `objects` what
has a ``state_dict`` of its own, `optimizers` optimizer state by parameter name, `spread` and `sharded` tensors that are
spread over ranks, `groups` the ranks that hold the same, `rng` random generators.
"""
