"""A directory of a local or mounted file system as a storage.

`local_storage` is the contract, `beneath` the door that never leads out of the directory, `ops` the system calls at
which tests count, fail and crash.
"""
