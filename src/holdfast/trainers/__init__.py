"""The front doors that train for the user. Public names are exported by `holdfast` and `holdfast.torch`."""
