// Products in whole numbers for avx512; setup.py gives this unit its compiler flags. Empty on other machines than x86-64.
#if defined(__x86_64__)
#define EDGE_AVX512 1
#define EDGE_INTEGER integer_product_avx512
#include "integer_unit.h"
#endif
