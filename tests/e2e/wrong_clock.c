// Preloaded: the wall clock is wrong by as many seconds as the file $WRONG_CLOCK says, from one call to the next.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    const char *path = getenv("WRONG_CLOCK");
    if (status == 0 && id == CLOCK_REALTIME && path) {
        char text[32] = "";
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0 && read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
        if (file >= 0) close(file);
    }
    return status;
}
