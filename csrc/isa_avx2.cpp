#include "simd/avx2.h"
#define SIMD avx2
#include "kernels.inl"
