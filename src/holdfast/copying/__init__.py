"""Files from one place to another.

From storage to storage: one checkpoint (`transfer`), a whole run (`run_transfer`). Downloads that the processes of a
machine share (`downloads`). From directory to directory of this machine, without a copy (`local`). Imports run, format
and storage, never torch.
"""
