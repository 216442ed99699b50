"""Clients of other people as storages: fsspec, pyarrow, libcloud.

`common` is what they share. `for_pyarrow` goes the other way: a storage as a file system of pyarrow.
"""
