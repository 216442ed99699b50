"""`holdfast run`: starts a script, and starts it again when it ends before it is done.

Start with `supervisor` (the loop: start, watch, look at the end, decide). `restarts` decides from the lives so far and
is pure, `processes` are those of one life, `early` holds signals from the first moment on, `startup` is the folder that
every Python process of the script begins in. What the script says of itself is read from `holdfast.run.life`. All that
a supervisor knows may be lost without losing a step that was durable. Imports no torch.
"""
