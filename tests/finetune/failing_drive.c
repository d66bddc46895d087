/* A drive on which reading and writing fail: with the error number DRIVE_ERROR, in paths that have DRIVE_FAILS.
   cc -shared -fPIC -o failing_drive.so failing_drive.c, then LD_PRELOAD=./failing_drive.so */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(int file) {
  const char *part = getenv("DRIVE_FAILS"), *number = getenv("DRIVE_ERROR");
  char link[40], path[4096] = "";
  if (!part || !number || file < 3) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  if (readlink(link, path, sizeof path - 1) < 1 || !strstr(path, part)) return 0;
  errno = atoi(number);
  return 1;
}

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

ssize_t write(int file, const void *bytes, size_t size) {
  return fails(file) ? -1 : REAL(ssize_t, "write", int, const void *, size_t)(file, bytes, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  return fails(file) ? -1 : REAL(ssize_t, "writev", int, const struct iovec *, int)(file, parts, count);
}

ssize_t read(int file, void *bytes, size_t size) {
  return fails(file) ? -1 : REAL(ssize_t, "read", int, void *, size_t)(file, bytes, size);
}

int ftruncate(int file, off_t size) {
  return size && fails(file) ? -1 : REAL(int, "ftruncate", int, off_t)(file, size);
}

int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

int fsync(int file) { return fails(file) ? -1 : REAL(int, "fsync", int)(file); }
