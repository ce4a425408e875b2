// The kernels for avx512; setup.py gives this unit its compiler flags. Empty on other machines than x86-64.
#if defined(__x86_64__)
#define EDGE_AVX512 1
#define EDGE_TABLE kernels_avx512
#include "unit.h"
#endif
