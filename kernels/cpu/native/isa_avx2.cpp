// The kernels for avx2; setup.py gives this unit its compiler flags. Empty on other machines than x86-64.
#if defined(__x86_64__)
#define EDGE_AVX2 1
#define EDGE_TABLE kernels_avx2
#include "unit.h"
#endif
