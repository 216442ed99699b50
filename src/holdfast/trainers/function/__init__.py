"""The function trainer: a run of workers, in the driver and on the workers. Public names come from `holdfast`.

Start with `trainer` (what `TorchTrainer.fit` does) and `engine` (what a driver needs of an engine). Driver:
`control/controller` is a state machine (with `actions`, `plan`, `reports`, `report_ledger`: pure), `drive` carries out
what it decides. Engines: `engines/process_engine`, on this machine over `supervisor` and `zygote`, on a cluster over
`agents` and an `agent` on each node (`ray_nodes` finds them); `local_mode` calls in this process. Worker:
`worker/main`, `session` (what the function calls), `delivery` (reports with data), `link`. All sides: `config`,
`transit`, `handoff`; `control/result` reads a run.

May import interop and all below it. The zygote imports what it forks with before any thread exists: keep this module
free of imports.
"""
