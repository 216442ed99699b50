"""How large the house is, and how many rooms a saved step passes; `make house` prints it."""
