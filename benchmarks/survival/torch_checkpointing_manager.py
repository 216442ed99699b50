"""torch_checkpointing's CheckpointManager, async, as in its tutorial, with the settings of its page for CPUs."""

import re
from pathlib import Path

import torch
from _training import EVERY, STEPS, Net, train_step
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def newest(root):
    """Return the directory of the highest step, None if there is none."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name)]
    return root / f"step_{max(steps)}" if steps else None


def main():
    """Train."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    config = CheckpointManager.Config(
        # Its O_DIRECT writes fail with EINVAL on ext4.
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        save=AsyncCheckpointSaverConfig(
            staging_config=staging,
            # Its writer may start late on a busy machine, which is no fault of its saving: 30 s else.
            process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=300),
        ),
    )
    manager = CheckpointManager(config)
    root, step = Path("checkpoints").absolute(), 0
    found = newest(root)
    if found is not None:
        saved = manager.load(str(found), into={"model": model.state_dict(), "optimizer": None, "step": 0})
        optimizer.load_state_dict(saved["optimizer"])
        step = int(saved["step"])
    while step < STEPS:
        with manager.lock():
            train_step(model, optimizer, step)
        step += 1
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            manager.save(str(root / f"step_{step}"), state)
    manager.close()


if __name__ == "__main__":
    main()
