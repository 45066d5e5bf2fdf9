/* Faults below Python, by LD_PRELOAD: a file operation fails or is the last one of its process; the clock jumps.

   FAULT_PATH     prefix of the paths that count, or with a $ at its end the path itself
   FAULT_OP       "change" (create, write, sync, rename, mkdir, unlink, link), "read", or one of those words
   FAULT_AT       the number of the operation, from 1
   FAULT_TIMES    how many operations from there on fail (default 1)
   FAULT_WITH     "kill", or an error number
   FAULT_RANK     process id of the job that fails (default all)
   FAULT_ONCE     a file, written when the fault happens; where it exists, nothing happens
   FAULT_COUNT    a file that gets the count of operations at exit
   FAULT_CLOCK    a file that holds an int64: seconds that the wall clock is ahead
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define FDS 65536
static const char *prefix, *op, *with, *once, *counter;
static long at, times = 1;
static atomic_long count;
static atomic_uchar tracked[FDS];
static volatile int64_t *ahead;
static int active;
static pid_t owner;

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int right_rank(void) {
    const char *rank = getenv("FAULT_RANK");
    static char line[65536];
    if (!rank) return 1;
    FILE *f = fopen("/proc/self/cmdline", "r");
    if (!f) return 0;
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    for (size_t i = 0; i < n; i += strlen(line + i) + 1)
        if (!strcmp(line + i, "--process-id")) return !strcmp(line + i + strlen(line + i) + 1, rank);
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *clock = getenv("FAULT_CLOCK");
    if (clock) {
        int fd = open(clock, O_RDONLY);
        if (fd >= 0) ahead = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
        if (ahead == MAP_FAILED) ahead = NULL;
        if (fd >= 0) close(fd);
    }
    prefix = getenv("FAULT_PATH"); op = getenv("FAULT_OP"); with = getenv("FAULT_WITH"); once = getenv("FAULT_ONCE");
    counter = getenv("FAULT_COUNT");
    if (getenv("FAULT_AT")) at = atol(getenv("FAULT_AT"));
    if (getenv("FAULT_TIMES")) times = atol(getenv("FAULT_TIMES"));
    owner = getpid();
    active = prefix && op && right_rank() && !(once && !access(once, F_OK));
}

__attribute__((destructor)) static void end(void) {
    if (!active || !counter || !count || getpid() != owner) return;
    FILE *f = fopen(counter, "w");
    if (f) { fprintf(f, "%ld", (long)count); fclose(f); }
}

/* The error number that this operation fails with, 0 for none. */
static int fault(const char *kind, int change) {
    if (!active || getpid() != owner) return 0;
    if (strcmp(op, kind) && strcmp(op, change ? "change" : "none")) return 0;
    long now = atomic_fetch_add(&count, 1) + 1;
    if (!with || !at || now < at || now >= at + times) return 0;
    if (once && now == at) {
        int was = active;
        active = 0;
        int fd = open(once, O_WRONLY | O_CREAT, 0644);
        struct timeval t;
        gettimeofday(&t, NULL);
        if (fd >= 0) { dprintf(fd, "{\"time\": %ld.%06ld, \"pid\": %d}", (long)t.tv_sec, (long)t.tv_usec, getpid()); close(fd); }
        active = was;
    }
    if (!strcmp(with, "kill")) { kill(getpid(), SIGKILL); pause(); }
    return atoi(with);
}

static int inside(int dir, const char *path) {
    if (!active || !path) return 0;
    size_t size = strlen(prefix);
    if (prefix[size - 1] == '$') return strlen(path) == size - 1 && !strncmp(path, prefix, size - 1);
    if (path[0] == '/') return !strncmp(path, prefix, size);
    char link[64], base[PATH_MAX];
    if (dir == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
    }
    return !strncmp(base, prefix, size);
}

static int inside_fd(int fd) { return active && fd >= 0 && fd < FDS && tracked[fd]; }
static int track(int fd, int yes) { if (fd >= 0 && fd < FDS) tracked[fd] = yes; return fd; }
#define FAIL(value) do { int e_ = (value); if (e_) { errno = e_; return -1; } } while (0)

#define OPEN(name, params, dir, ...) \
int name params { \
    REAL(name); \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); } \
    int in = inside(dir, path); \
    if (in && (flags & O_CREAT)) FAIL(fault("create", 1)); \
    if (in && !(flags & O_CREAT) && (flags & O_ACCMODE) == O_RDONLY) FAIL(fault("open", 0)); \
    return track(real(__VA_ARGS__, mode), in); \
}
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, flags)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, flags)
OPEN(openat, (int dirfd, const char *path, int flags, ...), dirfd, dirfd, path, flags)
OPEN(openat64, (int dirfd, const char *path, int flags, ...), dirfd, dirfd, path, flags)

int close(int fd) { REAL(close); if (fd >= 0 && fd < FDS) tracked[fd] = 0; return real(fd); }
ssize_t write(int fd, const void *b, size_t n) { REAL(write); if (inside_fd(fd)) FAIL(fault("write", 1)); return real(fd, b, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { REAL(pwrite); if (inside_fd(fd)) FAIL(fault("write", 1)); return real(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { REAL(pwrite64); if (inside_fd(fd)) FAIL(fault("write", 1)); return real(fd, b, n, o); }
ssize_t read(int fd, void *b, size_t n) { REAL(read); if (inside_fd(fd)) FAIL(fault("read", 0)); return real(fd, b, n); }
ssize_t pread(int fd, void *b, size_t n, off_t o) { REAL(pread); if (inside_fd(fd)) FAIL(fault("read", 0)); return real(fd, b, n, o); }
ssize_t pread64(int fd, void *b, size_t n, off64_t o) { REAL(pread64); if (inside_fd(fd)) FAIL(fault("read", 0)); return real(fd, b, n, o); }
int fsync(int fd) { REAL(fsync); if (inside_fd(fd)) FAIL(fault("sync", 1)); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); if (inside_fd(fd)) FAIL(fault("sync", 1)); return real(fd); }
int rename(const char *a, const char *b) { REAL(rename); if (inside(AT_FDCWD, b)) FAIL(fault("rename", 1)); return real(a, b); }
int renameat(int d, const char *a, int e, const char *b) { REAL(renameat); if (inside(e, b)) FAIL(fault("rename", 1)); return real(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { REAL(renameat2); if (inside(e, b)) FAIL(fault("rename", 1)); return real(d, a, e, b, f); }
int mkdir(const char *p, mode_t m) { REAL(mkdir); if (inside(AT_FDCWD, p)) FAIL(fault("mkdir", 1)); return real(p, m); }
int mkdirat(int d, const char *p, mode_t m) { REAL(mkdirat); if (inside(d, p)) FAIL(fault("mkdir", 1)); return real(d, p, m); }
int unlink(const char *p) { REAL(unlink); if (inside(AT_FDCWD, p)) FAIL(fault("unlink", 1)); return real(p); }
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); if (inside(d, p)) FAIL(fault("unlink", 1)); return real(d, p, f); }
int rmdir(const char *p) { REAL(rmdir); if (inside(AT_FDCWD, p)) FAIL(fault("unlink", 1)); return real(p); }
int link(const char *a, const char *b) { REAL(link); if (inside(AT_FDCWD, b)) FAIL(fault("link", 1)); return real(a, b); }

int clock_gettime(clockid_t id, struct timespec *t) {
    REAL(clock_gettime);
    int out = real(id, t);
    if (!out && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += *ahead;
    return out;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    REAL(gettimeofday);
    int out = real(t, zone);
    if (!out && ahead) t->tv_sec += *ahead;
    return out;
}
time_t time(time_t *where) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (where) *where = t.tv_sec;
    return t.tv_sec;
}
