/*
 * Preloaded into a broker: system calls on files of its home fail when a test says so.
 *
 * RMQ_FAULTS names a file with one struct control, which the test maps, too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { WRITE = 1, SYNC = 2, OPEN = 4, TRUNCATE = 8, RENAME = 16, ALLOCATE = 32 };

struct control {
    volatile int32_t armed;  /* written last by the test */
    int32_t calls;           /* of enum call */
    int32_t error;           /* errno; 0: a write that takes half */
    int32_t unused;
    volatile int64_t left;   /* how many calls fail */
    volatile int64_t hits;   /* how many have failed */
    int64_t until_ns;        /* of CLOCK_MONOTONIC; 0: only by their number */
    char pattern[232];       /* of paths, as fnmatch takes it */
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RMQ_FAULTS");
    if (!path) return;
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = real_open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) control = mapped;
}

static int fails(enum call call, const char *path) {
    if (!control || !control->armed || !(control->calls & call)) return 0;
    if (fnmatch(control->pattern, path, 0)) return 0;
    if (control->until_ns) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec * INT64_C(1000000000) + now.tv_nsec > control->until_ns) return 0;
    } else if (__atomic_fetch_sub(&control->left, 1, __ATOMIC_SEQ_CST) <= 0) {
        return 0;
    }
    __atomic_fetch_add(&control->hits, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static int fails_at(enum call call, int file) {
    if (!control || !control->armed || !(control->calls & call)) return 0;
    char link[64], path[PATH_MAX];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length <= 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL return errno = control->error, -1

/* Writes of one buffer. */
#define ONE(name, before, after) \
    ssize_t name before { \
        REAL(name); \
        if (!fails_at(WRITE, file)) return real after; \
        if (control->error) FAIL; \
        length -= length / 2; \
        return real after; \
    }
ONE(write, (int file, const void *data, size_t length), (file, data, length))
ONE(pwrite, (int file, const void *data, size_t length, off_t at), (file, data, length, at))
ONE(pwrite64, (int file, const void *data, size_t length, off64_t at), (file, data, length, at))

/* Writes of several: half of them are taken, or half of the only one. */
#define MANY(name, before, after, synced) \
    ssize_t name before { \
        REAL(name); \
        if (synced && fails_at(SYNC, file)) { /* written, and not on the disk */ \
            after; \
            FAIL; \
        } \
        if (!fails_at(WRITE, file)) return after; \
        if (control->error) FAIL; \
        struct iovec half = {data->iov_base, data->iov_len - data->iov_len / 2}; \
        if (count > 1) { \
            count /= 2; \
            return after; \
        } \
        data = &half; \
        return after; \
    }
MANY(writev, (int file, const struct iovec *data, int count), real(file, data, count), 0)
MANY(pwritev, (int file, const struct iovec *data, int count, off_t at),
     real(file, data, count, at), 0)
MANY(pwritev64, (int file, const struct iovec *data, int count, off64_t at),
     real(file, data, count, at), 0)
MANY(pwritev2, (int file, const struct iovec *data, int count, off_t at, int flags),
     real(file, data, count, at, flags), (flags & RWF_DSYNC))
MANY(pwritev64v2, (int file, const struct iovec *data, int count, off64_t at, int flags),
     real(file, data, count, at, flags), (flags & RWF_DSYNC))

#define PLAIN(call, result, name, before, after) \
    result name before { \
        REAL(name); \
        if (fails_at(call, file)) FAIL; \
        return real after; \
    }
PLAIN(SYNC, int, fsync, (int file), (file))
PLAIN(SYNC, int, fdatasync, (int file), (file))
PLAIN(TRUNCATE, int, ftruncate, (int file, off_t length), (file, length))
PLAIN(TRUNCATE, int, ftruncate64, (int file, off64_t length), (file, length))

#define ALLOCATION(name, offset) \
    int name(int file, offset at, offset length) { \
        REAL(name); \
        return fails_at(ALLOCATE, file) ? control->error : real(file, at, length); \
    }
ALLOCATION(posix_fallocate, off_t)
ALLOCATION(posix_fallocate64, off64_t)

/* A path that is not absolute is one of the current folder, which is none of a test's. */
#define OPENING(name, before, last, after) \
    int name before { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, last); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (fails(OPEN, path)) FAIL; \
        return after; \
    }
OPENING(open, (const char *path, int flags, ...), flags, real(path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), flags, real(path, flags, mode))
OPENING(openat, (int folder, const char *path, int flags, ...), flags,
        real(folder, path, flags, mode))
OPENING(openat64, (int folder, const char *path, int flags, ...), flags,
        real(folder, path, flags, mode))

int rename(const char *path, const char *to) {
    REAL(rename);
    if (fails(RENAME, path) || fails(RENAME, to)) FAIL;
    return real(path, to);
}
