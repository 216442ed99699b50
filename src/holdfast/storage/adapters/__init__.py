"""Clients of other packages as storages: fsspec, pyarrow, libcloud.

`common` holds what they share. `for_pyarrow` goes the other way: a storage as a file system of pyarrow.
"""
