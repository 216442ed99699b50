"""`holdfast verify-resume`: run a script without a break and killed, compare, and say what differs and why.

`lives` runs one life of a script in processes of its own and kills it; `plan` is what the life is told. For a script
with a `Checkpointer`, a `witness` in it records the whole state at each boundary of a step; `choose` says when to
save and kill, `comparison` finds the first difference, `causes` names its reason, `resume` runs it all. `state` takes
states apart and compares them bit by bit. `attack` is `holdfast attack`: the same lives, killed while they save
(`workplace.ChangeWatch`) in forks of a `warm` interpreter, with `power` cuts, judged by `survival`. Users import these
names from `holdfast.testing`.
"""
