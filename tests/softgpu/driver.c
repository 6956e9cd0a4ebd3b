// A CUDA driver without a GPU: the documented calls of libcuda.so.1, done by threads over ordinary memory.
//
// What is real here is what code gets wrong: a stream is a thread with a queue, so nothing has happened when a call returns;
// device memory cannot be touched by the host; a handle is opened in another process; order exists only where a stream, an
// event or a wait makes it. Compute is missing: only copies, fills, waits and host functions are performed.
//
// With -DSOFTCUDA_CUDA_H the declarations come from NVIDIA's cuda.h instead of from below, so that a difference is an error.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef SOFTCUDA_CUDA_H
#include <cuda.h>
#else
typedef unsigned long long CUdeviceptr;
typedef int CUdevice, CUdevice_attribute, CUpointer_attribute, CUmemRangeHandleType;
typedef int CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef int CUstreamCaptureMode, CUstreamCaptureStatus;
typedef uint32_t cuuint32_t;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef void (*CUhostFn)(void *);
typedef enum {
    CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_MAP_FAILED = 205, CUDA_ERROR_ALREADY_MAPPED = 208, CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400, CUDA_ERROR_NOT_FOUND = 500, CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713, CUDA_ERROR_NOT_PERMITTED = 800, CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
} CUresult;
enum {
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR = 123, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
};
enum {
    CU_POINTER_ATTRIBUTE_CONTEXT = 1, CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
    CU_POINTER_ATTRIBUTE_HOST_POINTER = 4, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6, CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12, CU_POINTER_ATTRIBUTE_MAPPED = 13,
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
};
enum { CU_STREAM_CAPTURE_MODE_GLOBAL = 0, CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum { CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_STREAM_CAPTURE_STATUS_ACTIVE = 1, CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2 };
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
enum { CU_STREAM_WAIT_VALUE_GEQ = 0, CU_STREAM_WAIT_VALUE_EQ = 1, CU_STREAM_WAIT_VALUE_AND = 2, CU_STREAM_WAIT_VALUE_NOR = 3,
       CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30 };
enum { CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DISABLE_TIMING = 2, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };
enum { CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER = 100, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST = 1 };
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#define CU_MEMHOSTREGISTER_READ_ONLY 0x08
#endif

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define STREAM_MAGIC 0x53545245u
#define EVENT_MAGIC 0x45564e54u
#define HANDLE_MAGIC 0x48444c45u

struct CUctx_st {
    int device;
    atomic_int retained;
    atomic_uint peers;  // a bit per device whose memory this one may reach
};

// One recording of an event. Waits hold the recording that was the latest when they were made, as CUDA has it.
typedef struct {
    atomic_int references;
    bool done;
    struct timespec at;
} Record;

struct CUevent_st {
    uint32_t magic;
    int device;
    unsigned flags;
    Record *latest;
    CUstream captured;        // the capturing stream that it was recorded on, if any
    struct CUevent_st *next;  // while it waits to be used again
};

typedef enum { COPY, FILL8, FILL32, SLEEP, WRITE32, WAIT32, HOST, RECORD, AWAIT, END } Kind;

typedef struct Op {
    struct Op *next;
    Kind kind;
    void *to, *from;
    size_t n;
    uint32_t value, flags;
    Record *record;
    CUhostFn function;
    bool owned;  // `from` is a staging copy of ours
} Op;

struct CUstream_st {
    uint32_t magic;
    int device;
    bool started;
    atomic_int capture;  // a CUstreamCaptureStatus
    uint64_t enqueued, done;
    Op *head, *tail;
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    uint32_t random;
    struct CUstream_st *next;  // every stream there ever was: they are few
};

typedef struct {
    CUdeviceptr base;
    char *shadow;
    size_t size, mapped;
    int device, fd, owner, references;  // owner: the process id it was opened from, 0 for memory of this process
    uint64_t id, there;                 // there: its address in that process
} Allocation;

typedef struct {
    uintptr_t base;
    size_t size;
} Registered;

typedef struct {  // what the 64 bytes of an IPC handle hold; the inode tells a file number that was used again
    uint32_t magic;
    int32_t pid, fd, device;
    uint64_t id, size, inode, filesystem, base;
} Handle;
_Static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle), "the handle has to fit");

static atomic_bool initialised, forked, stopped, broken;
static atomic_int captures;  // under way, all of them begun in the global mode
static int devices = 2, delay_us;
static bool dmabuf;
static struct CUctx_st contexts[MAX_DEVICES];
static CUstream defaults[MAX_DEVICES], streams;
static CUevent spare_events;
static Allocation *allocations;
static Registered *registered;
static size_t allocation_count, registered_count;
static uint64_t next_id = 1;
static pthread_mutex_t world = PTHREAD_MUTEX_INITIALIZER;  // tables; never held while anything is waited for
static pthread_mutex_t records = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t recorded = PTHREAD_COND_INITIALIZER;

static _Thread_local CUcontext stack[16];
static _Thread_local int depth;
static _Thread_local CUstream own_streams[MAX_DEVICES];
static _Thread_local int capture_mode;
static _Thread_local bool on_stream;  // a stream's thread: host functions may not call the driver

enum { STREAM_SYNC, EVENT_SYNC, CTX_SYNC, MEMCPY, BYTES, TORCH_MEMCPY = BYTES + 4, TORCH_BYTES, TORCH_SYNC = TORCH_BYTES + 4,
       IPC_OPEN, COUNTERS };
static const char *const counter_names[COUNTERS] = {
    "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "memcpy", "bytes_h2h", "bytes_h2d", "bytes_d2h",
    "bytes_d2d", "torch_memcpy", "torch_bytes_h2h", "torch_bytes_h2d", "torch_bytes_d2h", "torch_bytes_d2d",
    "torch_synchronize", "ipc_open",
};
static atomic_long counters[COUNTERS];

// Every call begins with one of these. A forked child has the tables but not the threads.
#define ENTER()                                                                       \
    do {                                                                              \
        if (forked || !initialised) return CUDA_ERROR_NOT_INITIALIZED;                \
        if (stopped) return CUDA_ERROR_DEINITIALIZED;                                 \
        if (on_stream) return CUDA_ERROR_NOT_PERMITTED;                               \
    } while (0)
#define ENTER_CONTEXT()                                                               \
    do {                                                                              \
        ENTER();                                                                      \
        if (!current()) return CUDA_ERROR_INVALID_CONTEXT;                            \
        if (broken) return CUDA_ERROR_ILLEGAL_ADDRESS;                                \
    } while (0)
// What a thread may not do, unless its mode is relaxed, while any thread captures: the capture is lost by it.
#define UNSAFE()                                                                      \
    do {                                                                              \
        if (broken) return CUDA_ERROR_ILLEGAL_ADDRESS;                                \
        if (captures && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return disturb(); \
    } while (0)
#define REQUIRE(condition, error)                                                     \
    do {                                                                              \
        if (!(condition)) return (error);                                             \
    } while (0)

static CUresult disturb(void);
static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

static void doze(long ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    while (nanosleep(&t, &t) && errno == EINTR) {
    }
}

// ---- streams ----

static void release(Record *r) {
    if (r && atomic_fetch_sub(&r->references, 1) == 1) free(r);
}

static bool satisfied(uint32_t seen, uint32_t value, uint32_t how) {
    switch (how) {
        case CU_STREAM_WAIT_VALUE_GEQ: return (int32_t)(seen - value) >= 0;
        case CU_STREAM_WAIT_VALUE_EQ: return seen == value;
        case CU_STREAM_WAIT_VALUE_AND: return (seen & value) != 0;
        default: return ~(seen | value) != 0;
    }
}

static void perform(Op *op) {
    switch (op->kind) {
        case COPY:
            memmove(op->to, op->from, op->n);
            if (op->owned) free(op->from);
            break;
        case FILL8: memset(op->to, (int)op->value, op->n); break;
        case FILL32:
            for (size_t i = 0; i < op->n; i++) ((uint32_t *)op->to)[i] = op->value;
            break;
        case SLEEP: doze((long)op->value * 1000); break;
        case WRITE32:
            atomic_store_explicit((_Atomic uint32_t *)op->to, op->value,
                                  op->flags ? memory_order_relaxed : memory_order_release);
            break;
        case WAIT32:  // few cores: a short look, then naps
            for (int i = 0; !satisfied(atomic_load_explicit((_Atomic uint32_t *)op->to, memory_order_acquire), op->value,
                                       op->flags & 3);
                 i++) {
                if (i < 20) sched_yield();
                else doze(i < 200 ? 20000 : 50000);
            }
            break;
        case HOST:
            if (!broken) op->function(op->to);  // "will not be called in the event of an error in the CUDA context"
            break;
        case RECORD:
            pthread_mutex_lock(&records);
            clock_gettime(CLOCK_MONOTONIC, &op->record->at);
            op->record->done = true;
            pthread_cond_broadcast(&recorded);
            pthread_mutex_unlock(&records);
            release(op->record);
            break;
        case AWAIT:
            pthread_mutex_lock(&records);
            while (!op->record->done) pthread_cond_wait(&recorded, &records);
            pthread_mutex_unlock(&records);
            release(op->record);
            break;
        case END: break;
    }
}

static void *work(void *argument) {
    CUstream s = argument;
    on_stream = true;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->head || stopped) pthread_cond_wait(&s->work, &s->lock);
        Op *op = s->head;
        s->head = op->next;
        if (!s->head) s->tail = NULL;
        pthread_mutex_unlock(&s->lock);
        if (delay_us) {
            s->random = s->random * 1664525u + 1013904223u;
            doze((long)(s->random >> 8) % (delay_us + 1) * 1000);
        }
        bool end = op->kind == END;
        perform(op);
        free(op);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->idle);
        pthread_mutex_unlock(&s->lock);
        if (end) return NULL;
    }
}

static CUstream new_stream(int device) {
    CUstream s = calloc(1, sizeof *s);
    s->magic = STREAM_MAGIC;
    s->device = device;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->idle, NULL);
    pthread_mutex_lock(&world);
    s->random = (uint32_t)next_id * 2654435761u + (uint32_t)getpid() * 40503u;
    next_id++;
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&world);
    return s;
}

static CUstream find_stream(CUstream s) {  // NULL: no such stream
    CUcontext c = current();
    if (s == NULL || s == CU_STREAM_LEGACY) return c ? defaults[c->device] : NULL;
    if (s == CU_STREAM_PER_THREAD) {
        if (!c) return NULL;
        if (!own_streams[c->device]) own_streams[c->device] = new_stream(c->device);
        return own_streams[c->device];
    }
    return s->magic == STREAM_MAGIC ? s : NULL;
}

static CUresult enqueue(CUstream s, Op what) {
    if (s->capture) {  // it would be done when the graph is launched, which no graph of ours ever is
        release(what.record);
        if (what.owned) free(what.from);
        return s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    Op *op = malloc(sizeof *op);
    *op = what;
    op->next = NULL;
    pthread_mutex_lock(&s->lock);
    if (!s->started) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, 1 << 20);
        int failed = pthread_create(&thread, &attributes, work, s);
        pthread_attr_destroy(&attributes);
        if (failed) {
            pthread_mutex_unlock(&s->lock);
            free(op);
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        s->started = true;
    }
    if (s->tail) s->tail->next = op;
    else s->head = op;
    s->tail = op;
    s->enqueued++;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    return CUDA_SUCCESS;
}

static CUresult drain(CUstream s) {  // what was enqueued before this call, not what others add meanwhile
    pthread_mutex_lock(&s->lock);
    for (uint64_t target = s->enqueued; s->done < target && !stopped;) pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return stopped ? CUDA_ERROR_DEINITIALIZED : CUDA_SUCCESS;
}

static CUresult drain_device(int device) {  // -1: all
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&world);
    CUstream first = streams;
    pthread_mutex_unlock(&world);
    for (CUstream s = first; s && !result; s = s->next)
        if (device < 0 || s->device == device) result = drain(s);
    return result;
}

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER_CONTEXT();
    (void)priority;
    REQUIRE(stream && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    *stream = new_stream(current()->device);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

API CUresult cuStreamDestroy_v2(CUstream stream) {  // returns at once; what is enqueued is still performed
    ENTER_CONTEXT();
    REQUIRE(stream > CU_STREAM_PER_THREAD && find_stream(stream), CUDA_ERROR_INVALID_HANDLE);
    stream->magic = 0;
    return stream->started ? enqueue(stream, (Op){.kind = END}) : CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream) {
    ENTER_CONTEXT();
    UNSAFE();
    counters[STREAM_SYNC]++;
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    return drain(s);
}

API CUresult cuStreamQuery(CUstream stream) {
    ENTER_CONTEXT();
    UNSAFE();
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    pthread_mutex_lock(&s->lock);
    bool idle = s->done == s->enqueued;
    pthread_mutex_unlock(&s->lock);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    ENTER_CONTEXT();
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(function, CUDA_ERROR_INVALID_VALUE);
    return enqueue(s, (Op){.kind = HOST, .function = function, .to = data});
}

// ---- capturing into graphs: that it is on, and what ends it. What is captured is dropped. ----

static CUresult disturb(void) {
    pthread_mutex_lock(&world);
    for (CUstream s = streams; s; s = s->next)
        if (s->capture) s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    pthread_mutex_unlock(&world);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    ENTER();
    CUstream s = find_stream(stream);
    REQUIRE(s && s->magic == STREAM_MAGIC && s != defaults[s->device], CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(mode == CU_STREAM_CAPTURE_MODE_GLOBAL && !s->capture, CUDA_ERROR_INVALID_VALUE);
    s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    captures++;
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER();
    CUstream s = find_stream(stream);
    REQUIRE(s && s->capture && graph, CUDA_ERROR_INVALID_VALUE);
    bool lost = s->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    s->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    captures--;
    *graph = NULL;
    return lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    ENTER();
    CUstream s = find_stream(stream);
    REQUIRE(s && status, CUDA_ERROR_INVALID_VALUE);
    *status = s->capture;
    return CUDA_SUCCESS;
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER();
    REQUIRE(mode && *mode >= 0 && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

// ---- events ----

static CUevent find_event(CUevent e) { return e && e->magic == EVENT_MAGIC ? e : NULL; }

static Record *latest(CUevent e) {  // with a reference for the caller; NULL: never recorded, which counts as complete
    pthread_mutex_lock(&records);
    Record *r = e->latest;
    if (r) r->references++;
    pthread_mutex_unlock(&records);
    return r;
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER_CONTEXT();
    REQUIRE(event && flags < 8, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&world);
    CUevent e = spare_events;
    if (e) spare_events = e->next;
    pthread_mutex_unlock(&world);
    if (!e) e = malloc(sizeof *e);
    *e = (struct CUevent_st){.magic = EVENT_MAGIC, .device = current()->device, .flags = flags};
    *event = e;
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event) {
    ENTER();
    REQUIRE(find_event(event), CUDA_ERROR_INVALID_HANDLE);
    pthread_mutex_lock(&world);
    event->magic = 0;
    release(event->latest);
    event->next = spare_events;
    spare_events = event;
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER_CONTEXT();
    CUstream s = find_stream(stream);
    REQUIRE(s && find_event(event), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(s->device == event->device, CUDA_ERROR_INVALID_HANDLE);  // an event belongs to the context it was made in
    Record *r = calloc(1, sizeof *r);
    r->references = 2;  // the event's and the operation's
    pthread_mutex_lock(&records);
    Record *before = event->latest;
    event->latest = r;
    pthread_mutex_unlock(&records);
    release(before);
    event->captured = s->capture ? s : NULL;
    return enqueue(s, (Op){.kind = RECORD, .record = r});
}

API CUresult cuEventQuery(CUevent event) {
    ENTER();
    UNSAFE();
    REQUIRE(find_event(event), CUDA_ERROR_INVALID_HANDLE);
    pthread_mutex_lock(&records);
    bool done = !event->latest || event->latest->done;
    pthread_mutex_unlock(&records);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event) {
    ENTER();
    UNSAFE();
    counters[EVENT_SYNC]++;
    REQUIRE(find_event(event), CUDA_ERROR_INVALID_HANDLE);
    Record *r = latest(event);
    pthread_mutex_lock(&records);
    while (r && !r->done && !stopped) pthread_cond_wait(&recorded, &records);
    pthread_mutex_unlock(&records);
    release(r);
    return stopped ? CUDA_ERROR_DEINITIALIZED : CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    ENTER();
    REQUIRE(ms, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(find_event(start) && find_event(end) && start->latest && end->latest, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    CUresult result = CUDA_ERROR_NOT_READY;
    pthread_mutex_lock(&records);
    if (start->latest->done && end->latest->done) {
        struct timespec a = start->latest->at, b = end->latest->at;
        *ms = (float)((double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&records);
    return result;
}

#undef cuEventElapsedTime  // cuda.h of CUDA 13 renames the old one away
API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end);
API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) { return cuEventElapsedTime_v2(ms, start, end); }

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER_CONTEXT();
    CUstream s = find_stream(stream);
    REQUIRE(s && find_event(event), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
    if (s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE && event->captured != s) {  // work of the graph after work outside of it
        s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    Record *r = latest(event);
    return r ? enqueue(s, (Op){.kind = AWAIT, .record = r}) : CUDA_SUCCESS;
}

// ---- memory ----

static Allocation *find_allocation(uintptr_t address) {  // under `world`
    for (size_t i = 0; i < allocation_count; i++)
        if (address - allocations[i].base < allocations[i].size) return &allocations[i];
    return NULL;
}

static Registered *find_registered(uintptr_t address) {  // under `world`
    for (size_t i = 0; i < registered_count; i++)
        if (address - registered[i].base < registered[i].size) return &registered[i];
    return NULL;
}

typedef enum { DEVICE, PINNED, PAGEABLE, BROKEN } Where;

// Where `n` bytes at an address are, and the address under which the stream's thread reaches them.
static Where resolve(uintptr_t address, size_t n, void **reach) {
    Where where = PAGEABLE;
    *reach = (void *)address;
    pthread_mutex_lock(&world);
    Allocation *a = find_allocation(address);
    Registered *r = a ? NULL : find_registered(address);
    if (a) {
        where = n <= a->base + a->size - address ? DEVICE : BROKEN;
        *reach = a->shadow + (address - a->base);
    } else if (r) {
        where = n <= r->base + r->size - address ? PINNED : BROKEN;
    } else {  // what begins on pages that are not registered may not end on others that are
        for (size_t i = 0; i < registered_count; i++)
            if (address < registered[i].base && registered[i].base - address < n) where = BROKEN;
    }
    pthread_mutex_unlock(&world);
    return where;
}

// Memory is mapped twice: at the address that is handed out nobody may read or write, so that a host access faults.
static CUresult map(int fd, size_t size, int device, int owner, uint64_t id, uint64_t there, CUdeviceptr *out) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), mapped = (size + page - 1) / page * page;
    void *base = mmap(NULL, mapped, PROT_NONE, MAP_SHARED, fd, 0);
    void *shadow = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED || shadow == MAP_FAILED) {
        if (base != MAP_FAILED) munmap(base, mapped);
        if (shadow != MAP_FAILED) munmap(shadow, mapped);
        return CUDA_ERROR_MAP_FAILED;
    }
    pthread_mutex_lock(&world);
    allocations = realloc(allocations, (allocation_count + 1) * sizeof *allocations);
    allocations[allocation_count++] = (Allocation){(CUdeviceptr)(uintptr_t)base, shadow, size, mapped, device, fd, owner, 1,
                                                   id ? id : next_id++, there};
    pthread_mutex_unlock(&world);
    *out = (CUdeviceptr)(uintptr_t)base;
    return CUDA_SUCCESS;
}

// Both ways of giving memory back wait for the work in flight, as the real ones do.
static CUresult unmap(CUdeviceptr base, bool imported) {
    pthread_mutex_lock(&world);
    Allocation *a = find_allocation(base);
    bool ours = a && a->base == base && (a->owner != 0) == imported && a->references > 0;
    bool last = ours && --a->references == 0;
    pthread_mutex_unlock(&world);
    REQUIRE(ours, CUDA_ERROR_INVALID_VALUE);
    if (!last) return CUDA_SUCCESS;
    CUresult result = drain_device(-1);
    if (result) return result;
    pthread_mutex_lock(&world);
    a = find_allocation(base);
    Allocation gone = *a;
    *a = allocations[--allocation_count];
    pthread_mutex_unlock(&world);
    munmap((void *)(uintptr_t)gone.base, gone.mapped);
    munmap(gone.shadow, gone.mapped);
    if (gone.fd >= 0) close(gone.fd);
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    ENTER_CONTEXT();
    UNSAFE();
    REQUIRE(pointer && size, CUDA_ERROR_INVALID_VALUE);
    int fd = memfd_create("softcuda", MFD_CLOEXEC);
    CUresult result = fd < 0 || ftruncate(fd, (off_t)size) ? CUDA_ERROR_OUT_OF_MEMORY
                                                           : map(fd, size, current()->device, 0, 0, 0, pointer);
    if (result && fd >= 0) close(fd);
    return result ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER_CONTEXT();
    UNSAFE();
    return pointer ? unmap(pointer, false) : CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&world);
    Allocation *a = find_allocation(pointer);
    if (a && base) *base = a->base;
    if (a && size) *size = a->size;
    pthread_mutex_unlock(&world);
    return a ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// The memfd stands for the dma-buf. A file cannot begin in its middle, so only ranges from the base are given out.
API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t size, CUmemRangeHandleType type,
                                           unsigned long long flags) {
    ENTER_CONTEXT();
    (void)flags;
    REQUIRE(dmabuf && type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CUDA_ERROR_NOT_SUPPORTED);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    REQUIRE(handle && size && pointer % page == 0 && size % page == 0, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&world);
    Allocation *a = find_allocation(pointer);
    bool inside = a && !a->owner && size <= a->base + a->mapped - pointer, begins = a && a->base == pointer;
    int fd = inside && begins ? fcntl(a->fd, F_DUPFD_CLOEXEC, 3) : -1;
    pthread_mutex_unlock(&world);
    REQUIRE(inside, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(fd >= 0, CUDA_ERROR_NOT_SUPPORTED);
    *(int *)handle = fd;
    return CUDA_SUCCESS;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer) {
    ENTER_CONTEXT();
    Handle h = {.magic = HANDLE_MAGIC, .pid = getpid()};
    struct stat status;
    pthread_mutex_lock(&world);
    Allocation *a = find_allocation(pointer);
    bool ours = a && !a->owner && !fstat(a->fd, &status);
    if (ours) {
        h.fd = a->fd, h.device = a->device, h.id = a->id, h.size = a->size, h.base = a->base;
        h.inode = status.st_ino, h.filesystem = status.st_dev;
    }
    pthread_mutex_unlock(&world);
    REQUIRE(out && ours, CUDA_ERROR_INVALID_VALUE);
    memset(out, 0, sizeof *out);
    memcpy(out, &h, sizeof h);
    return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    ENTER_CONTEXT();
    UNSAFE();
    Handle h;
    memcpy(&h, &handle, sizeof h);
    REQUIRE(pointer && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS && h.magic == HANDLE_MAGIC, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(h.pid != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;  // two threads that open one handle get one mapping
    pthread_mutex_lock(&opening);
    CUresult result = CUDA_ERROR_MAP_FAILED;
    pthread_mutex_lock(&world);
    for (size_t i = 0; i < allocation_count && result; i++)
        if (allocations[i].owner == h.pid && allocations[i].id == h.id && allocations[i].references) {
            allocations[i].references++;
            *pointer = allocations[i].base;
            result = CUDA_SUCCESS;
        }
    // An address of a process is mapped once: what lies there now has to wait until what lay there before is closed.
    bool taken = false;
    for (size_t i = 0; i < allocation_count && result; i++)
        taken |= allocations[i].owner == h.pid && allocations[i].references && h.base < allocations[i].there + allocations[i].size &&
                 allocations[i].there < h.base + h.size;
    pthread_mutex_unlock(&world);
    if (taken) {
        pthread_mutex_unlock(&opening);
        return CUDA_ERROR_ALREADY_MAPPED;
    }
    if (result) {
        char path[64];
        struct stat status;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0 && !fstat(fd, &status) && status.st_ino == h.inode && status.st_dev == h.filesystem)
            result = map(fd, h.size, h.device, h.pid, h.id, h.base, pointer);
        if (result && fd >= 0) close(fd);
    }
    pthread_mutex_unlock(&opening);
    if (!result) counters[IPC_OPEN]++;
    return result;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER_CONTEXT();
    UNSAFE();
    return unmap(pointer, true);
}

API CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned flags) {
    ENTER_CONTEXT();
    UNSAFE();
    uintptr_t base = (uintptr_t)p;
    REQUIRE(p && size && flags < 16, CUDA_ERROR_INVALID_VALUE);
    bool overlaps = false;
    pthread_mutex_lock(&world);
    for (size_t i = 0; i < registered_count; i++)
        overlaps |= base < registered[i].base + registered[i].size && registered[i].base < base + size;
    if (!overlaps) {
        registered = realloc(registered, (registered_count + 1) * sizeof *registered);
        registered[registered_count++] = (Registered){base, size};
    }
    pthread_mutex_unlock(&world);
    return overlaps ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_SUCCESS;
}

API CUresult cuMemHostUnregister(void *p) {
    ENTER_CONTEXT();
    UNSAFE();
    pthread_mutex_lock(&world);
    Registered *r = find_registered((uintptr_t)p);
    bool found = r && r->base == (uintptr_t)p;
    if (found) *r = registered[--registered_count];
    pthread_mutex_unlock(&world);
    return found ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *p, unsigned flags) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&world);
    bool found = find_registered((uintptr_t)p);
    pthread_mutex_unlock(&world);
    REQUIRE(pointer && !flags && found, CUDA_ERROR_INVALID_VALUE);
    *pointer = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

// `counter`: where the call is counted. Pageable memory behaves as with CUDA: a source is taken before the call returns, a
// destination is complete when it returns.
static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream, int counter) {
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    void *to, *from;
    Where target = resolve(dst, n, &to), source = resolve(src, n, &from);
    REQUIRE(target != BROKEN && source != BROKEN && (!n || (dst && src)), CUDA_ERROR_INVALID_VALUE);
    counters[counter]++;
    counters[counter + 1 + (source == DEVICE) * 2 + (target == DEVICE)] += (long)n;
    if (!n) return CUDA_SUCCESS;
    Op op = {.kind = COPY, .to = to, .from = from, .n = n};
    if (source == PAGEABLE) {
        op.from = malloc(n);
        REQUIRE(op.from, CUDA_ERROR_OUT_OF_MEMORY);
        memcpy(op.from, from, n);
        op.owned = true;
    }
    CUresult result = enqueue(s, op);
    return !result && target == PAGEABLE ? drain(s) : result;
}

static bool device_side(CUdeviceptr p) {  // what the typed copies take for a device pointer
    void *reach;
    Where where = resolve(p, 1, &reach);
    return where == DEVICE || where == PINNED;
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream) {
    ENTER_CONTEXT();
    return copy(dst, src, n, stream, MEMCPY);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream stream) {
    ENTER_CONTEXT();
    REQUIRE(device_side(dst), CUDA_ERROR_INVALID_VALUE);
    return copy(dst, (CUdeviceptr)(uintptr_t)src, n, stream, MEMCPY);
}

API CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream stream) {
    ENTER_CONTEXT();
    REQUIRE(device_side(src), CUDA_ERROR_INVALID_VALUE);
    return copy((CUdeviceptr)(uintptr_t)dst, src, n, stream, MEMCPY);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream) {
    ENTER_CONTEXT();
    REQUIRE(device_side(dst) && device_side(src), CUDA_ERROR_INVALID_VALUE);
    return copy(dst, src, n, stream, MEMCPY);
}

static CUresult fill(CUdeviceptr dst, Kind kind, uint32_t value, size_t n, size_t each, CUstream stream) {
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    void *to;
    Where where = resolve(dst, n * each, &to);
    REQUIRE((where == DEVICE || where == PINNED) && dst % each == 0, CUDA_ERROR_INVALID_VALUE);
    return n ? enqueue(s, (Op){.kind = kind, .to = to, .value = value, .n = n}) : CUDA_SUCCESS;
}

API CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, CUstream stream) {
    ENTER_CONTEXT();
    return fill(dst, FILL8, value, n, 1, stream);
}

static CUresult memory_operation(CUstream stream, CUdeviceptr address, Op op) {
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    Where where = resolve(address, 4, &op.to);
    REQUIRE((where == DEVICE || where == PINNED) && address % 4 == 0, CUDA_ERROR_INVALID_VALUE);
    return enqueue(s, op);
}

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    ENTER_CONTEXT();
    REQUIRE(flags <= CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER, CUDA_ERROR_INVALID_VALUE);
    return memory_operation(stream, address, (Op){.kind = WRITE32, .value = value, .flags = flags});
}

API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    ENTER_CONTEXT();
    REQUIRE((flags & ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH) <= CU_STREAM_WAIT_VALUE_NOR, CUDA_ERROR_INVALID_VALUE);
    return memory_operation(stream, address, (Op){.kind = WAIT32, .value = value, .flags = flags});
}

API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER_CONTEXT();
    REQUIRE(data, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&world);
    Allocation *found = find_allocation(pointer), a = found ? *found : (Allocation){0};
    Registered *host = found ? NULL : find_registered(pointer), r = host ? *host : (Registered){0};
    pthread_mutex_unlock(&world);
    REQUIRE(found || host, CUDA_ERROR_INVALID_VALUE);  // memory the driver knows nothing of
    int device = found ? a.device : current()->device;
    switch ((int)attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = &contexts[device]; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = found ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = pointer; break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            REQUIRE(host, CUDA_ERROR_INVALID_VALUE);
            *(void **)data = (void *)(uintptr_t)pointer;
            break;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned char *)data = 0; break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = found ? a.id : r.base; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = device; break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned char *)data = found && !a.owner; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = found ? a.base : r.base; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = found ? a.size : r.size; break;
        case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned char *)data = 1; break;
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned char *)data = found && dmabuf; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

API CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER_CONTEXT();
    pthread_mutex_lock(&world);
    bool found = find_allocation(pointer);
    pthread_mutex_unlock(&world);
    return value && found && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
    ENTER_CONTEXT();
    REQUIRE(dmabuf, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(target == 0 && ((int)scope == 100 || (int)scope == 200), CUDA_ERROR_INVALID_VALUE);
    atomic_thread_fence(memory_order_seq_cst);
    return CUDA_SUCCESS;
}

// ---- the library, devices, contexts ----

static void in_child(void) { forked = true; }

// As a kernel that has touched what it may not: from now on nothing works on any device of this process.
API void softcuda_break(void);
API void softcuda_break(void) { broken = true; }

API void softcuda_stop(void);

API CUresult cuInit(unsigned flags) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&once);
    if (!initialised) {
        const char *text = getenv("SOFTCUDA_DEVICES");
        if (text) devices = atoi(text) < 0 ? 0 : atoi(text) > MAX_DEVICES ? MAX_DEVICES : atoi(text);
        if ((text = getenv("SOFTCUDA_DELAY_US"))) delay_us = atoi(text);
        dmabuf = (text = getenv("SOFTCUDA_DMABUF")) && !strcmp(text, "1");
        for (int i = 0; i < devices; i++) {
            contexts[i].device = i;
            defaults[i] = new_stream(i);
        }
        pthread_atfork(NULL, NULL, in_child);
        atexit(softcuda_stop);
        initialised = devices > 0;
    }
    pthread_mutex_unlock(&once);
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) {
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    *version = 13000;
    return CUDA_SUCCESS;
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
#define ERROR(name, text) {CUDA_##name, "CUDA_" #name, text}
    ERROR(SUCCESS, "no error"),
    ERROR(ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(ERROR_MAP_FAILED, "mapping of buffer object failed"),
    ERROR(ERROR_ALREADY_MAPPED, "resource already mapped"),
    ERROR(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(ERROR_NOT_READY, "device not ready"),
    ERROR(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ERROR(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
#undef ERROR
};

static CUresult describe(CUresult error, const char **out, bool name) {
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) *out = name ? errors[i].name : errors[i].text;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult error, const char **name) { return describe(error, name, true); }
API CUresult cuGetErrorString(CUresult error, const char **text) { return describe(error, text, false); }

static bool is_device(CUdevice device) { return device >= 0 && device < devices; }

API CUresult cuDeviceGetCount(int *count) {
    ENTER();
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    *count = devices;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER();
    REQUIRE(name && size > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)size, "softgpu %d", device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {  // the same in every process of the host
    ENTER();
    REQUIRE(uuid, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    memset(uuid->bytes, 0, 16);
    memcpy(uuid->bytes, "softgpu-", 8);
    uuid->bytes[15] = (char)device;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device) {
    ENTER();
    REQUIRE(id && size >= 13, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(id, (size_t)size, "%04x:%02x:%02x.0", 0, 0xd0 + device, 0);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER();
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    switch ((int)attribute) {
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0xd0 + device; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: *value = dmabuf; break;
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
            *value = dmabuf ? CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST : 0;
            break;
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
            *value = dmabuf ? CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER : 0;
            break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER();
    REQUIRE(can, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(device) && is_device(peer), CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    contexts[device].retained++;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {  // its memory and streams stay: nothing here tests their loss
    ENTER();
    REQUIRE(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(contexts[device].retained > 0, CUDA_ERROR_INVALID_CONTEXT);
    contexts[device].retained--;
    return CUDA_SUCCESS;
}

static bool is_context(CUcontext c) { return c >= contexts && c < contexts + devices && c->retained > 0; }

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    REQUIRE(!context || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    *context = current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER_CONTEXT();
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    *device = current()->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER();
    REQUIRE(is_context(context), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(depth < (int)(sizeof stack / sizeof *stack), CUDA_ERROR_INVALID_VALUE);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER_CONTEXT();
    if (context) *context = current();
    depth--;
    return CUDA_SUCCESS;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    ENTER_CONTEXT();
    REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_context(peer), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(peer != current(), CUDA_ERROR_INVALID_DEVICE);
    unsigned bit = 1u << peer->device;
    return atomic_fetch_or(&current()->peers, bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void) {
    ENTER_CONTEXT();
    counters[CTX_SYNC]++;
    return drain_device(current()->device);
}

// ---- for tests and for the torch backend ----

// No operation begins any more and every call, waiting ones too, says that the driver is gone. For the end of the process:
// host functions must not run into an interpreter that is being taken down.
API void softcuda_stop(void) {
    if (forked || stopped) return;
    stopped = true;
    pthread_mutex_lock(&world);
    CUstream first = streams;
    pthread_mutex_unlock(&world);
    for (CUstream s = first; s; s = s->next) {
        pthread_mutex_lock(&s->lock);
        pthread_cond_broadcast(&s->idle);
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_lock(&records);
    pthread_cond_broadcast(&recorded);
    pthread_mutex_unlock(&records);
}

API void *softcuda_shadow(CUdeviceptr pointer) {
    void *reach;
    return resolve(pointer, 0, &reach) == DEVICE ? reach : NULL;
}

API CUstream softcuda_default_stream(int device) { return is_device(device) ? defaults[device] : NULL; }

API CUresult softcuda_drain(CUstream stream) {
    ENTER();
    REQUIRE(!broken, CUDA_ERROR_ILLEGAL_ADDRESS);
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    return drain(s);
}

API CUresult softcuda_drain_device(int device) {
    ENTER();
    return drain_device(device);
}

API CUresult softcuda_sleep(CUstream stream, unsigned us) {
    ENTER();
    CUstream s = find_stream(stream);
    REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
    return enqueue(s, (Op){.kind = SLEEP, .value = us});
}

API CUresult softcuda_fill32(CUstream stream, CUdeviceptr pointer, uint32_t value, size_t n) {
    ENTER();
    return fill(pointer, FILL32, value, n, 4, stream);
}

API CUresult softcuda_fill8(CUstream stream, CUdeviceptr pointer, unsigned char value, size_t n) {
    ENTER();
    return fill(pointer, FILL8, value, n, 1, stream);
}

API CUresult softcuda_torch_copy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream) {
    ENTER();
    REQUIRE(!broken, CUDA_ERROR_ILLEGAL_ADDRESS);
    return copy(dst, src, n, stream, TORCH_MEMCPY);
}

API void softcuda_torch_synchronized(void) { counters[TORCH_SYNC]++; }

API long softcuda_count(const char *name) {  // -1: no such counter
    if (!strcmp(name, "allocations")) {
        long n = 0;
        pthread_mutex_lock(&world);
        for (size_t i = 0; i < allocation_count; i++) n += !allocations[i].owner;
        pthread_mutex_unlock(&world);
        return n;
    }
    for (int i = 0; i < COUNTERS; i++)
        if (!strcmp(name, counter_names[i])) return counters[i];
    return -1;
}
