#include "simd/avx512.h"
#define SIMD avx512
#include "kernels.inl"
