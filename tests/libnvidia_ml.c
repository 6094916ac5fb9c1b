/* A stand-in for NVIDIA's libnvidia-ml.so.1: it shows the machine that the text file in JAYRUN_TEST_GPUS describes, read
 * again at every call (see gpus.py, which writes it). A line for each thing, its fields separated by tabs; what a line
 * lacks is not supported, and `no.FUNCTION=CODE` makes a function of that device fail with NVML's code. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process_t;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci_t;

static int opened; /* how often */
static char text[65536];

static char *load(void) {
    const char *path = getenv("JAYRUN_TEST_GPUS");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[length] = 0;
    return text;
}

/* The number-th line that begins with word; the rest of it, in a buffer of its own. */
static char *line(const char *word, int number) {
    static char found[4096];
    size_t length = strlen(word);
    for (char *at = load(); at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
        if (!strncmp(at, word, length) && strchr("\t\n", at[length]) && number-- == 0) {
            snprintf(found, sizeof found, "%.*s", (int)strcspn(at, "\n"), at);
            return found;
        }
    return NULL;
}

static const char *field(const char *of, const char *name) {
    static char value[1024];
    size_t length = strlen(name);
    for (const char *at = of; at && (at = strchr(at, '\t'));)
        if (!strncmp(++at, name, length) && at[length] == '=') {
            snprintf(value, sizeof value, "%.*s", (int)strcspn(at + length + 1, "\t"), at + length + 1);
            return value;
        }
    return NULL;
}

/* Handles: 1, 2, ... are the lines of GPUs, 1001, ... those of slices. */
static char *device(void *handle) {
    long number = (long)handle;
    return number > 1000 ? line("slice", number - 1001) : line("gpu", number - 1);
}

static int lost(const char *of, const char *function) {
    char name[64];
    snprintf(name, sizeof name, "no.%s", function);
    const char *code = field(of, name);
    if (!code) code = field(of, "no.*");
    return code ? atoi(code) : OK;
}

static int number(void *handle, const char *function, const char *name, unsigned long long *value) {
    if (!opened) return UNINITIALIZED;
    char *of = device(handle);
    if (!of) return INVALID;
    int code = lost(of, function);
    if (code) return code;
    const char *found = field(of, name);
    if (!found) return NOT_SUPPORTED;
    *value = strtoull(found, NULL, 10);
    return OK;
}

static int words(void *handle, const char *function, const char *name, char *to, unsigned size) {
    if (!opened) return UNINITIALIZED;
    char *of = device(handle);
    if (!of) return INVALID;
    int code = lost(of, function);
    if (code) return code;
    const char *found = field(of, name);
    if (!found) return NOT_SUPPORTED;
    if (strlen(found) >= size) return TOO_SMALL;
    strcpy(to, found);
    return OK;
}

static int system_field(const char *name, char *to, unsigned size) {
    const char *found = field(line("system", 0), name);
    if (!opened) return UNINITIALIZED;
    if (!found) return NOT_SUPPORTED;
    snprintf(to, size, "%s", found);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    char *of = line("system", 0);
    if (!of) return NO_DRIVER;
    int code = lost(of, "init");
    if (!code) opened++;
    return code;
}
int nvmlShutdown(void) { return opened ? (opened--, OK) : UNINITIALIZED; }
const char *nvmlErrorString(int code) { (void)code; return "as the test says"; }

int nvmlSystemGetDriverVersion(char *to, unsigned size) { return system_field("driver", to, size); }
int nvmlSystemGetCudaDriverVersion(int *version) {
    char value[16];
    int code = system_field("cuda", value, sizeof value);
    if (!code) *version = atoi(value);
    return code;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!opened) return UNINITIALIZED;
    int code = lost(line("system", 0), "count");
    for (*count = 0; line("gpu", *count); ++*count) {}
    return code;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!opened) return UNINITIALIZED;
    char *of = line("gpu", index);
    if (!of) return INVALID;
    int code = lost(of, "handle");
    *handle = (void *)(long)(index + 1);
    return code;
}

int nvmlDeviceGetUUID(void *handle, char *to, unsigned size) { return words(handle, "uuid", "uuid", to, size); }
int nvmlDeviceGetName(void *handle, char *to, unsigned size) { return words(handle, "name", "name", to, size); }
int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    return words(handle, "pci", "bus", pci->bus_id, sizeof pci->bus_id);
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    int code = number(handle, "memory", "total", &memory->total);
    unsigned long long reserved = 0;
    if (code) return code;
    number(handle, "memory", "used", &memory->used);
    number(handle, "memory", "reserved", &reserved);
    memory->used += reserved;
    memory->free = memory->total - memory->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    int code = number(handle, "memory_v2", "reserved", &memory->reserved);
    if (!code) code = number(handle, "memory", "total", &memory->total);
    if (code) return code;
    number(handle, "memory", "used", &memory->used);
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    unsigned long long percent = 0;
    int code = number(handle, "utilization", "utilization", &percent);
    rates->gpu = percent;
    return code;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    unsigned long long slots = 0;
    int code = number(handle, "mig", "slots", &slots);
    *current = *pending = slots > 0;
    return code;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    unsigned long long slots = 0;
    int code = number(handle, "mig", "slots", &slots);
    *count = slots;
    return code;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned slot, void **part) {
    char *of;
    const char *value;
    if (!opened) return UNINITIALIZED;
    for (int at = 0; (of = line("slice", at)); at++) {
        if (!(value = field(of, "gpu")) || atol(value) != (long)handle - 1) continue;
        if (!(value = field(of, "slot")) || atoi(value) != (int)slot) continue;
        *part = (void *)(long)(1001 + at);
        return OK;
    }
    return NOT_FOUND;
}

static int processes(void *handle, const char *type, unsigned *count, process_t *to) {
    char key[32], *of;
    unsigned found = 0, room = *count;
    if (!opened) return UNINITIALIZED;
    if (!(of = device(handle))) return INVALID;
    int code = lost(of, "processes");
    if (code) return code;
    if ((long)handle > 1000) snprintf(key, sizeof key, "s%ld", (long)handle - 1001);
    else snprintf(key, sizeof key, "%ld", (long)handle - 1);
    for (int at = 0; (of = line("process", at)); at++) {
        const char *value = field(of, "on");
        if (!value || strcmp(value, key)) continue;
        if (!(value = field(of, "type")) || strcmp(value, type)) continue;
        if (found < room && to) {
            memset(&to[found], 0, sizeof *to);
            to[found].pid = atoi(field(of, "pid"));
            value = field(of, "used");
            to[found].used = value ? strtoull(value, NULL, 10) : ~0ULL;
        }
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *to) {
    return processes(handle, "compute", count, to);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process_t *to) {
    return processes(handle, "graphics", count, to);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *to) {
    return processes(handle, "mps", count, to);
}

static int linked(void *one, void *other, const char *name, int *value) {
    char *of;
    const char *found;
    long a = (long)one - 1, b = (long)other - 1;
    if (!opened) return UNINITIALIZED;
    for (int at = 0; (of = line("link", at)); at++) {
        if (!(found = field(of, "one")) || atol(found) != (a < b ? a : b)) continue;
        if (!(found = field(of, "other")) || atol(found) != (a < b ? b : a)) continue;
        if (!(found = field(of, name))) return NOT_SUPPORTED;
        *value = atoi(found);
        return OK;
    }
    return NOT_SUPPORTED;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) {
    return index == 2 ? linked(one, other, "nvlink", status) : NOT_SUPPORTED;
}
int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level) {
    return linked(one, other, "level", level);
}
