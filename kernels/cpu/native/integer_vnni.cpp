// Products in whole numbers for vnni; setup.py gives this unit its compiler flags. Empty on other machines than x86-64.
#if defined(__x86_64__)
#define EDGE_AVX512 1
#define EDGE_VNNI 1
#define EDGE_INTEGER integer_product_vnni
#include "integer_unit.h"
#endif
