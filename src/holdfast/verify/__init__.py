"""`holdfast verify-resume`: run a script without a break and killed, compare, and say what differs and why.

`lives` runs one life of a script in processes of its own and kills it; `trace` is what the life is told and records,
and how the records of several compare. For a script with a `Checkpointer`, a `witness` in it records the whole state at
each boundary of a step; `resume` chooses when to save and kill and runs it all. `state` takes states apart and compares
them bit by bit. For any other script, `observer` records the steps of its optimizers, `scripts` runs the lives,
`matching` compares by content. `report` says what differs, and why. `attack` is `holdfast attack`: the same lives,
killed while they save (`workplace.ChangeWatch`) in forks of a warm interpreter, with power cuts, and judged. Users
import these names from `holdfast.testing`.
"""
