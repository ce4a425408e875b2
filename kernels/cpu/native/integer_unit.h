// The body of one unit of products that tile registers can form, too: the same source for all of them. EDGE_INTEGER names
// what it gives to the ISA units.
#include "table.h"

#if defined(EDGE_AVX512) || defined(EDGE_AVX2)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace edge {
namespace {

#include "lanes.h"
#include "tiles.h"
#include "integer_lanes.h"
#include "integer.h"
#include "terms.h"

}  // namespace

void EDGE_INTEGER(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    if (w.format == BF16X2)
        product_of_terms(w, x, out, T, add, then);
    else
        product_of_codes(w, x, out, T, add, then);
}

}  // namespace edge
