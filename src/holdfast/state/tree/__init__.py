"""A state taken apart: its tensors by name, and a tree of typed values for everything else.

Start with `flatten`. `values` and `arrays` are the kinds of value, `objects` what has a ``state_dict``, under names
that survive wrappers, `sharded` what is spread over ranks, `rng` random generators.
"""
