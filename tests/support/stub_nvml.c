/* A libnvidia-ml.so.1 without a driver, so that tests go the real way: loader, ctypes, pynvml, errors, hangs.
 *
 * STUB_GPUS=N            how many GPUs (default 2, at most 8), at the addresses of a DGX H100
 * STUB_ERRORS=CALL[@INDEX]=NUMBER,...   this C function returns NUMBER (for that GPU); "*" is every question to a
 *                        GPU but those that NVML answers from memory: "*@1=15" is a GPU that is lost
 * STUB_VALUES=NAME[@INDEX]=NUMBER,...   what a GPU says instead of what it says without: temperature, fabric (its
 *                        state), fabric_health, virtualization, linkN (1 active, 0 not, -1 nothing is told of it);
 *                        cluster (first byte of the UUID), clique, peer_type (default -1: no platform), c2c (number of
 *                        links), repair_channel, repair_tpc; answers: so many
 *                        questions since nvmlInit it answers, and then it is lost
 * STUB_VALUES=event_xid[@INDEX]=XID, event_bit[@INDEX]=BIT, event_goe[@INDEX]=XID (0: none) once for each event set: an
 *                        event bit, and a GPU Operational Event
 * STUB_HANG_CALL=CALL, STUB_HANG_PATH=FILE   this function appends to FILE before it answers: on a frozen file
 *                        system (fsfreeze) it waits in D state
 * STUB_HANG_CALL=CALL, STUB_HANG_SECONDS=N   it sleeps before it answers
 *
 * -DMINIMAL: a driver so old (or so broken) that most symbols are not there.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25 };
enum { LINKS = 18 };

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType, nvmlReturn;
    union {
        double d;
        unsigned int ui;
        unsigned long long ull;
        int si;
    } value;
} FieldValue;

static const unsigned int BUSES[8] = {0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf};
static int devices[8];
static int answered[8];

static int index_of(const void *device) { return (int)((const int *)device - devices); }

static void hang(const char *call) {
    const char *path = getenv("STUB_HANG_PATH"), *wanted = getenv("STUB_HANG_CALL");
    const char *seconds = getenv("STUB_HANG_SECONDS");
    if (!wanted || strcmp(call, wanted) != 0) return;
    if (seconds) sleep((unsigned int)atoi(seconds));
    if (!path) return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0) return;
    if (write(fd, "x", 1) != 1) perror(path);
    close(fd);
}

/* The number that a variable has for this name and this GPU (index -1: no GPU), else `otherwise`. */
static int number_of(const char *variable, const char *wanted, int index, int star, int otherwise) {
    const char *entry = getenv(variable);
    while (entry && *entry) {
        char name[64] = "";
        int at = -1, number = 0;
        if (sscanf(entry, "%63[^@=]@%d=%d", name, &at, &number) == 3 ||
            sscanf(entry, "%63[^@=]=%d", name, &number) == 2) {
            int meant = strcmp(name, wanted) == 0 || (star && strcmp(name, "*") == 0);
            if (meant && (at < 0 || at == index)) return number;
        }
        entry = strchr(entry, ',');
        if (entry) entry++;
    }
    return otherwise;
}

/* The error of this call. `star`: it is a question that the GPU itself must answer. */
static int error_of(const char *call, int index, int star) {
    int error = number_of("STUB_ERRORS", call, index, star, 0);
    int most = star && !error ? number_of("STUB_VALUES", "answers", index, 0, -1) : -1;
    return most >= 0 && answered[index]++ >= most ? GPU_IS_LOST : error;
}

#ifndef MINIMAL
static int value_of(const char *name, int index, int otherwise) {
    return number_of("STUB_VALUES", name, index, 0, otherwise);
}

/* 1 active, 0 not, -1 nothing is told of it. */
static int link_state(int index, unsigned int link) {
    char name[16];
    snprintf(name, sizeof name, "link%u", link);
    return value_of(name, index, link != 5);
}
#endif

#define ENTER_AS(index, star)                              \
    do {                                                   \
        hang(__func__);                                    \
        int error_ = error_of(__func__, (int)(index), star); \
        if (error_) return error_;                         \
    } while (0)
#define ENTER_LIBRARY() ENTER_AS(-1, 0)
#define ENTER_KNOWN(index) ENTER_AS(index, 0) /* answered from memory */
#define ENTER_GPU(device) ENTER_AS(index_of(device), 1)

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    ENTER_LIBRARY();
    memset(answered, 0, sizeof answered);
    return SUCCESS;
}

int nvmlShutdown(void) {
    ENTER_LIBRARY();
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER_LIBRARY();
    const char *gpus = getenv("STUB_GPUS");
    *count = gpus ? (unsigned int)atoi(gpus) : 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    ENTER_KNOWN((int)index);
    if (index >= 8) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    unsigned int domain, bus;
    if (sscanf(address, "%x:%x:", &domain, &bus) != 2) return INVALID_ARGUMENT;
    for (int index = 0; index < 8; index++) {
        if (BUSES[index] != bus) continue;
        ENTER_KNOWN(index);
        *device = &devices[index];
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetPciInfo_v3(void *device, PciInfo *info) {
    ENTER_KNOWN(index_of(device));
    memset(info, 0, sizeof *info);
    info->bus = BUSES[index_of(device)];
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus);
    return SUCCESS;
}

#ifndef MINIMAL

static int text(char *to, unsigned int size, const char *from) {
    if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    ENTER_LIBRARY();
    return text(version, size, "999.99.99");
}

int nvmlDeviceGetName(void *device, char *name, unsigned int size) {
    ENTER_KNOWN(index_of(device));
    return text(name, size, getenv("STUB_NAME") ? getenv("STUB_NAME") : "Stub GPU");
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int size) {
    char value[64];
    ENTER_KNOWN(index_of(device));
    snprintf(value, sizeof value, "GPU-%08x-0000-4000-8000-000000000000", index_of(device));
    return text(uuid, size, value);
}

int nvmlDeviceGetSerial(void *device, char *serial, unsigned int size) {
    char value[64];
    ENTER_GPU(device);
    snprintf(value, sizeof value, "16500000000%02d", index_of(device));
    return text(serial, size, value);
}

int nvmlDeviceGetGpuUptime_v1(void *device, unsigned int *uptime) {
    ENTER_GPU(device);
    *uptime = (unsigned int)value_of("uptime", index_of(device), 3600);
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(void *device, unsigned int *minor) {
    ENTER_KNOWN(index_of(device));
    *minor = 7 - index_of(device);
    return SUCCESS;
}

int nvmlDeviceGetVbiosVersion(void *device, char *version, unsigned int size) {
    ENTER_GPU(device);
    return text(version, size, "96.00.99.00.01");
}

int nvmlDeviceGetTemperature(void *device, unsigned int sensor, unsigned int *celsius) {
    ENTER_GPU(device);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = (unsigned int)value_of("temperature", index_of(device), 29);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
    ENTER_GPU(device);
    *current = 0, *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *count) {
    ENTER_GPU(device);
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned int index, void **mig) {
    ENTER_GPU(device);
    if (index != 1 && index != 4) return NOT_FOUND; /* holes */
    *mig = device;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(void *device, unsigned int threshold, unsigned int *celsius) {
    ENTER_GPU(device);
    *celsius = 90 + threshold;
    return SUCCESS;
}

typedef struct {
    unsigned int version;
    int margin;
} MarginTemperature;

int nvmlDeviceGetMarginTemperature(void *device, MarginTemperature *margin) {
    ENTER_GPU(device);
    if (margin->version != (sizeof *margin | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    margin->margin = -3;
    return SUCCESS;
}

typedef struct {
    unsigned int gpu, memory;
} Utilization;

int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    ENTER_GPU(device);
    rates->gpu = 40, rates->memory = 7;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    ENTER_GPU(device);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetVirtualizationMode(void *device, unsigned int *mode) {
    ENTER_GPU(device);
    *mode = (unsigned int)value_of("virtualization", index_of(device), 0);
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *device, unsigned int *mode) {
    ENTER_GPU(device);
    *mode = 1;
    return SUCCESS;
}

int nvmlDeviceValidateInforom(void *device) {
    ENTER_GPU(device);
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) {
    ENTER_GPU(device);
    *milliwatts = 650500;
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned int *milliwatts) {
    ENTER_GPU(device);
    *milliwatts = 700000;
    return SUCCESS;
}

/* More than 32 bits, so that a wrong type shows. */
int nvmlDeviceGetClockInfo(void *device, unsigned int type, unsigned int *megahertz) {
    ENTER_GPU(device);
    if (type != 1) return NOT_SUPPORTED;
    *megahertz = 1980;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    ENTER_GPU(device);
    *reasons = 0x48 | 1ull << 40;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    ENTER_GPU(device);
    *reasons = 0x80;
    return SUCCESS;
}

typedef struct {
    unsigned int pid;
    unsigned long long memory;
    unsigned int gpuInstance, computeInstance;
} Process;

static int processes(unsigned int *count, Process *found, unsigned int first) {
    if (*count < 2) {
        *count = 2;
        return INSUFFICIENT_SIZE;
    }
    *count = 2;
    for (unsigned int i = 0; i < 2; i++) found[i] = (Process){first + i, 1u << 20, 0xffffffff, 0xffffffff};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *found) {
    ENTER_GPU(device);
    return processes(count, found, 4000);
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned int *count, Process *found) {
    ENTER_GPU(device);
    return processes(count, found, 5000);
}

static int pages(unsigned int *count, unsigned long long *addresses, unsigned int retired) {
    if (*count < retired) {
        *count = retired;
        return INSUFFICIENT_SIZE;
    }
    *count = retired;
    for (unsigned int i = 0; i < retired; i++) addresses[i] = 1ull << (33 + i);
    return SUCCESS;
}

int nvmlDeviceGetRetiredPages(void *device, unsigned int cause, unsigned int *count, unsigned long long *addresses) {
    ENTER_GPU(device);
    return pages(count, addresses, cause == 1 ? 1 : 2);
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned int *pending) {
    ENTER_GPU(device);
    *pending = 1;
    return SUCCESS;
}

/* STUB_FABRIC=N: the newest version of the structure that this driver knows (default 3). */
typedef struct {
    unsigned int version;
    unsigned char uuid[16];
    unsigned int status, clique, state, health;
    unsigned char summary;
} Fabric;

static unsigned int newest_fabric(void) { return getenv("STUB_FABRIC") ? (unsigned int)atoi(getenv("STUB_FABRIC")) : 3; }

int nvmlDeviceGetGpuFabricInfoV(void *device, Fabric *fabric) {
    ENTER_GPU(device);
    unsigned int version = fabric->version >> 24, size = version == 3 ? sizeof *fabric : 36;
    if (version > newest_fabric() || fabric->version != (size | version << 24)) return ARGUMENT_VERSION_MISMATCH;
    fabric->status = 0, fabric->state = (unsigned int)value_of("fabric", index_of(device), 3);
    fabric->health = (unsigned int)value_of("fabric_health", index_of(device), 0x155);
    fabric->uuid[0] = (unsigned char)value_of("cluster", index_of(device), 0);
    fabric->clique = (unsigned int)value_of("clique", index_of(device), 0);
    if (version == 3) fabric->summary = 1;
    return SUCCESS;
}

typedef struct {
    unsigned char uuid[16];
    unsigned int status, clique, state;
} OldFabric;

int nvmlDeviceGetGpuFabricInfo(void *device, OldFabric *fabric) {
    ENTER_GPU(device);
    fabric->status = 0, fabric->state = 2;
    return SUCCESS;
}

/* STUB_FABRIC=4: a driver with the newest call too. */
typedef struct {
    unsigned char uuid[16];
    unsigned int status;
    struct {
        unsigned char type;
        unsigned int id;
    } cliques[64];
    unsigned int count;
    unsigned char state;
    unsigned int health;
    unsigned char summary;
} NewFabric;

int nvmlDeviceGetGpuFabricInfo_v4(void *device, NewFabric *fabric) {
    ENTER_GPU(device);
    if (newest_fabric() < 4) return FUNCTION_NOT_FOUND;
    fabric->status = 0, fabric->state = (unsigned char)value_of("fabric", index_of(device), 3);
    fabric->health = (unsigned int)value_of("fabric_health", index_of(device), 0x155);
    fabric->uuid[0] = (unsigned char)value_of("cluster", index_of(device), 0);
    fabric->cliques[0].type = 0, fabric->cliques[0].id = (unsigned int)value_of("clique", index_of(device), 0);
    fabric->cliques[1].type = 1, fabric->cliques[1].id = 77;
    fabric->count = 2, fabric->summary = 1;
    return SUCCESS;
}

/* STUB_VALUES c2c_enabled: default -1, no such mode. */
typedef struct {
    unsigned int enabled;
} C2cMode;

int nvmlDeviceGetC2cModeInfoV(void *device, C2cMode *mode) {
    ENTER_GPU(device);
    int enabled = value_of("c2c_enabled", index_of(device), -1);
    if (enabled < 0) return NOT_SUPPORTED;
    mode->enabled = (unsigned int)enabled;
    return SUCCESS;
}

typedef struct {
    unsigned int version;
    unsigned char ibGuid[16], serial[16], slot, tray, host, peerType, module;
} Platform;

int nvmlDeviceGetPlatformInfo(void *device, Platform *platform) {
    ENTER_GPU(device);
    if (platform->version != (sizeof *platform | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    int peer = value_of("peer_type", index_of(device), -1);
    if (peer < 0) return NOT_SUPPORTED;
    platform->peerType = (unsigned char)peer;
    snprintf((char *)platform->serial, sizeof platform->serial, "1820000000001");
    platform->slot = 14, platform->tray = 4, platform->host = 1;
    platform->module = (unsigned char)(index_of(device) + 1);
    return SUCCESS;
}

typedef struct {
    unsigned int version, channel, tpc;
} RepairStatus;

int nvmlDeviceGetRepairStatus(void *device, RepairStatus *status) {
    ENTER_GPU(device);
    if (status->version != (sizeof *status | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    status->channel = (unsigned int)value_of("repair_channel", index_of(device), 0);
    status->tpc = (unsigned int)value_of("repair_tpc", index_of(device), 0);
    return SUCCESS;
}

int nvmlDeviceGetEccMode(void *device, unsigned int *current, unsigned int *pending) {
    ENTER_GPU(device);
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetDefaultEccMode(void *device, unsigned int *mode) {
    ENTER_GPU(device);
    *mode = 1;
    return SUCCESS;
}

/* Each counter shows which was asked for: 1 + error + 2 * counter (+ 100 * location). */
int nvmlDeviceGetTotalEccErrors(void *device, unsigned int error, unsigned int counter,
                                unsigned long long *count) {
    ENTER_GPU(device);
    *count = 1 + error + 2 * counter;
    return SUCCESS;
}

int nvmlDeviceGetMemoryErrorCounter(void *device, unsigned int error, unsigned int counter,
                                    unsigned int location, unsigned long long *count) {
    ENTER_GPU(device);
    if (location != 2 && location != 7) return NOT_SUPPORTED;
    *count = 1 + error + 2 * counter + 100 * location;
    return SUCCESS;
}

typedef struct {
    unsigned int version;
    unsigned long long counters[11];
    unsigned int thresholdExceeded;
} SramStatus;

int nvmlDeviceGetSramEccErrorStatus(void *device, SramStatus *status) {
    ENTER_GPU(device);
    if (status->version != (sizeof *status | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    status->thresholdExceeded = 1;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *pending, unsigned int *failure) {
    ENTER_GPU(device);
    *corrected = 3, *uncorrected = 4, *pending = 1, *failure = 0;
    return SUCCESS;
}

typedef struct {
    unsigned int version, unrepairable;
} UnrepairableMemory;

int nvmlDeviceGetUnrepairableMemoryFlag_v1(void *device, UnrepairableMemory *memory) {
    ENTER_GPU(device);
    if (memory->version != (sizeof *memory | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->unrepairable = 1;
    return SUCCESS;
}

int nvmlDeviceGetRowRemapperHistogram(void *device, unsigned int *banks) {
    ENTER_GPU(device);
    for (unsigned int i = 0; i < 5; i++) banks[i] = 10 + i;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned int link, unsigned int *active) {
    ENTER_GPU(device);
    if (link >= LINKS) return INVALID_ARGUMENT;
    int state = link_state(index_of(device), link);
    if (state < 0) return NOT_SUPPORTED;
    *active = (unsigned int)state;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned int link, unsigned int counter,
                                    unsigned long long *count) {
    ENTER_GPU(device);
    if (link >= 12 || counter > 3) return INVALID_ARGUMENT;
    *count = 1000 * (counter + 1) + link;
    return SUCCESS;
}

/* STUB_FIELDS=off: each value is not supported, as for a driver that does not know the ids; blackwell: the fields of
 * NVLink 5 instead of Hopper's. */
static int blackwell(void) { return getenv("STUB_FIELDS") && strcmp(getenv("STUB_FIELDS"), "blackwell") == 0; }

int nvmlDeviceGetFieldValues(void *device, int count, FieldValue *values) {
    ENTER_GPU(device);
    const char *fields = getenv("STUB_FIELDS");
    for (int i = 0; i < count; i++) {
        FieldValue *v = &values[i];
        v->nvmlReturn = NOT_SUPPORTED;
        if (fields && strcmp(fields, "off") == 0) continue;
        memset(&v->value, 0xff, sizeof v->value); /* the rest of the union is not the value */
        if (v->fieldId == 82 || v->fieldId == 91 || v->fieldId == 230) {
            v->nvmlReturn = SUCCESS;
            v->valueType = 1;
            v->value.ui = v->fieldId == 82 ? 37 : v->fieldId == 91 ? LINKS : 4;
        } else if (v->fieldId == 194) {
            v->nvmlReturn = SUCCESS;
            v->valueType = 5;
            v->value.si = -2;
        } else if (v->fieldId == 138 || v->fieldId == 139 || v->fieldId == 83) {
            v->nvmlReturn = v->fieldId == 83 || v->scopeId == 0xffffffff ? SUCCESS : NOT_SUPPORTED;
            v->valueType = 3;
            v->value.ull = v->fieldId + (1ull << 40);
        } else if (v->fieldId == 197 || v->fieldId == 198) {
            v->nvmlReturn = SUCCESS;
            v->valueType = getenv("STUB_NARROW") ? 1 : 3;
            v->value.ull = v->fieldId;
        } else if (v->fieldId == 270 || v->fieldId == 271) {
            v->nvmlReturn = SUCCESS;
            v->valueType = 3;
            v->value.ull = (v->fieldId - 265) * 1500000000ull;
        } else if (blackwell() && ((v->fieldId >= 206 && v->fieldId <= 215) || v->fieldId == 220 || v->fieldId == 222)) {
            v->nvmlReturn = v->scopeId < LINKS ? SUCCESS : INVALID_ARGUMENT;
            v->valueType = 3;
            v->value.ull = v->fieldId == 220 ? 0x305 : v->fieldId == 222 ? 0xfff : v->fieldId + (1ull << 40);
        } else if (v->fieldId == 165) {
            int state = link_state(index_of(device), v->scopeId);
            v->nvmlReturn = v->scopeId >= LINKS ? INVALID_ARGUMENT : state < 0 ? NOT_SUPPORTED : SUCCESS;
            v->valueType = 1;
            v->value.ui = (unsigned int)state;
        } else if (v->fieldId == 164) {
            v->nvmlReturn = v->scopeId < LINKS ? SUCCESS : INVALID_ARGUMENT;
            v->valueType = 1;
            v->value.ui = blackwell() ? 53125 : 26562;
        } else if (v->fieldId == 170 || v->fieldId == 171 || (v->fieldId >= 231 && v->fieldId <= 234)) {
            unsigned int links = (unsigned int)value_of("c2c", index_of(device), 0);
            v->nvmlReturn = !links ? NOT_SUPPORTED : v->fieldId == 170 || v->scopeId < links ? SUCCESS : INVALID_ARGUMENT;
            v->valueType = 1;
            v->value.ui = v->fieldId == 170 ? links : v->fieldId == 171 ? 1 : v->fieldId - 231 + 10 * v->scopeId;
        } else if (blackwell()) {
            continue;
        } else if (v->fieldId >= 161 && v->fieldId <= 163) {
            v->nvmlReturn = v->scopeId < LINKS ? SUCCESS : INVALID_ARGUMENT;
            v->valueType = 3;
            v->value.ull = v->fieldId + (1ull << 40) * v->scopeId;
        }
        char name[32];
        snprintf(name, sizeof name, "field%u", v->fieldId);
        int error = error_of(name, index_of(device), 0);
        if (error) v->nvmlReturn = (unsigned int)error;
    }
    return SUCCESS;
}

int nvmlDeviceGetPcieReplayCounter(void *device, unsigned int *value) {
    ENTER_GPU(device);
    *value = 150;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned int *value) {
    ENTER_GPU(device);
    *value = 1;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned int *value) {
    ENTER_GPU(device);
    *value = 8;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned int *value) {
    ENTER_GPU(device);
    *value = 5;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned int *value) {
    ENTER_GPU(device);
    *value = 16;
    return SUCCESS;
}


/* Events. The structures are those of nvml.h in CUDA 13.5, as nvidia-ml-py 13.615 has them. */
typedef struct {
    void *device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} EventData;

typedef struct {
    unsigned int timeoutMs, dataType;
    char uuid[96];
    char sourceModule[16];
    unsigned long long eventType, eventData, groupCursor, instanceId, timestampUsec, traceId;
    unsigned int gpuInstanceId, computeInstanceId, severity, categoryId, moduleEventCode, scope, originator;
    unsigned int moduleInstance, chipletId, logLevel, attributes, groupCperSize, groupAttributes;
    unsigned char groupSize, groupIndex;
} EventWait3;

typedef struct {
    char uuid[96];
    unsigned int minLogLevel, minSeverity;
} OperationalConfig;

typedef struct {
    unsigned int index, type, sourceType, dataSize;
    unsigned short dataFormatVersion;
} ContextInfo;

enum { TIMEOUT = 10, EVENT_XID = 8, SEVERITY_FATAL = 40, ATTR_PRIMARY = 1 << 5, LOG_NOTICE = 30 };
static struct {
    unsigned long long masks[8];
    int operational[8], told[8][3], last_xid;
} event_set;

int nvmlEventSetCreate(void **set) {
    ENTER_LIBRARY();
    memset(&event_set, 0, sizeof event_set);
    *set = &event_set;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) {
    ENTER_LIBRARY();
    return set == &event_set ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    ENTER_GPU(device);
    *types = 0xFFFF;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    ENTER_GPU(device);
    if (set != &event_set || !types) return INVALID_ARGUMENT;
    event_set.masks[index_of(device)] = types;
    return SUCCESS;
}

int nvmlEventSetRegisterGpuOperationalEvents_v1(void *set, OperationalConfig *config) {
    unsigned int index;
    ENTER_LIBRARY();
    if (set != &event_set || config->minLogLevel != LOG_NOTICE || config->minSeverity) return INVALID_ARGUMENT;
    if (sscanf(config->uuid, "GPU-%x-", &index) != 1 || index >= 8) return NOT_FOUND;
    event_set.operational[index] = 1;
    return SUCCESS;
}

/* The next event that was not told: its GPU, or -1. `kind`: 0 Xid, 1 bit, 2 operational. */
static int next_event(int kinds, int *kind, int *value) {
    static const char *const names[3] = {"event_xid", "event_bit", "event_goe"};
    for (int index = 0; index < 8; index++)
        for (*kind = 0; *kind < kinds; ++*kind) {
            int wanted = *kind == 2 ? event_set.operational[index] : event_set.masks[index] != 0;
            *value = value_of(names[*kind], index, -1);
            if (wanted && *value >= 0 && !event_set.told[index][*kind]++) return index;
        }
    return -1;
}

int nvmlEventSetWait_v2(void *set, EventData *data, unsigned int milliseconds) {
    int kind, value;
    ENTER_LIBRARY();
    int index = set == &event_set ? next_event(2, &kind, &value) : -1;
    if (index < 0) return usleep(1000 * milliseconds), TIMEOUT;
    data->device = &devices[index];
    data->eventType = kind ? (unsigned int)value : EVENT_XID;
    data->eventData = kind ? 0 : (unsigned int)value;
    return SUCCESS;
}

int nvmlEventSetWait_v3(void *set, EventWait3 *data) {
    int kind, value;
    ENTER_LIBRARY();
    int index = set == &event_set ? next_event(3, &kind, &value) : -1;
    if (index < 0) return usleep(1000 * data->timeoutMs), TIMEOUT;
    snprintf(data->uuid, sizeof data->uuid, "GPU-%08x-0000-4000-8000-000000000000", index);
    data->dataType = kind == 2;
    if (kind < 2) {
        data->eventType = kind ? (unsigned int)value : EVENT_XID;
        data->eventData = kind ? 0 : (unsigned int)value;
        return SUCCESS;
    }
    memcpy(data->sourceModule, "GPU-MODULE-OF-16", 16); /* no zero at its end */
    data->severity = SEVERITY_FATAL, data->attributes = ATTR_PRIMARY, data->moduleEventCode = 7;
    event_set.last_xid = value;
    return SUCCESS;
}

int nvmlEventSetGetContextCount_v1(void *set, unsigned int *count) {
    ENTER_LIBRARY();
    *count = set == &event_set ? 2 : 0;
    return SUCCESS;
}

int nvmlEventSetGetContextInfo_v1(void *set, ContextInfo *info) {
    ENTER_LIBRARY();
    if (set != &event_set || info->index > 1) return INVALID_ARGUMENT;
    info->type = info->index == 1 && event_set.last_xid;
    return SUCCESS;
}

int nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(void *set, unsigned int *index_and_xid) {
    ENTER_LIBRARY();
    if (set != &event_set || index_and_xid[0] != 1) return INVALID_ARGUMENT;
    index_and_xid[1] = (unsigned int)event_set.last_xid;
    return SUCCESS;
}

#endif
