"""A state taken apart: its tensors by name, and a tree of typed values for everything else.

Start with `flatten`. `names` are names that survive wrappers, `values` and `arrays` the kinds of value, `objects` what
has a ``state_dict`` of its own, `spread` and `sharded` what is spread over ranks, `rng` random generators.
"""
