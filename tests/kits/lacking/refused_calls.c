/* With LD_PRELOAD, in a process and all that it starts: Linux without pidfd, openat2, O_DIRECT, O_TMPFILE, posix_fadvise
   and /proc, on file systems without locks. What torch asks for itself (locks of its stores) it gets. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define REFUSE(code) do { errno = (code); return -1; } while (0)

static int hidden(const char *path) {
    static const char *const shown[] = {"/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm/"};
    if (path == NULL || strncmp(path, "/proc", 5) != 0 || (path[5] != '/' && path[5] != 0))
        return 0;
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        if (strncmp(path, shown[i], strlen(shown[i])) == 0)
            return 0;
    return 1;
}

static int refusal(const char *path, int flags) {
    if (hidden(path)) return ENOENT;
    if ((flags & O_TMPFILE) == O_TMPFILE) return EOPNOTSUPP;
    return flags & O_DIRECT ? EINVAL : 0;
}

#define OPEN(name)                                                                  \
    int name(const char *path, int flags, ...) {                                    \
        REAL(name);                                                                 \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                   \
        va_end(rest);                                                               \
        int code = refusal(path, flags);                                            \
        if (code) REFUSE(code);                                                     \
        return real(path, flags, mode);                                             \
    }
#define OPENAT(name)                                                                \
    int name(int fd, const char *path, int flags, ...) {                            \
        REAL(name);                                                                 \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                   \
        va_end(rest);                                                               \
        int code = refusal(path, flags);                                            \
        if (code) REFUSE(code);                                                     \
        return real(fd, path, flags, mode);                                         \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define STAT(name, type)                                                            \
    int name(const char *path, struct type *about) {                                \
        REAL(name);                                                                 \
        if (hidden(path)) REFUSE(ENOENT);                                           \
        return real(path, about);                                                   \
    }
#define STATAT(name, type)                                                          \
    int name(int fd, const char *path, struct type *about, int flags) {             \
        REAL(name);                                                                 \
        if (hidden(path)) REFUSE(ENOENT);                                           \
        return real(fd, path, about, flags);                                        \
    }
STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)

ssize_t readlink(const char *path, char *to, size_t size) {
    REAL(readlink);
    if (hidden(path)) REFUSE(ENOENT);
    return real(path, to, size);
}

DIR *opendir(const char *path) {
    REAL(opendir);
    if (hidden(path)) {
        errno = ENOENT;
        return NULL;
    }
    return real(path);
}

#define FCNTL(name)                                                                 \
    int name(int fd, int command, ...) {                                            \
        REAL(name);                                                                 \
        va_list rest;                                                               \
        va_start(rest, command);                                                    \
        void *argument = va_arg(rest, void *);                                      \
        va_end(rest);                                                               \
        if (command == F_SETFL && (long)argument & O_DIRECT) REFUSE(EINVAL);        \
        return real(fd, command, argument);                                         \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

int flock(int fd, int operation) {
    REAL(flock);
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "/torch/"))
        return real(fd, operation);
    REFUSE(ENOLCK);
}

int posix_fadvise(int fd, off_t offset, off_t size, int advice) { return ENOSYS; }
int posix_fadvise64(int fd, off64_t offset, off64_t size, int advice) { return ENOSYS; }

long syscall(long number, ...) {
    REAL(syscall);
    va_list rest;
    va_start(rest, number);
    long given[6];
    for (int i = 0; i < 6; i++) given[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_pidfd_open || number == SYS_pidfd_send_signal || number == SYS_openat2) REFUSE(ENOSYS);
    return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
