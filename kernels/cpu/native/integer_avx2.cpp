// Products in whole numbers for avx2; setup.py gives this unit its compiler flags. Empty on other machines than x86-64.
#if defined(__x86_64__)
#define EDGE_AVX2 1
#define EDGE_INTEGER integer_product_avx2
#include "integer_unit.h"
#endif
