/* A stand-in for NVIDIA's management library: what pynvml asks for, answered from the text file named by FAKE_NVML.

   driver 580.159.03
   gpu GPU-aaaa NVIDIA_H200 143771 500 0 -            uuid, name, total MiB, MiB in use without anybody, decay_s, flags
   holder 0 /tmp/pids 40000                           GPU, file whose numbers after "pid": (or all) are pids, MiB each
   mig MIG-cccc 1 20000 100                           uuid, parent GPU, total MiB, MiB in use
   p2p 0 1 5                                          a pair's peer status; without a line 0, which is OK

   flags: nomem (memory is "not supported"), nopid (processes are not), noval (their memory is [N/A]), hostpid (pids
   are those of another namespace: ours plus 10000000), lost (GPU is lost). Memory of a holder that has ended goes away evenly over decay_s, -1 for never. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, LOST = 15 };
enum { MAX = 16, MIB = 1 << 20 };

typedef struct { int mig, parent; char uuid[96], name[96], flags[64]; double total, base, decay; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } Process;

static Device devices[MAX];
static int num_gpus, num_devices, peers[MAX][MAX];
static char driver[96];

static int read_state(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    if (!file) return NO_DRIVER;
    num_gpus = num_devices = 0;
    memset(peers, 0, sizeof peers);
    while (fgets(line, sizeof line, file)) {
        Device d = {0};
        int a, b, status;
        if (sscanf(line, "gpu %95s %95s %lf %lf %lf %63s", d.uuid, d.name, &d.total, &d.base, &d.decay, d.flags) == 6)
            devices[num_gpus = ++num_devices, num_devices - 1] = d;
        else if (sscanf(line, "mig %95s %d %lf %lf", d.uuid, &d.parent, &d.total, &d.base) == 4)
            d.mig = 1, strcpy(d.name, "MIG_slice"), devices[num_devices++] = d;
        else if (sscanf(line, "p2p %d %d %d", &a, &b, &status) == 3)
            peers[a][b] = peers[b][a] = status;
        else
            sscanf(line, "driver %95s", driver);
    }
    fclose(file);
    return OK;
}

static int alive(int pid) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    fclose(file);
    return state != 'Z';
}

/* Seconds since somebody first saw that this holder has ended; the file PIDS.ended-N remembers it for all. */
static double ended_for_s(const char *pids, int pid) {
    char path[512];
    struct stat status;
    struct timespec now;
    snprintf(path, sizeof path, "%s.ended-%d", pids, pid);
    if (stat(path, &status) != 0) {
        FILE *file = fopen(path, "w");
        if (file) fclose(file);
        return 0.0;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec - status.st_mtim.tv_sec + (now.tv_nsec - status.st_mtim.tv_nsec) / 1e9;
}

/* Memory that the holders of a GPU still take, and those of them that live. */
static double held_mib(int gpu, Process *processes, unsigned int *count) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    char line[512], path[256], text[8192];
    double mib, sum = 0.0;
    int index;
    *count = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "holder %d %255s %lf", &index, path, &mib) != 3 || index != gpu) continue;
        FILE *pids = fopen(path, "r");
        if (!pids) continue;
        text[fread(text, 1, sizeof text - 1, pids)] = 0;
        fclose(pids);
        int json = strstr(text, "\"pid\":") != NULL;
        for (char *at = text; at && *at;) {
            if (json && !(at = strstr(at, "\"pid\":"))) break;
            at += json ? 6 : 0;
            char *end;
            int pid = (int)strtol(at, &end, 10);
            if (end == at) break;
            at = end;
            if (alive(pid)) {
                int told = strstr(devices[gpu].flags, "hostpid") ? pid + 10000000 : pid;
                Process p = {told, strstr(devices[gpu].flags, "noval") ? ~0ULL : (unsigned long long)(mib * MIB), 0, 0};
                if (*count < MAX) processes[(*count)++] = p;
                sum += mib;
            } else {
                double decay = devices[gpu].decay, age = ended_for_s(path, pid);
                sum += decay < 0 ? mib : age < decay ? mib * (1 - age / decay) : 0;
            }
        }
    }
    if (file) fclose(file);
    return sum;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return read_state(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported" : "Error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    snprintf(text, length, "%s", driver);
    return *driver ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned int *count) { int r = read_state(); *count = num_gpus; return r; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    if ((int)index >= num_gpus) return INVALID;
    *device = &devices[index];
    return strstr(devices[index].flags, "lost") ? LOST : OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    for (int i = 0; i < num_devices; i++)
        if (!strcmp(devices[i].uuid, uuid)) return *device = &devices[i], OK;
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *mig, Device **device) {
    if (!mig || !mig->mig) return INVALID;
    *device = &devices[mig->parent];
    return OK;
}

int nvmlDeviceGetIndex(Device *device, unsigned int *index) {
    if (!device || device->mig) return INVALID;
    *index = (unsigned int)(device - devices);
    return OK;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned int length) { snprintf(text, length, "%s", device->uuid); return OK; }

int nvmlDeviceGetName(Device *device, char *text, unsigned int length) {
    snprintf(text, length, "%s", device->name);
    for (; *text; text++) if (*text == '_') *text = ' ';
    return OK;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    Process processes[MAX];
    unsigned int count;
    if (strstr(device->flags, "nomem")) return NOT_SUPPORTED;
    double held = device->mig ? 0 : held_mib((int)(device - devices), processes, &count);
    memory->total = (unsigned long long)(device->total * MIB);
    memory->used = (unsigned long long)((device->base + held) * MIB);
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *processes) {
    Process found[MAX];
    unsigned int seen = 0, room = *count;
    if (strstr(device->flags, "nopid")) return NOT_SUPPORTED;
    if (!device->mig) held_mib((int)(device - devices), found, &seen);
    *count = seen;
    if (seen == 0) return OK;
    if (!processes || room < seen) return TOO_SMALL;
    memcpy(processes, found, seen * sizeof *found);
    return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, unsigned int *level) { (void)a, (void)b, *level = 30; return OK; }

int nvmlDeviceGetP2PStatus(Device *a, Device *b, int caps, unsigned int *status) {
    (void)caps;
    *status = peers[a - devices][b - devices];
    return OK;
}
