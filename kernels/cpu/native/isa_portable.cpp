// The kernels for any machine: NEON on 64-bit ARM, elsewhere plain C with fmaf, slow and with the same bits.
#define EDGE_TABLE kernels_portable
#include "unit.h"
