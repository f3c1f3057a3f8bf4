#include "simd/scalar.h"
#define SIMD scalar
#include "kernels.inl"
