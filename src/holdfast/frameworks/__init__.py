"""What the modules of the frameworks (`holdfast.lightning`, `holdfast.transformers`, ...) have in common.

Two situations, one module for each:

- *Inside the function trainer* a callback of the framework reports what the framework writes. `reporting` gives the
  directory to write into and reports it::

      with reporting({"loss": 0.3, "epoch": 2}) as directory:      # every rank, equally often
          trainer.save_checkpoint(f"{directory}/checkpoint.ckpt")  # what the framework does on each rank

  The directory is on the disk of the run where that is possible, so that reporting it is a rename. ``sharded=True``:
  every rank writes its files into it (the same path on all ranks), and it is reported when all have.

- *Without it* (a plain trainer of the framework) `keepers.DirectoryCheckpoints` keeps directories that the framework
  wrote: committed in the background, digested, in any storage, with the retention of `holdfast.Keep`; and gives back
  the newest that is sound, as a local directory::

      keeper = DirectoryCheckpoints("s3://bucket/run", keep=Keep(last=2, best=1, metric="loss"))   # on every rank
      resume_from = keeper.latest()                                  # None at a fresh start
      keeper.add(directory, step=100, metrics={"loss": 0.3})         # returns at once; the framework may delete it
      keeper.wait()                                                  # at the end of training

A framework that hands over dictionaries by path, and chooses itself which to remove, gets `lightning_plugins.Saves`;
one whose classes exist twice gets `holdfast._optional.Grafted`. `reporting.scalars` picks the metrics out of what a
framework logs. Everything here works on any rank, and without a process group if there is one process; nothing imports
a framework, and nothing imports the modules above.
"""
