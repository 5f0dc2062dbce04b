// What the libraries of the null GPU share: counters and copies on the device.
#pragma once

#include <cstddef>

// A matrix product, a convolution and a Triton kernel are launches too.
#define NULL_GPU_COUNTERS(DO)                                                                      \
    DO(launches) DO(matrix_products) DO(convolutions) DO(triton_launches) DO(collectives)          \
    DO(stream_waits) DO(event_waits) DO(device_synchronizations)                                   \
    DO(pageable_copies) DO(pinned_copies) DO(device_copies) DO(memsets) DO(allocations)

enum class Counter {
#define DECLARE(name) name,
    NULL_GPU_COUNTERS(DECLARE)
#undef DECLARE
    end
};

void count(Counter counter);

// Count a kernel. It does nothing, but from now on the content of device memory is unknown.
void launch();
void launch(Counter kind);

// Copy between two addresses of device memory.
void copy_on_device(void* target, const void* source, size_t bytes);
