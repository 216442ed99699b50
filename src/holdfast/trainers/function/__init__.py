"""L6: a run of workers, in the driver and on the workers. Public names are exported by `holdfast` itself.

Driver: controller (states, policy, board, reports, commits, shelf: pure) -> drive, execute -> engine (local: zygote,
supervisor, child, logs; inline: none). Worker: worker (the main) -> session (what train_func calls) -> delivery
(reports with data: takeover, shares, uploads) -> link (outbox, answers). Both: location, failure, transit, types;
result reads a run.
May import checkpointer, state, writer, checkpoint, format, storage, config and errors.
The zygote imports what it forks with before any thread exists, so keep this module free of imports.
"""
