// The CUDA runtime without a device.
//
// Kernels do nothing. Device memory is main memory, to which only copies write. What a kernel may
// have written is unknown: once a kernel was launched, the host reads zeros from the device, or
// the byte that a script has chosen.
//
// An asynchronous copy to pinned memory is complete only when the host has waited for it, by its
// stream, by an event that was recorded behind it, or by its device. Until then the target is
// filled with 0xFF, which is NaN in all float formats.
#include "null_gpu.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <deque>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

int setting(const char* name, int otherwise) {
    const char* value = getenv(name);
    return value ? atoi(value) : otherwise;
}

constexpr int MAX_DEVICES = 8;
constexpr size_t DEVICE_BYTES = 80ul << 30;

// An A100: for an H100 torch prefers cuDNN's attention, whose plans cannot be made without one.
// They are read at the first call, because a forked process may set them.
int capability() {
    static const int value = setting("NULL_GPU_CAPABILITY", 80);
    return value;
}

int devices() {
    static const int value = setting("NULL_GPU_DEVICES", 1);
    return value;
}

thread_local int current_device = 0;

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- Streams and events

struct Stream;

// A point in a stream: the work up to this number.
struct Point {
    Stream* stream = nullptr;
    long number = 0;
};

// Work that is not complete: a copy to pinned memory, or a wait for another stream.
struct Work {
    long number;
    char* target;
    std::vector<char> content;
    Point awaited;
};

struct Stream {
    int device;
    std::deque<Work> open;
};

struct Event {
    Point recorded;
    Clock::time_point time;
};

long last_number = 0;

// Never destroyed: torch uses the device until the very end of a process.
auto& created_streams = *new std::vector<Stream*>;
auto& default_streams = *new std::vector<Stream>(MAX_DEVICES);

Stream& stream_of(cudaStream_t handle) {
    bool is_default = !handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
    return is_default ? default_streams[current_device] : *reinterpret_cast<Stream*>(handle);
}

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

void complete(Point point) {
    Lock lock(mutex);
    if (!point.stream) return;

    auto& open = point.stream->open;
    while (!open.empty() && open.front().number <= point.number) {
        Work work = std::move(open.front());
        open.pop_front();
        memcpy(work.target, work.content.data(), work.content.size());
        complete(work.awaited);
    }
}

Point now(Stream& stream) { return {&stream, last_number}; }

cudaError_t create(cudaStream_t* handle) {
    Lock lock(mutex);
    created_streams.push_back(new Stream{current_device, {}});
    *handle = reinterpret_cast<cudaStream_t>(created_streams.back());
    return cudaSuccess;
}

cudaError_t create(cudaEvent_t* handle) {
    *handle = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}

cudaError_t record(cudaEvent_t handle, cudaStream_t stream) {
    Lock lock(mutex);
    event_of(handle) = {now(stream_of(stream)), Clock::now()};
    return cudaSuccess;
}

// ---- Memory

enum class Kind { pageable, pinned, device };

struct Block {
    size_t bytes;
    Kind kind;
};

auto& blocks = *new std::map<const char*, Block>;

// What copies have written since the last launch of a kernel.
auto& known = *new std::vector<std::pair<const char*, size_t>>;

cudaError_t allocate(void** address, size_t bytes, Kind kind) {
    // Pages that nobody touches take no memory.
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    bytes = bytes ? bytes : 1;
    *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (*address == MAP_FAILED) return cudaErrorMemoryAllocation;

    Lock lock(mutex);
    blocks[static_cast<char*>(*address)] = {bytes, kind};
    count(Counter::allocations);
    return cudaSuccess;
}

cudaError_t release(void* address) {
    Lock lock(mutex);
    auto block = blocks.find(static_cast<char*>(address));
    if (block == blocks.end()) return cudaSuccess;

    // A real device waits before it releases memory.
    for (Stream* stream : created_streams) complete(now(*stream));
    for (Stream& stream : default_streams) complete(now(stream));
    known.clear();
    munmap(address, block->second.bytes);
    blocks.erase(block);
    return cudaSuccess;
}

Kind kind_of(const void* address) {
    auto byte = static_cast<const char*>(address);
    Lock lock(mutex);
    auto block = blocks.upper_bound(byte);
    if (block == blocks.begin()) return Kind::pageable;
    --block;
    return byte < block->first + block->second.bytes ? block->second.kind : Kind::pageable;
}

bool is_known(const void* address, size_t bytes) {
    auto begin = static_cast<const char*>(address);
    for (auto& [start, size] : known) {
        if (begin >= start && begin + bytes <= start + size) return true;
    }
    return false;
}

char unknown_byte = 0;

std::vector<char> content_of(const void* source, size_t bytes) {
    auto begin = static_cast<const char*>(source);
    if (is_known(source, bytes)) return std::vector<char>(begin, begin + bytes);
    return std::vector<char>(bytes, unknown_byte);
}

void write_to_device(void* target, const void* source, size_t bytes) {
    memcpy(target, source, bytes);
    known.emplace_back(static_cast<const char*>(target), bytes);
}

void read_from_device(void* target, const void* source, size_t bytes, Stream& stream, bool wait) {
    std::vector<char> content = content_of(source, bytes);
    if (wait) {
        complete(now(stream));
        memcpy(target, content.data(), bytes);
        return;
    }

    memset(target, 0xFF, bytes);
    stream.open.push_back({++last_number, static_cast<char*>(target), std::move(content), {}});
}

cudaError_t copy(void* target, const void* source, size_t bytes, cudaStream_t handle, bool wait) {
    Kind to = kind_of(target);
    Kind from = kind_of(source);
    Lock lock(mutex);

    if (to == Kind::device && from == Kind::device) {
        copy_on_device(target, source, bytes);
        return cudaSuccess;
    }

    bool is_pinned = to == Kind::pinned || from == Kind::pinned;
    count(is_pinned ? Counter::pinned_copies : Counter::pageable_copies);
    if (to == Kind::device) {
        write_to_device(target, source, bytes);
    } else if (from == Kind::device) {
        // The host always waits for a copy to pageable memory.
        read_from_device(target, source, bytes, stream_of(handle), wait || !is_pinned);
    } else {
        memcpy(target, source, bytes);
    }
    return cudaSuccess;
}

cudaError_t clear() {
    Lock lock(mutex);
    count(Counter::memsets);
    known.clear();
    return cudaSuccess;
}

}  // namespace

void launch() {
    Lock lock(mutex);
    known.clear();
    count(Counter::launches);
}

void launch(Counter kind) {
    launch();
    count(kind);
}

void copy_on_device(void* target, const void* source, size_t bytes) {
    Lock lock(mutex);
    count(Counter::device_copies);
    if (target != source && is_known(source, bytes)) write_to_device(target, source, bytes);
}

// Choose the byte that stands for unknown content. With 1, booleans are true and floats finite.
extern "C" void null_gpu_read_unknown_as(int byte) { unknown_byte = static_cast<char>(byte); }

// ---- Registration and launches of kernels

extern "C" {

void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                            void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct Configuration {
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    void* stream;
};
static thread_local Configuration configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
    configuration = {grid, block, shared_bytes, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void** stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
    launch();
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    launch();
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
    launch();
    return cudaSuccess;
}
void null_gpu_triton_launch() { launch(Counter::triton_launches); }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
    function(data);
    return cudaSuccess;
}

// ---- Devices

cudaError_t cudaGetDeviceCount(int* number) {
    *number = devices();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    Lock lock(mutex);
    count(Counter::device_synchronizations);
    complete(now(default_streams[current_device]));
    for (Stream* stream : created_streams) {
        if (stream->device == current_device) complete(now(*stream));
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    snprintf(text, length, "0000:00:%02d.0", device);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
    memset(device, 0, sizeof *device);
    strcpy(device->name, "null GPU");
    device->totalGlobalMem = DEVICE_BYTES;
    device->major = capability() / 10;
    device->minor = capability() % 10;
    device->warpSize = 32;
    device->multiProcessorCount = 108;
    device->regsPerBlock = 65536;
    device->regsPerMultiprocessor = 65536;
    device->maxThreadsPerBlock = 1024;
    device->maxThreadsPerMultiProcessor = 2048;
    device->maxBlocksPerMultiProcessor = 32;
    device->sharedMemPerBlock = 48 << 10;
    device->sharedMemPerBlockOptin = 163 << 10;
    device->sharedMemPerMultiprocessor = 164 << 10;
    device->reservedSharedMemPerBlock = 1 << 10;
    device->l2CacheSize = 40 << 20;
    device->textureAlignment = 512;
    device->unifiedAddressing = 1;

    int max_threads[] = {1024, 1024, 64};
    int max_grid[] = {2147483647, 65535, 65535};
    memcpy(device->maxThreadsDim, max_threads, sizeof max_threads);
    memcpy(device->maxGridSize, max_grid, sizeof max_grid);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    const std::map<cudaDeviceAttr, int> values = {
        {cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
        {cudaDevAttrComputeCapabilityMajor, properties.major},
        {cudaDevAttrComputeCapabilityMinor, properties.minor},
        {cudaDevAttrWarpSize, properties.warpSize},
        {cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
        {cudaDevAttrMaxThreadsPerMultiProcessor, properties.maxThreadsPerMultiProcessor},
        {cudaDevAttrMaxRegistersPerBlock, properties.regsPerBlock},
        {cudaDevAttrMaxRegistersPerMultiprocessor, properties.regsPerMultiprocessor},
        {cudaDevAttrMaxSharedMemoryPerBlock, int(properties.sharedMemPerBlock)},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(properties.sharedMemPerBlockOptin)},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, int(properties.sharedMemPerMultiprocessor)},
        {cudaDevAttrMaxGridDimX, properties.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, properties.maxGridSize[1]},
        {cudaDevAttrMaxGridDimZ, properties.maxGridSize[2]},
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return cudaSuccess;
}

// ---- Properties of kernels

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = capability();
    attributes->ptxVersion = capability();
    attributes->maxDynamicSharedSizeBytes = 163 << 10;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_per_processor,
                                                                   const void*, int, size_t,
                                                                   unsigned) {
    *blocks_per_processor = 2;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char memory[1 << 16];
    *address = memory;
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}

// ---- Memory

cudaError_t cudaMalloc(void** address, size_t bytes) {
    return allocate(address, bytes, Kind::device);
}
cudaError_t cudaFree(void* address) { return release(address); }
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    return allocate(address, bytes, Kind::pinned);
}
cudaError_t cudaFreeHost(void* address) { return release(address); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *free = DEVICE_BYTES - (1ul << 30);
    *total = DEVICE_BYTES;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    const std::map<Kind, cudaMemoryType> types = {
        {Kind::pageable, cudaMemoryTypeUnregistered},
        {Kind::pinned, cudaMemoryTypeHost},
        {Kind::device, cudaMemoryTypeDevice},
    };
    memset(attributes, 0, sizeof *attributes);
    attributes->type = types.at(kind_of(address));
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    count(Counter::stream_waits);
    return copy(target, source, bytes, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
    return copy(target, source, bytes, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes,
                                cudaStream_t stream) {
    return copy(target, source, bytes, stream, false);
}
cudaError_t cudaMemset(void*, int, size_t) { return clear(); }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return clear(); }

// ---- Streams

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return create(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return create(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    complete(now(stream_of(stream)));
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    count(Counter::stream_waits);
    complete(now(stream_of(stream)));
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Lock lock(mutex);
    Point awaited = event_of(event).recorded;
    stream_of(stream).open.push_back({++last_number, nullptr, {}, awaited});
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t* dependencies) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (dependencies) *dependencies = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- Events

cudaError_t cudaEventCreate(cudaEvent_t* event) { return create(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return create(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete &event_of(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return record(event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return record(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    complete(event_of(event).recorded);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count(Counter::event_waits);
    complete(event_of(event).recorded);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    std::chrono::duration<float, std::milli> elapsed = event_of(end).time - event_of(start).time;
    *milliseconds = elapsed.count();
    return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
