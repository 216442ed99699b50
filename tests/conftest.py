"""What holds for every test."""

from __future__ import annotations

import signal

# Started in the background of a script, pytest would hand its deaf ear for Ctrl-C on to the processes under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
