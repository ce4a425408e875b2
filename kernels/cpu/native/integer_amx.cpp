// Products in whole numbers for amx; setup.py gives this unit its compiler flags. Empty where table.h says so.
#include "table.h"
#if defined(EDGE_HAS_AMX)
#define EDGE_AVX512 1
#define EDGE_VNNI 1
#define EDGE_AMX 1
#define EDGE_INTEGER integer_product_amx
#include "integer_unit.h"
#endif
