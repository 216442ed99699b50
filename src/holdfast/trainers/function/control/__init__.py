"""The driver's side of a run: a controller that decides, and what carries its decisions out."""
