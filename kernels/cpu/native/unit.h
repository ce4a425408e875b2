// The body of one ISA unit: the same source for all of them. EDGE_TABLE names the unit's table.
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
#include "matmul.h"
#include "rows.h"
#include "gate.h"
#include "experts.h"
#include "attention.h"
#include "swaps.h"
#include "quantise.h"

}  // namespace

const Kernels* EDGE_TABLE() {
    static const Kernels table = {linear_with_bias, rms_norm, head_norm_rope, soft_cap, paged_attention,
                                  gate_topk,     grouped_ffn,      combine,  exp_row,        tanh_row, finite, fma_turns,
                                  swap_search,   expert_inner,     quantise, neurons_of_row};
    return &table;
}

}  // namespace edge
