// The driver, libcuda.so.1, as far as torch and Triton ask for it: its kernels do nothing.
//
// C linkage does not compare signatures: a function that does nothing takes no arguments here.
// All functions return 0, for success.
#include <cstdint>
#include <cstdlib>
#include <cuda_runtime_api.h>

extern "C" {

// In the preloaded library.
void null_gpu_triton_launch();

#define NOTHING(function)                                                                          \
    int function() { return 0; }
#define CREATE(function)                                                                           \
    int function(void** handle) {                                                                  \
        *handle = malloc(1);                                                                       \
        return 0;                                                                                  \
    }
#define LAUNCH(function)                                                                           \
    int function() {                                                                               \
        null_gpu_triton_launch();                                                                  \
        return 0;                                                                                  \
    }

// ---- Devices: what the runtime says of them

NOTHING(cuInit)
int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
int cuDeviceGetCount(int* number) { return cudaGetDeviceCount(number); }
int cuDeviceGet(int* device, int number) {
    *device = number;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = 1;
    return 0;
}

// ---- Contexts: one, which nobody looks into

static char context;
int cuCtxGetCurrent(void** current) {
    *current = &context;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** primary, int) { return cuCtxGetCurrent(primary); }
int cuCtxGetDevice(int* device) { return cudaGetDevice(device); }

// ---- Kernels

CREATE(cuModuleLoad)
CREATE(cuModuleLoadData)
CREATE(cuModuleLoadDataEx)
CREATE(cuModuleGetFunction)
LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernelEx)
LAUNCH(cuLaunchCooperativeKernel)

int cuFuncGetAttribute(int* value, int attribute, void*) {
    constexpr int MAX_THREADS_PER_BLOCK = 0;
    constexpr int REGISTERS = 4;
    *value = 0;
    if (attribute == MAX_THREADS_PER_BLOCK) *value = 1024;
    if (attribute == REGISTERS) *value = 32;
    return 0;
}
int cuOccupancyMaxActiveClusters(int* number) {
    *number = 16;
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* number, void*, int, size_t) {
    *number = 2;
    return 0;
}
int cuPointerGetAttribute(void* value, int, uint64_t address) {
    *static_cast<uint64_t*>(value) = address;
    return 0;
}
int cuGetErrorString(int, const char** text) {
    *text = "null GPU";
    return 0;
}

// ---- No effect

NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleUnload)
NOTHING(cuLinkCreate_v2)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuTensorMapEncodeTiled)

}  // extern "C"
