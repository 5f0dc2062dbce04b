// The counters, and how a process reports them.
#include "null_gpu.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unistd.h>

namespace {

const char* const NAMES[] = {
#define NAME(name) #name,
    NULL_GPU_COUNTERS(NAME)
#undef NAME
};

constexpr int SIZE = static_cast<int>(Counter::end);
std::atomic<long> counters[SIZE];

}  // namespace

void count(Counter counter) { counters[static_cast<int>(counter)]++; }

// Return the counters since the start of the process, as a JSON object.
extern "C" const char* null_gpu_counts() {
    thread_local std::string text;
    text = "{";
    for (int i = 0; i < SIZE; i++) {
        if (i > 0) text += ", ";
        text += '"' + std::string(NAMES[i]) + "\": " + std::to_string(counters[i]);
    }
    text += "}";
    return text.c_str();
}

// A process that has used the device leaves its counters in a file of the folder NULL_GPU_COUNTS.
__attribute__((destructor)) static void report() {
    const char* folder = getenv("NULL_GPU_COUNTS");
    if (!folder || counters[static_cast<int>(Counter::allocations)] == 0) return;

    std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".json";
    if (FILE* file = fopen(path.c_str(), "w")) {
        fputs(null_gpu_counts(), file);
        fclose(file);
    }
}
