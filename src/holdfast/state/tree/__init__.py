"""A state taken apart: its tensors by name, and a tree of typed values for everything else.

Start with `flatten`. `names` are names that survive wrappers, `values` and `arrays` the kinds of value, `optimizers`
optimizer state by parameter name, `sharded` tensors that are spread over ranks, `rng` random generators.
"""
