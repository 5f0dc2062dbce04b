// The functions of cuBLAS and of cuDNN's older interface (v7) that torch calls, without a device.
//
// C linkage does not compare signatures: a function that only counts takes no arguments here.
// Handles and descriptors are pointers that nobody follows. All functions return 0, for success.
#include "null_gpu.h"

#include <cstdlib>
#include <cstring>

extern "C" {

#define KERNEL(function)                                                                           \
    int function() {                                                                               \
        launch();                                                                                  \
        return 0;                                                                                  \
    }
#define MATRIX_PRODUCT(function)                                                                   \
    int function() {                                                                               \
        launch(Counter::matrix_products);                                                          \
        return 0;                                                                                  \
    }
#define CONVOLUTION(function)                                                                      \
    int function() {                                                                               \
        launch(Counter::convolutions);                                                             \
        return 0;                                                                                  \
    }
#define NOTHING(function)                                                                          \
    int function() { return 0; }
#define CREATE(function)                                                                           \
    int function(void** handle) {                                                                  \
        *handle = malloc(1);                                                                       \
        return 0;                                                                                  \
    }
#define DESTROY(function)                                                                          \
    int function(void* handle) {                                                                   \
        free(handle);                                                                              \
        return 0;                                                                                  \
    }

// ---- cuBLAS

MATRIX_PRODUCT(cublasGemmEx)
MATRIX_PRODUCT(cublasGemmStridedBatchedEx)
MATRIX_PRODUCT(cublasSgemm_v2)
MATRIX_PRODUCT(cublasSgemmEx)
MATRIX_PRODUCT(cublasSgemmStridedBatched)
MATRIX_PRODUCT(cublasSgemv_v2)
MATRIX_PRODUCT(cublasDgemm_v2)
MATRIX_PRODUCT(cublasDgemmStridedBatched)
MATRIX_PRODUCT(cublasDgemv_v2)
MATRIX_PRODUCT(cublasDotEx)
MATRIX_PRODUCT(cublasSdot_v2)
MATRIX_PRODUCT(cublasDdot_v2)
MATRIX_PRODUCT(cublasLtMatmul)

CREATE(cublasCreate_v2)
DESTROY(cublasDestroy_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)

static int math_mode = 0;
int cublasSetMathMode(void*, int mode) {
    math_mode = mode;
    return 0;
}
int cublasGetMathMode(void*, int* mode) {
    *mode = math_mode;
    return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
    *mode = 0;
    return 0;
}

CREATE(cublasLtMatmulDescCreate)
CREATE(cublasLtMatrixLayoutCreate)
CREATE(cublasLtMatmulPreferenceCreate)
DESTROY(cublasLtMatmulDescDestroy)
DESTROY(cublasLtMatrixLayoutDestroy)
DESTROY(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmulPreferenceSetAttribute)

// The size of cublasLtMatmulHeuristicResult_t.
constexpr size_t HEURISTIC_BYTES = 96;
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* results, int* number) {
    memset(results, 0, HEURISTIC_BYTES);
    *number = 1;
    return 0;
}

// ---- cuDNN

CREATE(cudnnCreate)
NOTHING(cudnnSetStream)
int cudnnGetStream(void*, void** stream) {
    *stream = nullptr;
    return 0;
}

CREATE(cudnnCreateTensorDescriptor)
CREATE(cudnnCreateFilterDescriptor)
CREATE(cudnnCreateConvolutionDescriptor)
CREATE(cudnnCreatePoolingDescriptor)
CREATE(cudnnCreateActivationDescriptor)
DESTROY(cudnnDestroyTensorDescriptor)
DESTROY(cudnnDestroyFilterDescriptor)
DESTROY(cudnnDestroyConvolutionDescriptor)
DESTROY(cudnnDestroyPoolingDescriptor)
DESTROY(cudnnDestroyActivationDescriptor)
NOTHING(cudnnSetTensorNdDescriptor)
NOTHING(cudnnSetFilterNdDescriptor)
NOTHING(cudnnSetConvolutionNdDescriptor)
NOTHING(cudnnSetConvolutionGroupCount)
NOTHING(cudnnSetConvolutionMathType)
NOTHING(cudnnSetPooling2dDescriptor)
NOTHING(cudnnSetActivationDescriptor)

CONVOLUTION(cudnnConvolutionForward)
CONVOLUTION(cudnnConvolutionBackwardData)
CONVOLUTION(cudnnConvolutionBackwardFilter)
KERNEL(cudnnBatchNormalizationForwardTrainingEx)
KERNEL(cudnnBatchNormalizationForwardInference)
KERNEL(cudnnBatchNormalizationBackwardEx)
KERNEL(cudnnPoolingForward)

// cudnnConvolutionFwdAlgoPerf_t; those of the backward pass have the same layout.
struct Algorithm {
    int number;
    int status;
    float time;
    size_t workspace_bytes;
    int is_deterministic;
    int math_type;
    int reserved[3];
};

constexpr int FMA_MATH = 3;  // CUDNN_FMA_MATH

static int one_algorithm(int* found, Algorithm* algorithm) {
    *algorithm = {1, 0, 1.0f, 0, 1, FMA_MATH, {}};
    *found = 1;
    return 0;
}

#define CHOOSE_ALGORITHM(function)                                                                 \
    int function(void*, void*, void*, void*, void*, int, int* found, Algorithm* algorithms) {      \
        return one_algorithm(found, algorithms);                                                   \
    }
CHOOSE_ALGORITHM(cudnnGetConvolutionForwardAlgorithm_v7)
CHOOSE_ALGORITHM(cudnnGetConvolutionBackwardDataAlgorithm_v7)
CHOOSE_ALGORITHM(cudnnGetConvolutionBackwardFilterAlgorithm_v7)

#define MEASURE_ALGORITHMS(function)                                                               \
    int function(void*, void*, void*, void*, void*, void*, void*, void*, int, int* found,          \
                 Algorithm* algorithms, void*, size_t) {                                           \
        return one_algorithm(found, algorithms);                                                   \
    }
MEASURE_ALGORITHMS(cudnnFindConvolutionForwardAlgorithmEx)
MEASURE_ALGORITHMS(cudnnFindConvolutionBackwardDataAlgorithmEx)
MEASURE_ALGORITHMS(cudnnFindConvolutionBackwardFilterAlgorithmEx)

static int no_workspace(size_t* bytes) {
    *bytes = 0;
    return 0;
}

#define CONVOLUTION_WORKSPACE(function)                                                            \
    int function(void*, void*, void*, void*, void*, int, size_t* bytes) {                          \
        return no_workspace(bytes);                                                                \
    }
CONVOLUTION_WORKSPACE(cudnnGetConvolutionForwardWorkspaceSize)
CONVOLUTION_WORKSPACE(cudnnGetConvolutionBackwardDataWorkspaceSize)
CONVOLUTION_WORKSPACE(cudnnGetConvolutionBackwardFilterWorkspaceSize)

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*,
                                                             void*, void*, size_t* bytes) {
    return no_workspace(bytes);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*,
                                                         size_t* bytes) {
    return no_workspace(bytes);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*,
                                                      void*, void*, void*, size_t* bytes) {
    return no_workspace(bytes);
}

}  // extern "C"
