"""The command ``holdfast``. Imports no torch, and rich only to print a table, so that it starts at once."""
