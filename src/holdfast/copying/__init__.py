"""Files from one storage to another.

One checkpoint (`transfer`), a whole run (`run_transfer`), and downloads that the processes of a machine share
(`downloads`). Imports run, format and storage, never torch.
"""
