"""On PYTHONPATH: takes away the names that Python has on Linux and not on macOS, before anything else is imported.

After "Availability" in the documentation of the modules; `os.waitid` came to macOS with Python 3.13.
"""

import mmap
import os
import signal
import socket

_NAMES = {
    mmap: "MADV_DONTFORK MADV_DOFORK MAP_POPULATE",
    os: "memfd_create pidfd_open O_DIRECT O_TMPFILE O_PATH RWF_NOWAIT posix_fadvise posix_fallocate waitid "
    "sched_getaffinity sched_setaffinity copy_file_range eventfd splice",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo",
    socket: "MSG_CMSG_CLOEXEC TCP_USER_TIMEOUT SO_PEERCRED",
}
for _module, _words in _NAMES.items():
    for _name in _words.split():
        vars(_module).pop(_name, None)
