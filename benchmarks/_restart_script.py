"""The training that `restart` kills: ``python _restart_script.py MODE RUN LOG BYTES``; MODE is a name of `restart`.

Writes to LOG, line by line: what has happened, the process, `time.monotonic`.
"""

from __future__ import annotations

import os
import sys
import time

EVERY = 5
mode, run, log, nbytes = sys.argv[1], sys.argv[2], os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND), int(sys.argv[4])


def note(what: str) -> None:
    """Append a line in one piece."""
    os.write(log, f"{what} {os.getpid()} {time.monotonic():.6f}\n".encode())


note("begun")
import torch  # noqa: E402 - the time of the import is a part of what is measured

side = 1024
model = torch.nn.ParameterList(torch.empty(side, side) for _ in range(max(1, nbytes // (3 * 4 * side * side))))
with torch.no_grad():
    for parameter in model:
        parameter.fill_(0.01)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
note("built")


def train() -> None:
    """Make one step in which every value of the state changes."""
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()


if mode.startswith("holdfast"):
    import holdfast

    rescue = 1 if "rescue" in mode else None
    with holdfast.Checkpointer(run, {"model": model, "optimizer": optimizer}, every=EVERY, rescue=rescue) as ck:
        note("restored")
        while True:
            train()
            ck.step()
            note(f"step={ck.global_step}")
else:
    step = 0
    if os.path.exists(run):
        found = torch.load(run, mmap="mmap" in mode)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    note("restored")
    while True:
        train()
        step += 1
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with open(f"{run}.new", "wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
            os.replace(f"{run}.new", run)
        note(f"step={step}")
