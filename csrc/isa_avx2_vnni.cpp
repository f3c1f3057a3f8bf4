#include "simd/avx2.h"
#define SIMD avx2_vnni
#include "kernels.inl"
