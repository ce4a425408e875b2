// The body of one integer unit: the same source for all of them. EDGE_INTEGER names what it gives to the ISA units.
#include "table.h"

#if defined(EDGE_AVX512) || defined(EDGE_AVX2)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace edge {
namespace {

#include "lanes.h"
#include "tiles.h"
#include "integer_lanes.h"
#include "integer.h"

}  // namespace

void EDGE_INTEGER(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    product_of_codes(w, x, out, T, add, then);
}

}  // namespace edge
